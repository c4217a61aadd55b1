"""Checkpoints of other systems, read and written behind terrazzo's interfaces; and the ways between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo._late import late

if TYPE_CHECKING:
    from terrazzo.checkpoint.formats.dcp import DCPReader, DCPWriter
    from terrazzo.checkpoint.formats.deepspeed import DeepSpeedReader
    from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
    from terrazzo.checkpoint.formats.huggingface import HuggingFaceReader, HuggingFaceWriter
    from terrazzo.checkpoint.formats.registry import detect, register
    from terrazzo.checkpoint.formats.source import Source
    from terrazzo.checkpoint.formats.table import BoxReader
    from terrazzo.checkpoint.formats.torch_save import TorchSaveReader

__all__ = [
    "BoxReader",
    "Checked",
    "DCPReader",
    "DCPWriter",
    "DeepSpeedReader",
    "Format",
    "Found",
    "HuggingFaceReader",
    "HuggingFaceWriter",
    "Source",
    "TorchSaveReader",
    "Writing",
    "detect",
    "register",
]

__getattr__, __dir__ = late(__name__)
