"""The codec of chunks that are stored compressed: bytes shuffled by significance, then zstd.

Numbers of one tensor mostly agree in their high bytes (sign and exponent) and little in their low ones. So the first
bytes of all elements are put together, then the second ones, and so on, before zstd sees them. A block that gets no
smaller is stored as it is.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
import zstandard

from terrazzo.errors import CheckpointCorruptError

FRAME: Final = 1 << 20  # bytes of a chunk that are compressed together: what has to be read for any of them
LEVEL: Final = 3
_local = threading.local()  # two threads must not use one compressor at once


def encode_frame(data: memoryview, itemsize: int) -> bytes:
    """A block as it is stored.

    >>> frame = encode_frame(memoryview(bytes(8000)), 4)
    >>> len(frame) < 100, decode_frame(frame, 8000, 4) == bytes(8000)
    (True, True)
    """
    compressor = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(LEVEL)
    shuffled = np.frombuffer(data, np.uint8)
    if itemsize > 1:
        shuffled = np.ascontiguousarray(shuffled.reshape(-1, itemsize).T)
    frame: bytes = compressor.compress(shuffled.reshape(-1).data)
    return frame if len(frame) < len(data) else bytes(data)


def decode_frame(frame: memoryview | bytes, nbytes: int, itemsize: int) -> bytes | memoryview:
    """The `nbytes` of a block, from how it is stored."""
    if len(frame) == nbytes:
        return frame
    decompressor = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    try:
        # A frame may say that it is larger than its block: then it is damaged.
        with decompressor.stream_reader(frame) as reader:
            shuffled = reader.read(nbytes + 1)
    except zstandard.ZstdError as error:
        raise CheckpointCorruptError(f"a compressed block cannot be decompressed: {error}") from error
    if len(shuffled) != nbytes:
        raise CheckpointCorruptError(f"a compressed block has {len(shuffled)} bytes or more instead of {nbytes}")
    if itemsize == 1:
        return bytes(shuffled)
    return np.ascontiguousarray(np.frombuffer(shuffled, np.uint8).reshape(itemsize, -1).T).reshape(-1).data
