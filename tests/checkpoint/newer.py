"""Checkpoints as a later release would write them."""

from __future__ import annotations

import shutil
from pathlib import Path

import xxhash

MANIFEST = "manifest.terrazzo"


def add_foreign(root: Path, of: Path, shared: Path, link: int = 1000) -> None:
    """Add to a run's folder what is not its manager's to remove: a step of a later release, and one behind a link.

    Both are copies of the checkpoint `of`; the link leads to `shared`.
    """
    shutil.copytree(of, root / "global_step0")
    make_newer(root / "global_step0")
    shutil.copytree(of, shared)
    (shared / "data-0123456789ab-00000.safetensors").write_bytes(b"of a save that died there")
    (root / f"global_step{link}").symlink_to(shared.absolute())


def check_foreign(root: Path, before: Path, link: int = 1000) -> None:
    """Raise if any of it is not as it was in the folder `before`."""
    of, shared = _files(before / "global_step0"), _files(root / f"global_step{link}")
    assert _files(root / "global_step0") == of and (root / f"global_step{link}").is_symlink()
    assert shared.keys() == of.keys() | {"data-0123456789ab-00000.safetensors"}
    assert all(shared[name] == of[name] for name in of if name != MANIFEST)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def make_newer(folder: Path) -> None:
    """As a release would write it whose format is one version further: docs/format.md, the preamble."""
    data = bytearray((folder / MANIFEST).read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    data[56:64] = xxhash.xxh3_64_intdigest(bytes(data[:56])).to_bytes(8, "little")
    (folder / MANIFEST).write_bytes(data)
