"""How often a save comes back to the interpreter: each time it may wait for a main thread that computes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.checkpoint import Checkpoint, async_save, save, verify
from terrazzo.checkpoint.native import datafile
from terrazzo.checkpoint.stores import LocalStore, Upload


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Each write to a data file: whether the main thread has made it, and its bytes."""
    found: list[tuple[bool, int]] = []
    upload = LocalStore.upload

    def counting(self: LocalStore, key: str, size: int) -> Upload:
        made = upload(self, key, size)
        write = type(made).write

        class Counting(type(made)):  # type: ignore[misc]  # whatever the store's class is
            def write(self, offset: int, buffers: Any) -> None:
                main = threading.current_thread() is threading.main_thread()
                found.append((main, sum(map(len, buffers))))
                write(self, offset, buffers)

        made.__class__ = Counting
        return made

    monkeypatch.setattr(LocalStore, "upload", counting)
    return found


@pytest.mark.parametrize(
    ("shape", "count"), [((40 << 20,), 1), ((64, 64), 2000), ((8, 1 << 20), 1)], ids=["large", "small", "long rows"]
)
def test_writes_beside_the_main_thread_are_few(
    tmp_path: Path,
    writes: list[tuple[bool, int]],
    shape: tuple[int, ...],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[int] = []
    hash_at_once = datafile.checksum

    def counted(data: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            hashed.append(len(data))
        return hash_at_once(data)

    monkeypatch.setattr(datafile, "checksum", counted)
    state_of = datafile.xxhash.xxh3_64

    class State:
        """The state of a hash, which cannot be patched."""

        def __init__(self, data: Any) -> None:
            hashed.append(len(data))
            self._state = state_of(data)

        def update(self, data: Any) -> None:
            hashed.append(len(data))
            self._state.update(data)

        def intdigest(self) -> int:
            return self._state.intdigest()

    monkeypatch.setattr(datafile.xxhash, "xxh3_64", State)
    whole = torch.arange(count * torch.Size(shape).numel(), dtype=torch.int64).to(torch.uint8)
    state = {f"t{i}": part.view(shape) for i, part in enumerate(whole.chunk(count))}
    save(state, checkpoint_id=tmp_path / "sync", no_dist=True)
    assert all(main for main, _ in writes)
    own = len(writes)
    writes.clear()
    async_save(state, checkpoint_id=tmp_path / "async", no_dist=True).result(60)
    assert not any(main for main, _ in writes)
    total = sum(nbytes for _, nbytes in writes)
    assert total >= whole.nbytes
    assert len(writes) <= total // (8 << 20) + 4 and (len(writes) < own / 4 or own <= 12)
    assert shape == (64, 64) or len(writes) <= 4  # the header, the data, the root and perhaps an index
    assert hashed and max(hashed) <= 100_000  # for more, xxhash lets go of the interpreter's lock
    for path in ("sync", "async"):
        assert verify(tmp_path / path) == []
        checkpoint = Checkpoint(tmp_path / path)
        assert all(torch.equal(checkpoint[name][...], tensor) for name, tensor in state.items())
