"""Recognising what lies at a path."""

from __future__ import annotations

import os
from enum import Enum

from terrazzo.checkpoint.formats.dcp_metadata import METADATA
from terrazzo.checkpoint.formats.dcp_reader import DCPReader
from terrazzo.checkpoint.formats.deepspeed import DeepSpeedReader
from terrazzo.checkpoint.formats.huggingface.files import SUFFIX, is_checkpoint
from terrazzo.checkpoint.formats.huggingface.reader import HuggingFaceReader
from terrazzo.checkpoint.formats.safetensors_header import is_start_of_safetensors
from terrazzo.checkpoint.formats.torch_archive import START, is_start_of_archive
from terrazzo.checkpoint.formats.torch_save_reader import TorchSaveReader
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.names import LATEST, named_by_latest
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointFormatError, CheckpointNotFoundError


class Format(Enum):
    """Kinds of checkpoints."""

    NATIVE = "native"
    DCP = "dcp"
    TORCH_SAVE = "torch_save"
    DEEPSPEED = "deepspeed"
    HUGGINGFACE = "huggingface"


def detect(path: str | os.PathLike[str] | Place) -> Format | None:
    """The format of the checkpoint at `path`; None if it is none that is known.

    >>> import tempfile, torch
    >>> with tempfile.NamedTemporaryFile(suffix=".pt") as file:
    ...     torch.save({"w": torch.zeros(1)}, file.name)
    ...     detect(file.name)
    <Format.TORCH_SAVE: 'torch_save'>
    """
    place = path if isinstance(path, Place) else Place(path)
    if place.is_file():
        first, size = _first_bytes(place)
        if place.name.endswith(SUFFIX) and is_start_of_safetensors(first, size):
            return Format.HUGGINGFACE
        return Format.TORCH_SAVE if is_start_of_archive(first) else None
    names = set(place.names()) if place.local is None or place.is_dir() else set()
    if not names and not place.is_dir():
        what = "neither a file nor a folder" if place.exists() else "nothing"
        raise CheckpointNotFoundError(f"there is {what} at {place}")
    if MANIFEST in names:
        return Format.NATIVE
    if METADATA in names or any(name.startswith("__") and name.endswith(METADATA) for name in names):
        return Format.DCP
    if _is_deepspeed_tag(names) or _latest_is_deepspeed(place, names):
        return Format.DEEPSPEED
    return Format.HUGGINGFACE if is_checkpoint(names) else None


def reader_for(path: str | os.PathLike[str] | Place) -> StorageReader | None:
    """A reader of the checkpoint at `path`, if it is of another system's format."""
    place = path if isinstance(path, Place) else Place(path)
    try:
        found = detect(place)
    except CheckpointNotFoundError:
        if place.local is not None and place.local.exists():
            raise
        return None
    if found is Format.DCP:
        return DCPReader(place)
    if found is Format.DEEPSPEED:
        return DeepSpeedReader(place)
    if found is Format.HUGGINGFACE:
        return HuggingFaceReader(place)
    return TorchSaveReader(place) if found is Format.TORCH_SAVE else None


def _first_bytes(place: Place) -> tuple[bytes, int]:
    """The beginning of a file, and how large it is."""
    file = place.open()
    try:
        data = bytearray(min(START, file.size))
        file.read_into(0, [memoryview(data)])
        return bytes(data), file.size
    finally:
        file.close()


def _is_deepspeed_tag(names: set[str]) -> bool:
    return any(name.endswith(("_model_states.pt", "-model_states.pt", "_optim_states.pt")) for name in names)


def _latest_is_deepspeed(path: Place, names: set[str]) -> bool:
    """`latest`, or `latest_universal`, holds the name of a folder beside it."""
    try:
        folders = named_by_latest(path) if names.intersection(LATEST) else []
    except CheckpointFormatError:  # a file of this name that means something else
        return False
    return any(folder.is_dir() and _is_deepspeed_tag(set(folder.names())) for folder in folders)
