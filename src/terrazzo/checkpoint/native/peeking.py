"""Reading a few bytes of a checkpoint into arrays: the elements that are shown of a tensor, and other values.

Loads go through `requests`, which reads much at once.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from terrazzo.checkpoint.native.codec import decode_frame
from terrazzo.checkpoint.native.files import gone, room_for
from terrazzo.checkpoint.native.format import checksum
from terrazzo.checkpoint.native.spans import StoredChunk, spans
from terrazzo.checkpoint.stores.base import Request, Store
from terrazzo.errors import CheckpointCorruptError
from terrazzo.layout.box import Box

Array = np.ndarray[Any, Any]
_WINDOW: Final = 1 << 20  # bytes that are read at once of rows that lie close together


def box_of_chunk(store: Store, chunk: StoredChunk, box: Box) -> Array:
    """The elements of a box of a stored chunk, checked: an array of bytes, whose last dim is an element's."""
    itemsize = chunk.itemsize
    found = np.empty((*box.lengths, itemsize), np.uint8)
    if found.size == 0:
        return found
    for span in spans(
        box, chunk.shape, chunk.nbytes, itemsize, block=chunk.block, gap=0, limit=_WINDOW, bounded=bool(chunk.codec)
    ):
        data = _checked(store, chunk, span.low, span.high)
        strides = (*(stride * itemsize for stride in span.geometry.strides), 1)
        elements: Array = np.ndarray((*span.box.lengths, itemsize), np.uint8, data, span.first, strides)
        found[(*span.box.relative_to(box).slices(), slice(None))] = elements
    return found


def _checked(store: Store, chunk: StoredChunk, low: int, high: int) -> bytes:
    """Bytes of a chunk from the beginning of a block to that of another one, or to the chunk's end."""
    first, count = low // chunk.block, -(-(high - low) // chunk.block)
    sizes = [min(chunk.block, chunk.nbytes - start) for start in range(low, high, chunk.block)]
    start, stored = chunk.start + low, sizes
    if chunk.codec:
        frames = chunk.frames[chunk.first_frame : chunk.first_frame + first + count].astype(np.int64)
        start, stored = chunk.start + int(frames[:first].sum()), frames[first:].tolist()
    memory = _read(store, chunk.file.name, start, sum(stored))
    blocks = []
    for number, (size, nbytes) in enumerate(zip(stored, sizes, strict=True), chunk.first_sum + first):
        block, memory = memory[:size], memory[size:]
        if checksum(block) != chunk.sums.item(number):
            raise CheckpointCorruptError(
                f"{chunk.name!r}: what {store.location}/{chunk.file.name} has of it is not what was saved; the "
                f"checkpoint is damaged (terrazzo verify lists all damage)"
            )
        blocks.append(decode_frame(block, nbytes, chunk.itemsize) if chunk.codec else block)
    return b"".join(blocks)


def _read(store: Store, key: str, start: int, nbytes: int) -> memoryview:
    data = room_for(store, key, nbytes)
    try:
        for _ in store.read([Request(key, start, [data])]):
            pass
    except FileNotFoundError as error:
        raise gone(store.location, error) from error
    except EOFError as error:
        raise CheckpointCorruptError(f"a data file is shorter than the checkpoint says: {error}") from error
    return data
