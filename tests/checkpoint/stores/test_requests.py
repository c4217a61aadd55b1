"""What is asked of a store when tensors are read: enough, checked, and little more."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import checkpoint_scale as scale
from terrazzo.checkpoint import Checkpoint, FileSystemReader, FileSystemWriter, load, save
from terrazzo.checkpoint.native import requests
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.requests import Pace
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.native.storage import NativeReader, NativeWriter
from terrazzo.checkpoint.stores import Capabilities, LocalStore, MemoryStore, Request
from terrazzo.errors import CheckpointException, CheckpointNotFoundError
from terrazzo.layout.box import Box

CAPS = [
    Capabilities(),
    Capabilities(request_bytes=1, gap=0),
    Capabilities(request_bytes=3000, gap=100),
    Capabilities(request_bytes=1 << 20, gap=1 << 20),
]


class Recording(MemoryStore):
    """Remembers what was asked of it."""

    def __init__(self, caps: Capabilities | None = None) -> None:
        super().__init__(caps)
        self.requests: list[Request] = []

    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        def remembered() -> Iterator[Request]:
            for request in requests:
                self.requests.append(request)
                yield request

        return super().read(remembered())


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, offsets, strict=True))
    return shape, Box(offsets, lengths)


@settings(max_examples=60, deadline=None)
@given(st.lists(boxes(), min_size=1, max_size=4), st.sampled_from(CAPS), st.booleans(), st.sampled_from(["f", "h"]))
def test_any_boxes_are_read_as_they_are(cases: list, caps: Capabilities, verify: bool, kind: str) -> None:
    dtype = {"f": torch.float32, "h": torch.bfloat16}[kind]
    state = {str(n): torch.randn(shape).to(dtype) for n, (shape, _) in enumerate(cases)}
    store = MemoryStore(caps)
    save(state, storage_writer=NativeWriter(store), no_dist=True)
    checkpoint = Checkpoint(NativeReader(store, verify=verify))
    for number, (_, box) in enumerate(cases):
        assert torch.equal(checkpoint[str(number)].read(box), state[str(number)][box.slices()])


@pytest.mark.parametrize("rows", [32, 128])
@pytest.mark.parametrize("verify", [True, False])
def test_a_column_slice_reads_little_more_than_it_wants(rows: int, verify: bool, tmp_path: Path) -> None:
    """Rows of more than 64 KiB, of which an eighth is wanted; what is not wanted is not needed for checking either."""
    tensor = torch.randn(rows, (16 << 20) // 4 // rows)
    save({"w": tensor}, checkpoint_id=tmp_path, no_dist=True)
    wide = tensor.shape[1]
    checkpoint = Checkpoint(FileSystemReader(tmp_path, verify=verify))
    part = checkpoint["w"][:, wide // 2 : wide // 2 + wide // 8]
    assert torch.equal(part, tensor[:, wide // 2 : wide // 2 + wide // 8])
    index = sum(path.stat().st_size for path in tmp_path.glob("index-*"))
    assert checkpoint.bytes_read - index <= 1.3 * part.nbytes + 8192  # and the header


def test_neighbours_are_read_together(tmp_path: Path) -> None:
    state = {f"layers.{n}.weight": torch.randn(64, 64) for n in range(300)}
    store = Recording()
    save(state, storage_writer=NativeWriter(store), no_dist=True)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    load(target, storage_reader=NativeReader(store), no_dist=True)
    assert all(torch.equal(target[name], value) for name, value in state.items())
    total = sum(value.nbytes for value in state.values())
    assert len(store.requests) <= total / (1 << 20) + 3
    assert sum(request.size for request in store.requests) <= total + 200_000  # the header


def test_what_needs_no_buffer_is_read_in_larger_requests_if_the_store_says_so() -> None:
    """Neighbours that are read where they belong come together; what passes through a buffer does not."""
    state = {str(n): torch.randn(64, 64) for n in range(40)}  # 16 KiB each
    for caps, at_once in (
        (Capabilities(request_bytes=16 << 10), 1),
        (Capabilities(request_bytes=16 << 10, direct_bytes=160 << 10), 10),
    ):
        store = Recording(caps)
        save(state, storage_writer=NativeWriter(store), no_dist=True)
        target = {name: torch.zeros_like(value) for name, value in state.items()}
        load(target, storage_reader=NativeReader(store, verify=False), no_dist=True)
        assert all(torch.equal(target[name], value) for name, value in state.items())
        assert len(store.requests) == 40 // at_once
        store.requests.clear()
        target = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in state.items()}
        load(target, storage_reader=NativeReader(store, verify=False), no_dist=True)
        assert all(torch.equal(target[name], value.double()) for name, value in state.items())
        assert len(store.requests) == 40


def test_each_part_of_a_compressed_tensor_is_read_from_its_own_blocks(tmp_path: Path) -> None:
    w = torch.arange(1_200_000.0).reshape(3000, 400)  # five blocks, of different sizes when they are compressed
    w[1000:1500] = torch.rand(500, 400)
    writer = FileSystemWriter(tmp_path, compression=True)
    save({"before": torch.rand(40, 40), "w": w}, storage_writer=writer, no_dist=True)
    stored = Checkpoint(tmp_path)["w"]
    for start, stop in ((0, 1), (1400, 1401), (700, 2100), (2999, 3000), (0, 3000)):
        assert torch.equal(stored[start:stop], w[start:stop])
        assert torch.equal(stored[start:stop, 17:19], w[start:stop, 17:19])


def test_a_header_is_read_once_however_often_one_reads(tmp_path: Path) -> None:
    state = {f"a long name to make the header large {n}": torch.randn(16) for n in range(2000)}
    save(state, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = Checkpoint(tmp_path)
    for name in list(state)[:50]:
        assert torch.equal(checkpoint[name][...], state[name])
    header = 8 + int.from_bytes(next(tmp_path.glob("data-*")).read_bytes()[:8], "little")
    index = sum(path.stat().st_size for path in tmp_path.glob("index-*"))
    assert checkpoint.bytes_read <= header + index + 50 * 64


def test_reading_rows_in_any_order_keeps_no_memory(tmp_path: Path) -> None:
    save({"w": torch.arange(400.0).reshape(200, 2)}, checkpoint_id=tmp_path)
    reader = NativeReader(LocalStore(tmp_path))
    rows = Checkpoint(reader)["w"]
    for row in range(200):
        assert rows[row].tolist() == [2 * row, 2 * row + 1]
    kept = reader._open()[1]
    assert not kept._spans and not kept._spare


def test_files_are_closed_when_they_have_been_read(tmp_path: Path) -> None:
    state = {str(n): torch.full((10,), float(n)) for n in range(200)}
    save(state, storage_writer=FileSystemWriter(tmp_path, single_file_per_rank=False), no_dist=True)
    assert len(list(tmp_path.glob("data-*"))) == 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 30, hard))
    try:
        target = {str(n): torch.zeros(10) for n in range(200)}
        load(target, checkpoint_id=tmp_path, no_dist=True)
        checkpoint = Checkpoint(tmp_path)
        assert [checkpoint[str(n)][0].item() for n in range(200)] == list(map(float, range(200)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(torch.equal(target[name], value) for name, value in state.items())


def test_a_checkpoint_that_is_replaced_under_a_reader_says_so(tmp_path: Path) -> None:
    save({"w": torch.ones(10)}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = Checkpoint(tmp_path)
    save({"w": torch.zeros(10)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointNotFoundError, match="was the checkpoint replaced"):
        checkpoint["w"][...]


class Several(Pace):
    """Wants as many threads as there may be, from the beginning."""

    def __init__(self, most: int, first: int) -> None:
        super().__init__(1)
        self.threads = most


class Meeting(MemoryStore):
    """The thread that loads gets its second request when another thread reads; `broken` breaks that one."""

    def __init__(self) -> None:
        super().__init__(Capabilities(request_bytes=1 << 10, readers=3))
        self.others = threading.Event()
        self.broken = False

    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        for number, request in enumerate(super().read(requests)):
            if threading.current_thread() is not threading.main_thread():
                self.others.set()
                if self.broken:
                    raise OSError(5, "the disk fails")
            elif number == 1:
                assert self.others.wait(30), "one thread reads alone"
            yield request


@pytest.mark.parametrize("verify", [False, True])
def test_several_threads_read_where_the_store_says_so(verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into tensors that are filled in place, converted, cut or need gradients; an error of any thread is raised."""
    monkeypatch.setattr(requests, "Pace", Several)
    store, before = Meeting(), threading.enumerate()
    state = {f"{n:03}": torch.arange(400.0).reshape(20, 20) + n for n in range(90)}
    save(state, storage_writer=NativeWriter(store), no_dist=True)
    for kind in (torch.float32, torch.float64):
        store.others.clear()
        target = {name: torch.zeros(20, 20, dtype=kind).requires_grad_() for name in state}
        load(target, storage_reader=NativeReader(store, verify=verify), no_dist=True)
        assert all(torch.equal(target[name], state[name].to(kind)) for name in state)
        assert all(tensor.is_leaf and tensor.grad_fn is None and tensor._version for tensor in target.values())
    assert threading.enumerate() == before
    store.broken = True
    store.others.clear()
    with pytest.raises(CheckpointException, match="the disk fails"):
        load(target, storage_reader=NativeReader(store, verify=verify), no_dist=True)
    assert threading.enumerate() == before


def test_a_rank_opens_a_checkpoint_of_a_thousand_ranks_by_two_requests() -> None:
    """The root, and the index of what it wants: also as the base of a save, which looks for its own chunks only."""
    job, rank = scale.Job(1000, 50, 1), 7
    index = scale.index_of(rank, job)
    data = scale.with_index(scale.merge_parts(scale.parts_of(job)), rank, index)
    store = Recording()
    store.put(MANIFEST, data)
    store.put(scale.part_entry(rank).index_file, index)
    gets: list[str] = []
    get = store.get
    store.get = lambda key, most=1 << 40: gets.append(key) or get(key, most)  # type: ignore[method-assign]
    checkpoint = Checkpoint(NativeReader(store))
    assert len(checkpoint) == 50 + 1000 * scale.OWN and checkpoint[scale.name_of(3)].shape[0] == 1000 * scale.ROWS
    assert gets == [MANIFEST] and store.requests == []
    own = Box((scale.ROWS * rank, 0), (scale.ROWS, job.width(0)))
    found = PartIndexes(Root(data, store.location), store).by_box((scale.name_of(n), own) for n in range(50))
    assert len(found) == 50 and len(store.requests) == 1 and gets == [MANIFEST]
