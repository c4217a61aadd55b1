"""The known formats of checkpoints, of which terrazzo's own is one, and the search for the format of a checkpoint.

What reads and writes tensors is imported when it is asked for: to list and to verify a checkpoint needs no PyTorch.
"""

from __future__ import annotations

import importlib
import os
import warnings
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Final

from terrazzo._meant import meant, meant_beside
from terrazzo.checkpoint.formats.format import Format, Found
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.names import named_by_latest
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import CheckpointExistsError, CheckpointFormatError, CheckpointNotFoundError, TerrazzoError

# In the order in which they are tried; the first that finds a checkpoint is used. terrazzo's own ones are imported when
# they are tried: most checkpoints are native, and the others have many modules.
_formats: dict[str, Format | str] = {
    "native": "native:Native",
    "dcp": "dcp:DCP",
    "deepspeed": "deepspeed.format:DeepSpeed",
    "huggingface": "huggingface.format:HuggingFace",
    "safetensors": "huggingface.format:Safetensors",
    "torch_save": "torch_save:TorchSave",
}


# Installed packages can add formats, by `[project.entry-points."terrazzo.formats"]` with the format's class.
GROUP: Final = "terrazzo.formats"


_BEGINNING: Final = 24  # bytes of a file that an error shows
_asked = False


def _brought() -> None:
    """Register the formats of installed packages; one that cannot be imported is left out with a warning."""
    global _asked
    if _asked:
        return
    _asked = True  # first, because a package may look up formats while it is imported
    for entry in entry_points(group=GROUP):
        try:
            register(entry.load()())
        except Exception as error:  # an error in a package must not affect the other formats
            warnings.warn(
                f"the checkpoint format {entry.name!r} ({entry.value}) cannot be used: {type(error).__name__}: {error}",
                stacklevel=2,
            )


def register(format: Format) -> None:
    """Add a format, whose checkpoints can then be read, written and compared like all others.

    It is tried before the formats that are already registered.
    """
    global _formats
    if format.name in _formats:
        raise CheckpointFormatError(f"a format {format.name} is already registered: use another name")
    _formats = {format.name: format, **_formats}


def names() -> list[str]:
    """The names of the formats.

    >>> names()
    ['native', 'dcp', 'deepspeed', 'huggingface', 'safetensors', 'torch_save']
    """
    _brought()
    return [*_formats]


def named(name: str) -> Format:
    """The format with this name."""
    _brought()
    found = _formats.get(name)
    if found is None:
        raise CheckpointFormatError(
            f"there is no format {name!r} of checkpoints; there are {', '.join(names())}{meant(name, names())}"
        )
    if isinstance(found, str):
        module, _, kind = found.partition(":")
        made: Format = getattr(importlib.import_module(f"terrazzo.checkpoint.formats.{module}"), kind)()
        found = _formats[name] = made
    return found


def import_all() -> None:
    """Import the formats: a thread that saves must not, since a process that is forked meanwhile would wait for it."""
    for name in names():
        named(name)


def find(path: str | os.PathLike[str] | Place | Store) -> tuple[Format, Place] | None:
    """The format of the checkpoint at a path, a URL or in a store, and its exact place; None if none is recognised."""
    found = Found(path if isinstance(path, Place) else Place(path))
    for name in names():
        format = named(name)
        place = format.find(found)
        if place is not None:
            return format, place
    return None


def check_is_found(place: Place, name: str) -> None:
    """Raise if a checkpoint of the format `name` would not be found in a folder, because another one would be."""
    found = Found(place, follow=False)
    for other in names():
        if other == name:
            return
        if named(other).find(found) is not None:
            raise CheckpointExistsError(
                f"{place} holds a checkpoint of the format {other}, which would be read instead of one of the format "
                f"{name} beside it: save to another folder, or remove that checkpoint first"
            )


def detect(path: str | os.PathLike[str] | Place | Store) -> str | None:
    """The name of the format of the checkpoint at `path`; None if none is recognised.

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
    """The format of the checkpoint at a path, a URL or in a store, and its exact place; raises if there is none."""
    place = path if isinstance(path, Place) else Place(path)
    found = find(place)
    if found is not None:
        return found
    _check_there(place)
    if place.is_file():
        start, _ = place.start(_BEGINNING)
        what = (
            f"begins with {start!r}, as a file of no format that is known ({', '.join(names())})"
            if start
            else "is empty"
        )
        raise CheckpointNotFoundError(f"there is no checkpoint at {place}: the file {what}")
    named_by_latest(place)  # raises if `latest` is the cause
    raise CheckpointNotFoundError(
        f"there is no committed checkpoint at {place}: it has neither a {MANIFEST} nor files of another known format"
        f"{nested(place)}"
    )


def nested(place: Place) -> str:
    """The end of an error message: which checkpoints are in a folder that is none, or in its folders. Of each level the
    last 20 names are looked at; at a URL, where each look is a request, of the first level only."""
    found, below = list[Place](), [place]
    for _ in range(1 if place.local is None else 3):
        folders, below = below, []
        for folder in folders:
            with suppress(TerrazzoError, OSError):  # a file, or a folder that cannot be listed
                names = sorted(folder.names(), key=lambda name: (len(name), name), reverse=True)
                below += [folder / name for name in names]
        del below[20:]
        for each in below:
            with suppress(TerrazzoError, OSError):
                if find(each) is not None:
                    found.append(each)
        if found:
            break
    if not found:
        return ""
    others = [each.name for each in found[1:]]
    several = f" (also {', '.join(others[:3])}{', ...' if others[3:] else ''})" if others else ""
    return f"; but there is one at {found[0]}{several}"


def _check_there(place: Place) -> None:
    if not place.is_file() and not place.is_dir():
        what = "neither a file nor a folder" if place.exists() else "nothing"
        close = "" if place.local is None else meant_beside(place.local)
        raise CheckpointNotFoundError(f"there is {what} at {place}{close}")
