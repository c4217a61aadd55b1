"""Checkpoints of other systems, read and written behind terrazzo's interfaces; and the ways between them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from terrazzo.checkpoint.formats.dcp_reader import DCPReader
    from terrazzo.checkpoint.formats.dcp_writer import DCPWriter
    from terrazzo.checkpoint.formats.deepspeed import DeepSpeedReader
    from terrazzo.checkpoint.formats.format import Format, Found, ItemReader, Writing
    from terrazzo.checkpoint.formats.huggingface import HuggingFaceReader, HuggingFaceWriter
    from terrazzo.checkpoint.formats.registry import detect, register
    from terrazzo.checkpoint.formats.source import Source
    from terrazzo.checkpoint.formats.torch_save_reader import TorchSaveReader

__all__ = [
    "DCPReader",
    "DCPWriter",
    "DeepSpeedReader",
    "Format",
    "Found",
    "HuggingFaceReader",
    "HuggingFaceWriter",
    "ItemReader",
    "Source",
    "TorchSaveReader",
    "Writing",
    "detect",
    "register",
]

# Most checkpoints are native: what reads and writes the others is loaded when it is asked for.
_PLACES: Final = {
    "DCPReader": "dcp_reader",
    "DCPWriter": "dcp_writer",
    "DeepSpeedReader": "deepspeed",
    "Format": "format",
    "Found": "format",
    "ItemReader": "format",
    "Writing": "format",
    "HuggingFaceReader": "huggingface",
    "HuggingFaceWriter": "huggingface",
    "detect": "registry",
    "register": "registry",
    "Source": "source",
    "TorchSaveReader": "torch_save_reader",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
