"""Weights as Hugging Face libraries keep them: safetensors files, and an index if there are several."""

from terrazzo.checkpoint.formats.huggingface.format import HuggingFaceReader
from terrazzo.checkpoint.formats.huggingface.layout import FileLayout, WeightsLayout, lay_out
from terrazzo.checkpoint.formats.huggingface.writer import HuggingFaceWriter

__all__ = ["FileLayout", "HuggingFaceReader", "HuggingFaceWriter", "WeightsLayout", "lay_out"]
