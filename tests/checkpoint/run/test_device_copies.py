"""Staging from an accelerator, with a double of one: which copies are queued where, and what the host waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from terrazzo.checkpoint.run.staging import HostMemory


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a device; its copies to the host are made when the device is waited for."""

    values: torch.Tensor
    device_double: Accelerator

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: str, double: Accelerator) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=device)
        made.values, made.device_double = values, double
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default and isinstance(args[1], cls)
        target, source = args[:2]
        source.device_double.queue(target, source, args[2])
        return target


class Accelerator:
    """A double that does nothing before it is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.inside: torch.device | None = None
        self.queued: dict[torch.device, list[tuple[torch.Tensor, OnDevice]]] = {}

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.log.append("pinned")
        return torch.full((nbytes,), 7, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> None:
        assert memory.is_shared()
        self.log.append(f"pin {memory.nbytes}")

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        self.log.append(f"beside {device}")
        self.inside = device
        try:
            yield
        finally:
            self.inside = None

    def queue(self, target: torch.Tensor, source: OnDevice, non_blocking: bool) -> None:
        assert self.inside == source.device and non_blocking
        if source.values.numel() == 13:
            raise RuntimeError("cannot be queued")
        self.queued.setdefault(source.device, []).append((target, source))

    def wait(self, device: torch.device) -> None:
        self.log.append(f"wait {device}")
        for target, source in self.queued.pop(device, []):
            target.copy_(source.values)


@pytest.fixture(autouse=True)
def no_waiting_for_whole_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("waits for all that a device does")

    monkeypatch.setattr(torch.accelerator, "synchronize", refuse)


def test_copies_run_beside_and_are_complete_when_they_have_been_waited_for() -> None:
    double = Accelerator()
    first, second, host = torch.arange(5.0), torch.arange(6).bfloat16(), torch.arange(3)
    memory = HostMemory(accelerator=double)
    sources = [OnDevice(first, "cuda:0", double), host, OnDevice(second, "cuda:1", double)]
    copies = memory.copy(sources)
    for copy, wanted in zip(copies, (first, host, second), strict=True):
        assert type(copy) is torch.Tensor and copy.dtype == wanted.dtype and torch.equal(copy, wanted)
    assert double.log == ["pinned", "beside cuda:0", "beside cuda:1", "wait cuda:0", "wait cuda:1"]
    memory.copy(sources)
    assert double.log.count("pinned") == 1  # the memory is used again


def test_what_was_queued_is_waited_for_when_a_later_copy_cannot_be() -> None:
    double = Accelerator()
    sources = [OnDevice(torch.ones(4), "cuda:0", double), OnDevice(torch.ones(13), "cuda:0", double)]
    with pytest.raises(RuntimeError, match="cannot be queued"):
        HostMemory(accelerator=double).copy(sources)
    assert double.log[-1] == "wait cuda:0" and not double.queued


def test_pinned_memory_is_taken_in_slabs_which_stay() -> None:
    double = Accelerator()
    memory = HostMemory(accelerator=double, slab_bytes=256)

    def copied(*lengths: int) -> list[torch.Tensor]:
        values = [torch.arange(length, dtype=torch.float32) + number for number, length in enumerate(lengths)]
        copies = memory.copy([OnDevice(value, "cuda:0", double) for value in values])
        for copy, value in zip(copies, values, strict=True):
            assert torch.equal(copy, value)
        return copies

    first = copied(10, 20, 40, 200, 1, 0)  # 40 and 80 bytes in a slab, 160 in the next, 800 in one of four slabs' size
    assert {copy.untyped_storage().nbytes() for copy in first} == {256, 1024}
    assert double.log.count("pinned") == 3
    places = {copy.untyped_storage().data_ptr() for copy in first if copy.numel()}
    again = copied(30, 30, 30, 199)  # another state of the same size needs nothing new
    assert double.log.count("pinned") == 3 and places == {copy.untyped_storage().data_ptr() for copy in again}
    copied(10, 70)
    assert double.log.count("pinned") == 3


def test_memory_that_another_process_maps_is_pinned_when_a_device_copies_to_it() -> None:
    double = Accelerator()
    memory = HostMemory(shared=True, accelerator=double)
    memory.copy([torch.arange(4.0)])
    assert double.log == []  # the host copies
    sources = [OnDevice(torch.arange(4.0), "cuda:0", double)]
    assert torch.equal(memory.copy(sources)[0], torch.arange(4.0))
    before = memory.buffer
    memory.copy(sources)
    assert memory.buffer is before and double.log.count("pin 64") == 1 and "pinned" not in double.log
    memory.copy([OnDevice(torch.arange(400.0), "cuda:0", double)])  # needs more memory
    assert double.log.count("pin 1600") == 1
