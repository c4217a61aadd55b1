"""Weights from a trainer of 4 ranks, sharded as fully_shard does it, to 2 receivers with tensor parallelism.

`torch` is what trainers do without a plan: `full_tensor()` of one parameter after the other, and a broadcast from the
first rank to the receivers, of which each keeps its part.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh

import terrazzo.tensor as our_tensor
from benchmarks.cases import Budget, Implementations, Setting, case
from terrazzo.publish import Channel, Publisher, Receiver

_TRAINERS, _RECEIVERS = 4, 2
_WORLD = _TRAINERS + _RECEIVERS
_FIRST_RECEIVER = _TRAINERS


class _Job:
    """One model on both sides, in both libraries."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.trains = setting.rank < _TRAINERS
        self.shape = (256, 256) if setting.quick else (1024, 1024)
        self.names = [f"layers.{number}.weight" for number in range(4 if setting.quick else 16)]
        trainers, receivers = list(range(_TRAINERS)), list(range(_FIRST_RECEIVER, _WORLD))
        self.groups = [dist.new_group(trainers), dist.new_group(receivers)]
        self.broadcasting: Any = dist.new_group([0, *receivers])
        self.meshes = [DeviceMesh("cpu", trainers), DeviceMesh("cpu", receivers)]
        self.step = 0

    @property
    def group(self) -> Any:
        return self.groups[0 if self.trains else 1]

    @property
    def total_bytes(self) -> int:
        return len(self.names) * self.shape[0] * self.shape[1] * 4

    def local(self, dim: int) -> torch.Tensor:
        """What a receiver has of a tensor."""
        shape = list(self.shape)
        shape[dim] //= _RECEIVERS
        return torch.zeros(shape)

    def state(self, library: Any) -> dict[str, torch.Tensor]:
        """The model as this rank has it: rows of a trainer, rows and columns in turn of a receiver."""
        if self.trains:
            rows = torch.ones(self.shape[0] // _TRAINERS, self.shape[1])
            return {
                name: library.DTensor.from_local(rows.clone(), self.meshes[0], [library.Shard(0)])
                for name in self.names
            }
        return {
            name: library.DTensor.from_local(self.local(number % 2), self.meshes[1], [library.Shard(number % 2)])
            for number, name in enumerate(self.names)
        }

    def change(self, state: dict[str, torch.Tensor], share: float) -> None:
        """Change about this share of a trainer's numbers."""
        self.step += 1
        if not self.trains:
            return
        for tensor in state.values():
            local = tensor.to_local().view(-1)  # type: ignore[attr-defined]  # DTensors of either library
            local[:: max(int(1 / share), 1)] += self.step


def _by_full_tensors(job: _Job) -> Callable[[], object]:
    state = job.state(torch_tensor)
    buffer = torch.empty(job.shape)

    def run() -> None:
        for number, name in enumerate(job.names):
            if job.trains:
                whole = state[name].full_tensor()  # type: ignore[attr-defined]  # a DTensor
                if job.setting.rank == 0:
                    dist.broadcast(whole, 0, group=job.broadcasting)
                continue
            dist.broadcast(buffer, 0, group=job.broadcasting)
            local = state[name].to_local()  # type: ignore[attr-defined]
            place = job.setting.rank - _FIRST_RECEIVER
            local.copy_(buffer.chunk(_RECEIVERS, number % 2)[place])

    return run


class _Published:
    """Both sides of publishing, one version a call."""

    def __init__(self, job: _Job, to: Channel | Path, share: float = 1.0, **settings: Any) -> None:
        self.job, self.share = job, share
        self.state = job.state(our_tensor)
        self.publisher: Publisher | None = None
        self.receiver: Receiver | None = None
        if job.trains:
            self.publisher = Publisher(to, self.state, process_group=job.group, **settings)
        dist.barrier()
        if not job.trains:
            self.receiver = Receiver(to, self.state, process_group=job.group)

    def run(self) -> None:
        """Publish, and receive it."""
        self.job.change(self.state, self.share)
        if self.publisher is not None:
            self.publisher.publish(self.job.step)
            self.publisher.wait()
            return
        assert self.receiver is not None
        while self.receiver.poll() != self.job.step:
            time.sleep(0.001)
        self.receiver.apply()

    def bytes_of(self) -> float:
        """The bytes that a version takes: MB that all receivers together read."""
        before = self.receiver.bytes_read if self.receiver is not None else 0
        self.run()
        after = self.receiver.bytes_read if self.receiver is not None else 0
        moved = torch.tensor(float(after - before))
        dist.all_reduce(moved)
        return moved.item() / 1e6


def _channel() -> Channel:
    """An address that is free: the first rank finds one, and tells the others."""
    found: list[str | None] = [None]
    if dist.get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            found[0] = f"127.0.0.1:{probe.getsockname()[1]}"
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return Channel(found[0])


@case(world=_WORLD, budget=Budget("time", 1.0))
def direct(setting: Setting) -> Implementations:
    """From process to process."""
    job = _Job(setting)
    return {"terrazzo": _Published(job, _channel()).run, "torch": _by_full_tensors(job)}


@case(world=_WORLD, unit="MB", repetitions=3, budget=Budget("time", 0.25))
def direct_bytes(setting: Setting) -> Implementations:
    """What all ranks together receive.  Of torch computed: 3/4 of the model on each of 4 ranks, all on each of 2."""
    job = _Job(setting)
    moved = job.total_bytes * (_TRAINERS - 1 + _RECEIVERS) / 1e6
    return {"terrazzo": _Published(job, _channel()).bytes_of, "torch": lambda: moved}


@case(world=_WORLD)
def store_full(setting: Setting) -> Implementations:
    """Through a folder, all of it each time."""
    job = _Job(setting)
    published = _Published(job, setting.folder / "full", anchor_every=1)
    return {"terrazzo": published.run, "torch": _by_full_tensors(job)}


@case(world=_WORLD, budget=Budget("time", 1.0, of="full"))
def store_changes(setting: Setting) -> Implementations:
    """Through a folder, where one number of a hundred has changed, against all of it."""
    job = _Job(setting)
    changes = _Published(job, setting.folder / "changes", 0.01, anchor_every=1000)
    full = _Published(job, setting.folder / "full", 0.01, anchor_every=1)
    return {"terrazzo": changes.run, "full": full.run}


@case(world=_WORLD, unit="MB", repetitions=3, budget=Budget("time", 0.1, of="full"))
def store_changes_bytes(setting: Setting) -> Implementations:
    """The same: what the receivers read."""
    job = _Job(setting)
    changes = _Published(job, setting.folder / "changes", 0.01, anchor_every=1000)
    full = _Published(job, setting.folder / "full", 0.01, anchor_every=1)
    changes.run()  # the first is full
    return {"terrazzo": changes.bytes_of, "full": full.bytes_of}
