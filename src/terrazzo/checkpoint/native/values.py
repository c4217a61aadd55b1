"""Values that are not tensors, where they are stored in data files: which bytes of which chunks they are.

There a value is a tensor of bytes with one dim, which may be cut into chunks as any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from terrazzo.checkpoint.native.chunks import Overlap
from terrazzo.checkpoint.native.files import check_room
from terrazzo.checkpoint.native.overlaps import Overlaps, complete_parts
from terrazzo.checkpoint.native.root import TENSOR, Root
from terrazzo.checkpoint.stores.base import Store
from terrazzo.errors import CheckpointCorruptError, CheckpointError
from terrazzo.layout.box import Box


class StoredValue(msgspec.Struct, frozen=True):
    """A value in data files: its kind (see `root`), and the parts that together are its bytes."""

    kind: int
    box: Box
    parts: Sequence[Overlap]


def stored_value(manifest: Root, name: str, store: Store) -> StoredValue:
    """Where a value lies that is in data files; raises if there is none of this name, or not all of it."""
    kind = manifest.names.get(name)
    if kind is None:
        raise CheckpointError(f"the checkpoint has no value {name!r}")
    if kind == TENSOR:
        raise CheckpointError(f"{name!r} is a tensor in the checkpoint, so it cannot be read as another value")
    dtype, shape, chunks = manifest.describe(name)
    if dtype != "uint8" or len(shape) != 1:
        raise CheckpointCorruptError(
            f"{manifest.source}: {name!r} is said to be no tensor, but to have the dtype {dtype} and the shape {shape}"
        )
    box = Box.whole(shape)
    parts = complete_parts(name, box, Overlaps().of(chunks, box))
    check_room(store, manifest.data_files_of(name), box.numel, repr(name))
    return StoredValue(kind, box, parts)
