"""The reader of quantised safetensors files, where PyTorch has it."""

from terrazzo.checkpoint.hf_storage import QuantizedHuggingFaceStorageReader

__all__ = ["QuantizedHuggingFaceStorageReader"]
