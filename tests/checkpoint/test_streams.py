"""Saving and publishing from an accelerator: what is copied, on which device and stream, whichever thread does it.

A double stands in for the accelerator: work that is queued on a stream is done when an event that was recorded on that
stream later is waited for, and not before. As for real ones, each thread has a current device and, for each device, a
current stream, which are 0 and the default stream in a new thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch.utils import _pytree

from terrazzo._threads import Worker
from terrazzo.checkpoint import Checkpoint, DefaultSavePlanner, FileSystemWriter, async_save, save
from terrazzo.checkpoint.run.device_copies import ThisAccelerator, copy_from_devices
from terrazzo.checkpoint.torch_api import items
from terrazzo.layout import Box
from terrazzo.publish.host_copy import HostCopy, Snapshot
from terrazzo.publish.parts import ModelPart, Parts, TensorInfo

NUMEL = 1 << 12


class Line:
    """A stream."""

    def __init__(self, double: Double, device: Any, name: str = "own") -> None:
        self.double, self.device, self.name = double, torch.device(device), name
        self.work: list[Callable[[], object]] = []

    def record_event(self) -> Event:
        return Event(self, len(self.work))

    def wait_stream(self, other: Line) -> None:
        self.work.append(other.record_event().synchronize)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def __enter__(self) -> Self:
        self._before = self.double.stream_of(self.device), self.double.device_index()
        self.double.set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.double.set_stream(self._before[0])
        self.double.set_device(self._before[1])


class Event:
    def __init__(self, line: Line, end: int) -> None:
        self.line, self.end = line, end

    def synchronize(self) -> None:
        with self.line.double.works:
            for place in range(self.end):
                work, self.line.work[place] = self.line.work[place], lambda: None
                work()


class Double:
    """An accelerator with two devices."""

    def __init__(self) -> None:
        self.current = threading.local()
        self.works = threading.RLock()
        self.pinned = 0
        self.defaults = [Line(self, f"xpu:{index}", "default") for index in range(2)]

    def device_index(self) -> int:
        return getattr(self.current, "device", 0)

    def set_device(self, index: int) -> None:
        self.current.device = index

    def stream_of(self, device: Any = None) -> Line:
        index = device if isinstance(device, int) else device.index if device is not None else self.device_index()
        return getattr(self.current, f"stream{index}", self.defaults[index])

    def set_stream(self, line: Line) -> None:
        setattr(self.current, f"stream{line.device.index}", line)
        self.current.device = line.device.index


class OnDevice(torch.Tensor):
    """A tensor whose copies from and to the host are queued on the current stream of its device."""

    values: torch.Tensor
    double: Double

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device, double: Double) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device=device
        )
        made.values, made.double = values, double
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            target, source = args
            there = source if isinstance(source, cls) else target
            plain = [each.values if isinstance(each, cls) else each for each in args]
            line = there.double.stream_of(there.device)
            line.work.append(lambda: plain[0].copy_(plain[1]))
            if not (kwargs or {}).get("non_blocking"):
                line.synchronize()
            return target
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(leaf for leaf in _pytree.tree_leaves(args) if isinstance(leaf, cls))
        args = _pytree.tree_map_only(cls, lambda tensor: tensor.values, args)
        found = func(*args, **(kwargs or {}))
        return _pytree.tree_map_only(torch.Tensor, lambda tensor: cls(tensor, first.device, first.double), found)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    made, empty = Double(), torch.empty
    module = SimpleNamespace(is_initialized=lambda: True, is_available=lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    monkeypatch.setattr(torch, "Stream", lambda device: Line(made, device))

    def sevens(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        """Host memory, with other values than those that are saved until copies arrive."""
        made.pinned += pin_memory
        return empty(*args, **kwargs).fill_(7)

    monkeypatch.setattr(torch, "empty", sevens)
    # Other wrappers of tensors are refused.
    monkeypatch.setattr(items, "data_of", lambda planner, item: planner.resolve_data(item))
    for name, value in {
        "current_accelerator": lambda check_available=False: torch.device("xpu"),
        "device_count": lambda: 2,
        "current_device_index": made.device_index,
        "set_device_index": made.set_device,
        "current_stream": made.stream_of,
        "set_stream": made.set_stream,
        "synchronize": None,  # nothing waits for a whole device
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    return made


class FromDevice(DefaultSavePlanner):
    """Tensors of the state are on a device, where they become what is to be saved when queued work has been done."""

    double: Double
    device: torch.device

    def resolve_data(self, item: Any) -> Any:
        found = super().resolve_data(item)
        return OnDevice(found, self.device, self.double) if isinstance(found, torch.Tensor) else found


@contextmanager
def queued(double: Double, device: torch.device, line: Line | None) -> Iterator[dict[str, torch.Tensor]]:
    """A state whose values are computed by work that is queued on a stream, on which the caller then is."""
    state = {f"t{number}": torch.zeros(NUMEL) for number in range(3)}
    line = line or double.stream_of(device)
    double.set_stream(line)
    double.set_device(0)
    for number, tensor in enumerate(state.values()):
        line.work.append(lambda tensor=tensor, number=number: tensor.fill_(number + 1))
    yield state


class NotCopied:
    """A stager that leaves the state where it is."""

    should_synchronize_after_execute = False

    def stage(self, state: Any) -> Any:
        return dict(state)

    def synchronize_staging(self) -> None:
        """Nothing."""


def save_on_threads(state: Any, path: Path, planner: Any) -> None:
    save(state, storage_writer=FileSystemWriter(path, thread_count=3), planner=planner, no_dist=True)


def save_plainly(state: Any, path: Path, planner: Any) -> None:
    save(state, checkpoint_id=path, planner=planner, no_dist=True)


def save_in_the_background(state: Any, path: Path, planner: Any) -> None:
    async_save(state, checkpoint_id=path, planner=planner, no_dist=True, async_stager=NotCopied()).result(60)


@pytest.mark.parametrize("saved", [save_plainly, save_on_threads, save_in_the_background])
@pytest.mark.parametrize("own_stream", [False, True])
def test_what_is_saved_is_what_the_caller_has_queued(
    tmp_path: Path, double: Double, saved: Any, own_stream: bool
) -> None:
    planner = FromDevice()
    planner.double = double

    def run(path: Path) -> None:
        line = Line(double, planner.device) if own_stream else None
        with queued(double, planner.device, line) as state:
            saved(state, path, planner)
            assert double.device_index() == 0
            assert double.stream_of(planner.device) is (line or double.defaults[planner.device.index])

    for index in range(2):
        planner.device = torch.device("xpu", index)
        run(tmp_path / f"{index}-here")
        thread = threading.Thread(target=run, args=[tmp_path / f"{index}-thread"])
        thread.start()
        thread.join()
        for place in ("here", "thread"):
            checkpoint = Checkpoint(tmp_path / f"{index}-{place}")
            for number in range(3):
                assert checkpoint[f"t{number}"][...].eq(number + 1).all(), (index, place, number)


@pytest.mark.parametrize("device", ["xpu:0", "xpu:1"])
@pytest.mark.parametrize("own_stream", [False, True])
def test_copies_of_a_worker_follow_the_stream_of_who_asked_for_them(
    double: Double, device: str, own_stream: bool
) -> None:
    line = Line(double, device) if own_stream else None
    accelerator, worker = ThisAccelerator(), Worker("test")
    with queued(double, torch.device(device), line) as state:
        sources = [OnDevice(tensor, torch.device(device), double) for tensor in state.values()]
        targets = [torch.zeros(NUMEL) for _ in sources]
        worker.submit(lambda: copy_from_devices(targets, sources, accelerator)).result(60)
    for number, target in enumerate(targets):
        assert target.eq(number + 1).all()


@pytest.mark.parametrize("device", ["xpu:0", "xpu:1"])
def test_published_weights_pass_through_pinned_memory_which_may_be_used_again_at_once(
    double: Double, device: str
) -> None:
    there = torch.device(device)
    with queued(double, there, Line(double, there)) as state:
        tensors = {name: OnDevice(tensor, there, double) for name, tensor in state.items()}
        parts = Parts(
            {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()},
            tuple(ModelPart(name, Box.whole(tensor.shape), tensor, False, False) for name, tensor in tensors.items()),
            {},
        )
        snapshot = Snapshot(parts.parts, None)
        snapshot.take(parts.parts)
        for number, tensor in enumerate(snapshot.tensors):
            assert tensor.eq(number + 1).all()
        copy = HostCopy(parts, {name: name for name in state})
        for slot in copy.slots:
            slot.data.fill_(20)
            slot.is_dirty = True
        copy.apply()
        for slot in copy.slots:
            slot.data.fill_(30)  # the next version
    assert double.pinned == 6
    assert all(tensor.values.eq(20).all() for tensor in tensors.values())


def test_shared_memory_is_pinned_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch, double: Double) -> None:
    calls: list[tuple[str, int]] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: calls.append(("pin", nbytes)) or 0,
        cudaHostUnregister=lambda address: calls.append(("unpin", 0)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    ThisAccelerator().pin(torch.zeros(8).share_memory_())
    assert calls == []  # the accelerator has no such function
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    memory = torch.zeros(1000, dtype=torch.uint8).share_memory_()
    ThisAccelerator().pin(memory)
    view = memory[8:16].view(torch.float32)
    del memory
    assert calls == [("pin", 1000)] and view.eq(0).all()
    del view
    assert calls == [("pin", 1000), ("unpin", 0)]


def test_shared_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *args: 2))

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))

    def kept_error(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", kept_error)
    ThisAccelerator().pin(torch.zeros(1000, dtype=torch.uint8).share_memory_())
    assert "1000 bytes of shared memory could not be pinned (CUDA error 2)" in caplog.text
