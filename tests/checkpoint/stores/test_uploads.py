"""Files that are sent from where their parts lie, and requests that are answered as they arrive."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.checkpoint import NativeReader, NativeWriter, async_save, load, save
from terrazzo.checkpoint.native import writer
from terrazzo.checkpoint.native.tensors import bytes_of
from terrazzo.checkpoint.native.writer import WriteOptions
from terrazzo.checkpoint.stores import Capabilities, GrowingUpload, MemoryStore, Request, ScatteredUpload, Upload
from terrazzo.checkpoint.stores.object_store import ObjectStore
from terrazzo.errors import CheckpointException


def sent(write: Any) -> list[memoryview]:
    found: list[Sequence[memoryview]] = []
    upload = ScatteredUpload(found.append)
    write(upload)
    upload.finish()
    return list(found[0])


def test_what_stays_is_sent_from_where_it_lies_and_what_does_not_is_copied() -> None:
    large, small, passing = bytearray(b"a" * 100_000), bytearray(b"b" * 10), bytearray(b"c" * 100_000)

    def write(upload: Upload) -> None:
        upload.give(5, [memoryview(large), memoryview(small), memoryview(small)])
        upload.write(100_025, [memoryview(passing)])
        upload.write(0, [memoryview(b"head ")])  # the header comes last if it depends on what was written
        passing[:] = b"x" * 100_000

    parts = sent(write)
    assert b"".join(parts) == b"head " + b"a" * 100_000 + b"b" * 20 + b"c" * 100_000
    assert [part.obj is large for part in parts] == [False, True, False, False]


def test_a_hole_is_no_file() -> None:
    upload = ScatteredUpload(lambda parts: pytest.fail("it was sent"))
    upload.write(0, [memoryview(b"abc")])
    upload.give(4, [memoryview(b"e")])
    with pytest.raises(ValueError, match="byte 3"):
        upload.finish()


@pytest.mark.parametrize("bound", [0, 5, 11, 100])
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_file_grows_from_memory_into_an_upload_of_its_own(bound: int, is_finished: bool) -> None:
    store = MemoryStore()
    upload = GrowingUpload(lambda data: store.put("small", data), lambda: store.upload("large", 0), bound)
    for offset, buffers in ((0, [b"hello"]), (5, [b" ", b"wor", b""]), (9, []), (9, [b"ld"])):
        upload.write(offset, [memoryview(buffer) for buffer in buffers])
    with pytest.raises(ValueError, match="must begin at byte 11, not at 5"):
        upload.write(5, [memoryview(b"again")])
    if is_finished:
        upload.finish()
    upload.abort()
    name = "small" if bound >= 11 else "large"
    assert [(entry.key, store.get(entry.key)[0]) for entry in store.list()] == [(name, b"hello world")] * is_finished


def test_memory_of_a_tensor_keeps_it_alive() -> None:
    """What a client still holds when a request has failed must not be somebody else's by then."""
    tensor = torch.arange(1000, dtype=torch.int64)
    expected = tensor.numpy().tobytes()
    view = bytes_of(tensor)[8:]
    del tensor
    others = [torch.full((1000,), -1) for _ in range(50)]
    assert bytes(view) == expected[8:] and others


class ScatteredStore(MemoryStore):
    """A store in memory whose files are sent from where their parts lie, as those of an object store are."""

    caps = ObjectStore.caps

    def upload(self, key: str, size: int) -> Upload:
        return ScatteredUpload(lambda parts: self.put(key, b"".join(parts)) and None)


@pytest.mark.parametrize("compression", [False, True])
@pytest.mark.parametrize("in_background", [False, True])
def test_saved_from_where_it_lies(compression: bool, in_background: bool) -> None:
    state = {f"t{n}": torch.randn(n * 37 + 1, 60) for n in range(100)}
    state |= {"turned": torch.randn(300, 500).t(), "large": torch.randn(2500, 2500), "none": torch.empty(0, 3)}
    store = ScatteredStore()
    writer = NativeWriter(store, WriteOptions(compression=compression))
    if in_background:
        async_save(state, storage_writer=writer, no_dist=True).result(60)
    else:
        save(state, storage_writer=writer, no_dist=True)
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    load(found, storage_reader=NativeReader(store), no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in state.items())


