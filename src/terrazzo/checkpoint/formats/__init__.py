"""Checkpoints of other systems, read and written behind terrazzo's interfaces; and the ways between them."""

from terrazzo.checkpoint.formats.dcp_reader import DCPReader
from terrazzo.checkpoint.formats.dcp_writer import DCPWriter
from terrazzo.checkpoint.formats.deepspeed import DeepSpeedReader
from terrazzo.checkpoint.formats.detect import Format, detect, reader_for
from terrazzo.checkpoint.formats.huggingface import HuggingFaceReader, HuggingFaceWriter
from terrazzo.checkpoint.formats.torch_save_reader import TorchSaveReader

__all__ = [
    "DCPReader",
    "DCPWriter",
    "DeepSpeedReader",
    "Format",
    "HuggingFaceReader",
    "HuggingFaceWriter",
    "TorchSaveReader",
    "detect",
    "reader_for",
]
