"""The formats that checkpoints may have.  Whoever is given a checkpoint's place asks here what is there."""

from __future__ import annotations

import importlib
import os
import warnings
from importlib.metadata import entry_points
from typing import Final

from terrazzo.checkpoint.formats.format import Format, Found
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.names import named_by_latest
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import CheckpointFormatError, CheckpointNotFoundError

# In the order in which they are asked; the first that finds a checkpoint has it.  Those that come with terrazzo are
# loaded when they are asked: most checkpoints are native, and the others' modules are many.
_formats: dict[str, Format | str] = {
    "native": "native:Native",
    "dcp": "dcp:DCP",
    "deepspeed": "deepspeed.format:DeepSpeed",
    "huggingface": "huggingface.format:HuggingFace",
    "safetensors": "safetensors:Safetensors",
    "torch_save": "torch_save:TorchSave",
}


# Packages that bring a format name its class in their metadata: `[project.entry-points."terrazzo.formats"]`.
GROUP: Final = "terrazzo.formats"


_asked = False


def _brought() -> None:
    """Register the formats that installed packages bring; one that cannot be loaded is left out, with a warning."""
    global _asked
    if _asked:
        return
    _asked = True  # first of all: a package may ask for formats while it is loaded
    for entry in entry_points(group=GROUP):
        try:
            register(entry.load()())
        except Exception as error:  # whatever is wrong with a package, all other formats work
            warnings.warn(
                f"the checkpoint format {entry.name!r} ({entry.value}) cannot be used: {type(error).__name__}: {error}",
                stacklevel=2,
            )


def register(format: Format) -> None:
    """From now on checkpoints of this format are read, written and compared as any other.

    It is asked what a place has before the formats that are known already.
    """
    global _formats
    if format.name in _formats:
        raise CheckpointFormatError(f"there is a format {format.name} already; give this one another name")
    _formats = {format.name: format, **_formats}


def names() -> list[str]:
    """What the formats are called.

    >>> names()
    ['native', 'dcp', 'deepspeed', 'huggingface', 'safetensors', 'torch_save']
    """
    _brought()
    return [*_formats]


def named(name: str) -> Format:
    """The format of this name."""
    _brought()
    found = _formats.get(name)
    if found is None:
        raise CheckpointFormatError(f"there is no format {name!r} of checkpoints; there are {', '.join(names())}")
    if isinstance(found, str):
        module, _, kind = found.partition(":")
        made: Format = getattr(importlib.import_module(f"terrazzo.checkpoint.formats.{module}"), kind)()
        found = _formats[name] = made
    return found


def that_take(option: str) -> list[str]:
    """The names of the formats that understand an option of `convert`."""
    return [name for name in names() if option in named(name).options]


def find(path: str | os.PathLike[str] | Place | Store) -> tuple[Format, Place] | None:
    """The format of what lies at a path, a URL or in a store, and where exactly it is; None if no format is known."""
    found = Found(path if isinstance(path, Place) else Place(path))
    for name in names():
        format = named(name)
        place = format.find(found)
        if place is not None:
            return format, place
    return None


def detect(path: str | os.PathLike[str] | Place | Store) -> str | None:
    """The name of the format of the checkpoint at `path`; None if it is none that is known.

    >>> import tempfile, torch
    >>> with tempfile.NamedTemporaryFile(suffix=".pt") as file:
    ...     torch.save({"w": torch.zeros(1)}, file.name)
    ...     detect(file.name)
    'torch_save'
    """
    place = path if isinstance(path, Place) else Place(path)
    found = find(place)
    if found is None:
        _check_there(place)
        return None
    return found[0].name


def located(path: str | os.PathLike[str] | Place | Store) -> tuple[Format, Place]:
    """The format of the checkpoint at a path, a URL or in a store, and where exactly it is; raises if there is none."""
    place = path if isinstance(path, Place) else Place(path)
    found = find(place)
    if found is not None:
        return found
    _check_there(place)
    named_by_latest(place)  # which says what is wrong with it
    raise CheckpointNotFoundError(
        f"there is no committed checkpoint at {place}: neither a {MANIFEST} nor a file of another format that is known"
    )


def _check_there(place: Place) -> None:
    if not place.is_file() and not place.is_dir():
        what = "neither a file nor a folder" if place.exists() else "nothing"
        raise CheckpointNotFoundError(f"there is {what} at {place}")
