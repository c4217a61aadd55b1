"""Pixels as a PNG file: the signature and three kinds of chunks (W3C, Portable Network Graphics, section 5)."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TRUE_COLOUR = 2
_UNFILTERED = 0  # drawings compress best as they are


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file of pixels [height, width, red-green-blue].

    >>> encode_png(np.zeros((1, 1, 3), np.uint8))[12:16]
    b'IHDR'
    """
    height, width, _ = pixels.shape
    lines = np.concatenate([np.full((height, 1), _UNFILTERED, np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, _TRUE_COLOUR, 0, 0, 0)
    return b"".join(
        [
            SIGNATURE,
            _chunk(b"IHDR", header),
            _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
            _chunk(b"IEND", b""),
        ]
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
