"""The reader of quantized safetensors files, in the module where PyTorch has it."""

from terrazzo.checkpoint.hf_storage import QuantizedHuggingFaceStorageReader

__all__ = ["QuantizedHuggingFaceStorageReader"]