class Slow(MemoryStore):
    """A store like a bucket that answers a request for the first bytes of a tensor after all others."""

    def __init__(self) -> None:
        super().__init__(Capabilities(request_bytes=1 << 10, readers=8, depth=8))
        self.others = threading.Semaphore(0)
        self.held_up = 0  # how many answers the slow one waits for
        self.answered = 0

    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            (_,) = super().read([request])
            if self.held_up and request.start <= 4096:  # where the data of a file begins
                wanted, self.held_up = self.held_up, 0
                for _ in range(wanted):
                    assert self.others.acquire(timeout=30), "the others wait for this one"
            self.answered += 1
            self.others.release()
            yield request


def test_a_slow_answer_holds_up_no_other_request() -> None:
    """Of a store that takes its time for each answer, so many requests are under way from the beginning."""
    store, before = Slow(), threading.enumerate()
    state = {f"{n:02}": torch.arange(1000.0) + n for n in range(40)}
    save(state, storage_writer=NativeWriter(store), no_dist=True)
    target = {name: torch.zeros(1000) for name in state}
    store.held_up = 30
    load(target, storage_reader=NativeReader(store, verify=False), no_dist=True)
    assert all(torch.equal(target[name], state[name]) for name in state)
    assert store.held_up == 0 and store.answered >= 31 and threading.enumerate() == before


def test_stores_of_one_bucket_share_a_client_unless_settings_or_the_environment_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = ObjectStore("s3://bucket/one", region="nowhere")
    assert ObjectStore("s3://bucket/two", region="nowhere")._client is first._client
    assert ObjectStore("s3://bucket/one", region="elsewhere")._client is not first._client
    assert ObjectStore("s3://other/one", region="nowhere")._client is not first._client
    retry = {"retry_timeout": timedelta(seconds=1)}
    assert ObjectStore("s3://bucket/one", region="nowhere", retry_config=retry)._client is not first._client
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert ObjectStore("s3://bucket/one", region="nowhere")._client is not first._client


def test_large_requests_are_of_bytes_that_go_where_they_belong() -> None:
    """What passes through buffers is asked for in smaller requests, for the buffers of all under way add up."""
    state = {"in place": torch.arange(3 << 20), "turned": torch.arange(3 << 20).view(1024, -1)}
    store = Recorded()
    save(state, storage_writer=NativeWriter(store), no_dist=True)
    found = {name: torch.zeros(value.shape[::-1], dtype=torch.int64).t() for name, value in state.items()}
    load(found, storage_reader=NativeReader(store), no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    sizes = [request.size for request in store.requests if request.owner.buffer is None]
    assert max(sizes) > 16 << 20
    staged = [len(request.owner.buffer.memory) for request in store.requests if request.owner.buffer is not None]
    assert staged and max(staged) * store.caps.depth < 66 << 20


class Recorded(ScatteredStore):
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__(ObjectStore.caps)
        self.requests: list[Request] = []

    def read(self, requests: Any) -> Any:
        for request in super().read(requests):
            self.requests.append(request)
            yield request


def test_a_file_whose_part_cannot_be_described_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a single file is left to the disk while the part is described; if that fails nothing of it stays."""
    save({"w": torch.zeros(100)}, checkpoint_id=tmp_path, no_dist=True)
    before = sorted(path.name for path in tmp_path.iterdir())
    descriptors = len(os.listdir("/proc/self/fd"))
    seen: list[str] = []

    def fails(*_: object) -> None:
        seen.extend(path.name for path in tmp_path.glob("data-*"))
        raise RuntimeError("no part")

    monkeypatch.setattr(writer, "make_part", fails)
    with pytest.raises(CheckpointException, match="no part"):
        save({"w": torch.ones(100)}, checkpoint_id=tmp_path, no_dist=True)
    assert len(seen) == 2  # it was there
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    target = {"w": torch.full((100,), 5.0)}
    load(target, checkpoint_id=tmp_path, no_dist=True)
    assert not target["w"].any()
