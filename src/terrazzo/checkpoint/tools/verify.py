"""`verify`: is every byte of a checkpoint the one that was saved?"""

from __future__ import annotations

import os
from collections.abc import Callable

from terrazzo.checkpoint.native.verify import Damage
from terrazzo.checkpoint.stores import Store


def verify(path: str | os.PathLike[str] | Store, progress: Callable[[int], None] = lambda nbytes: None) -> list[Damage]:
    """Read a checkpoint from end to end and list all damage; an empty list means that it is whole.

    >>> import tempfile, torch
    >>> from terrazzo.checkpoint import save
    >>> path = tempfile.mkdtemp()
    >>> _ = save({"w": torch.ones(3)}, checkpoint_id=path)
    >>> verify(path)
    []
    """
    from terrazzo.checkpoint.formats.registry import located  # formats are loaded when a checkpoint is read

    format, place = located(path)
    return format.verify(place, progress)
