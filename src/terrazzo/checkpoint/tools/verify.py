"""`verify`: is every byte of a checkpoint the one that was saved?"""

from __future__ import annotations

import os
from collections.abc import Callable

from terrazzo.checkpoint.native.storage import NativeReader
from terrazzo.checkpoint.native.verify import Damage, verify_store
from terrazzo.checkpoint.run.locate import reader_for
from terrazzo.checkpoint.stores import Place, Store
from terrazzo.errors import CheckpointFormatError


def verify(path: str | os.PathLike[str] | Store, progress: Callable[[int], None] = lambda nbytes: None) -> list[Damage]:
    """Read a checkpoint from end to end and list all damage; an empty list means that it is whole.

    >>> import tempfile, torch
    >>> from terrazzo.checkpoint import save
    >>> path = tempfile.mkdtemp()
    >>> _ = save({"w": torch.ones(3)}, checkpoint_id=path)
    >>> verify(path)
    []
    """
    reader = reader_for(path)
    if not isinstance(reader, NativeReader):
        raise CheckpointFormatError(f"{Place(path)}: only checkpoints of terrazzo's own format have checksums")
    return verify_store(reader.store, progress)
