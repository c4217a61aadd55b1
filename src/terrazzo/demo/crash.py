"""Finding the moment in which a save is half done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from terrazzo.checkpoint.native.format import MANIFEST


@dataclass(frozen=True)
class HalfSaved:
    """The files that an unfinished save has written so far."""

    files: int
    nbytes: int


def half_saved(folder: Path) -> HalfSaved | None:
    """The unfinished save in a new folder; None if none has begun to write, or it is committed.

    A save is committed by its manifest, which comes last.
    """
    try:
        sizes = [file.stat().st_size for file in folder.iterdir() if file.name.startswith("data-")]
    except FileNotFoundError:
        return None
    if not any(sizes) or (folder / MANIFEST).exists():
        return None
    return HalfSaved(len(sizes), sum(sizes))
