"""`verify`: is every byte of a checkpoint the one that was saved?"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from terrazzo.checkpoint.native.verify import Damage
from terrazzo.checkpoint.stores import Place, Store

if TYPE_CHECKING:
    from terrazzo.checkpoint.formats.format import Checked


def verify(path: str | os.PathLike[str] | Store, progress: Callable[[int], None] = lambda nbytes: None) -> list[Damage]:
    """Read a checkpoint from end to end and list all damage; an empty list means that it is whole.

    Warns if something has no checksum, as in safetensors files: then only its structure has been checked. `seal` writes
    checksums beside a checkpoint of such a format.

    >>> import tempfile, torch
    >>> from terrazzo.checkpoint import save
    >>> path = tempfile.mkdtemp()
    >>> _ = save({"w": torch.ones(3)}, checkpoint_id=path)
    >>> verify(path)
    []
    """
    checked = check(path, progress)
    if checked.unchecked:
        warnings.warn(f"{path}: {checked.unchecked}", stacklevel=2)
    return checked.damage


def check(path: str | os.PathLike[str] | Store | Place, progress: Callable[[int], None]) -> Checked:
    """All damage that can be found of a checkpoint: by its seal if it has one, or by what its format has."""
    from terrazzo.checkpoint.formats.registry import located  # formats are loaded when a checkpoint is read
    from terrazzo.checkpoint.tools.sealing import check_seal

    format, place = located(path)
    sealed = check_seal(place, progress)
    return format.verify(place, progress) if sealed is None else sealed
