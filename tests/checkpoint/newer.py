"""Checkpoints as a later release would write them."""

from __future__ import annotations

from pathlib import Path

import xxhash

MANIFEST = "manifest.terrazzo"


def make_newer(folder: Path) -> None:
    """As a release would write it whose format is one version further: docs/format.md, the preamble."""
    data = bytearray((folder / MANIFEST).read_bytes())
    data[8:12] = (3).to_bytes(4, "little")
    data[56:64] = xxhash.xxh3_64_intdigest(bytes(data[:56])).to_bytes(8, "little")
    (folder / MANIFEST).write_bytes(data)
