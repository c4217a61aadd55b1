"""Record which modules a rank ran and which collectives it started, to detect ranks that ran different ones.

Ranks that start different collectives either wait for each other until the process group's time limit; or, worse, the
collectives match by accident and mix up parameters, or differ in size, and gloo ends the process.

To detect mixed-up parameters, ranks compare their records. On CPU they reduce a checksum after every forward and every
backward: 16 bytes in a process group of its own, without waiting. The result is checked before the next backward or
forward, that is before parameters could be mixed up. (The first forward gathers by messages with tags, which cannot be
mixed up.) On accelerators the host would have to wait for the result, so ranks compare only when the order is new, as
in the first step.

If a collective fails, each rank writes its position to the default store and reads those of the others. The error
message lists them.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from terrazzo._torch.groups import default_store
from terrazzo.comm import wire
from terrazzo.comm.axis import Axis, axis_beside, time_limit
from terrazzo.comm.control import ControlPlane
from terrazzo.comm.mesh import ranks_of
from terrazzo.comm.simulated import is_simulated
from terrazzo.errors import CommError, DivergedRanksError
from terrazzo.fsdp.meshes import DataMesh

_POSITIONS_SECONDS = 5.0  # how long to wait for the other ranks' positions after a failure
_SHOWN = 3  # events of a rank that a message shows
_KEPT = 4096  # events in the record


class Named(Protocol):
    """A unit or a bundle of units."""

    @property
    def name(self) -> str:
        """The name for messages."""

    @property
    def index(self) -> int:
        """A number that is unique in the model and equal on all ranks."""


class _Position(msgspec.Struct, frozen=True):
    """A rank's position in the step: the number of its events, and the last ones."""

    count: int
    last: list[str]


@dataclass(frozen=True, slots=True)
class _Comparing:
    """A comparison that has been started."""

    work: Any
    both: Tensor  # the largest checksum of all ranks, and the smallest, negated
    names: list[str]  # the events of this rank's checksum


_CODES = {"run": 1, "unshard": 2, "reduce": 3}


class Watch:
    """The record of one root's modules and collectives on this rank."""

    def __init__(self, mesh: DataMesh | None) -> None:
        # Ranks of the shard axis must run the same modules in each step. Replicas wait for each other, too, but may
        # accumulate gradients over different numbers of micro-batches.
        axis = None if mesh is None else mesh.shard
        others = axis is not None and axis.group is not None and not is_simulated(axis.group)
        self._axis: Axis | None = axis if others else None
        self._ranks: list[int] = ranks_of(mesh.mesh) if mesh is not None else []
        on_cpu = self._axis is not None and self._axis.device_type == "cpu"
        self._beside = axis_beside(self._axis) if on_cpu and self._axis is not None else None
        self._log: deque[tuple[str, Named]] = deque(maxlen=_KEPT)
        self._count = 0
        self._in_part = 0  # events since the last comparison
        self._checksum = 0  # of the events since the last comparison
        self._agreed: set[int] = set()
        self._comparing: _Comparing | None = None
        self.has_agreed = self._axis is None  # whether a comparison has found no difference yet

    def note(self, unit: Named, what: str) -> None:
        """Record that this rank runs a unit's module, or starts a collective."""
        if len(self._ranks) < 2:
            return
        self._count += 1
        self._in_part += 1
        self._log.append((what, unit))
        self._checksum = (self._checksum * 1000003 + unit.index * 4 + _CODES[what]) & 0x7FFFFFFFFFFFFFFF

    def compare(self) -> None:
        """Start to compare the events since the last comparison. Called at the end of a forward or backward."""
        axis = self._axis
        if axis is None:
            return
        self.settle()
        checksum, recent = self._checksum, list(self._log)[-self._in_part :] if self._in_part else []
        self._checksum = self._in_part = 0
        names = [f"{what} {unit.name}" for what, unit in recent]
        if self._beside is not None:
            both = torch.tensor([checksum, -checksum])
            self._comparing = _Comparing(wire.all_reduce(self._beside, both, "max"), both, names)
        elif checksum not in self._agreed:
            plane = ControlPlane.for_group(axis.group, time_limit(axis))
            if len(set(plane.all_gather(checksum.to_bytes(8, "little")))) > 1:
                self._raise_difference(axis, names)
            self._agreed.add(checksum)

    def settle(self) -> None:
        """Wait for the last comparison, and raise if ranks differ."""
        if self._comparing is None or self._axis is None:
            return
        comparing, self._comparing = self._comparing, None
        try:
            comparing.work.wait()
        except RuntimeError as error:
            raise self.explain(CommError(str(error))) from error
        largest, smallest = comparing.both.tolist()
        if largest != -smallest:
            self._raise_difference(self._axis, comparing.names)
        self.has_agreed = True

    def agree(self, flags: list[bool]) -> list[bool]:
        """Which of `flags` are set on any of the ranks that shard; all of them ask together.

        A shard may be written on the rank alone that holds some row. On accelerators, where asking would make the host
        wait, each rank answers for itself.
        """
        if self._beside is None:
            return flags
        found = torch.tensor(flags, dtype=torch.uint8)
        try:
            work = wire.all_reduce(self._beside, found, "max")
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise self.explain(CommError(str(error))) from error
        return [bool(flag) for flag in found.tolist()]

    def forget(self) -> None:
        """Drop the events since the last comparison, after a forward or backward failed on this rank."""
        self._comparing = None
        self._checksum = self._in_part = 0

    def _raise_difference(self, axis: Axis, names: list[str]) -> None:
        plane = ControlPlane.for_group(axis.group, time_limit(axis))
        everyone = [
            msgspec.msgpack.decode(data, type=list[str]) for data in plane.all_gather(msgspec.msgpack.encode(names))
        ]
        raise DivergedRanksError(_first_difference(everyone, axis.ranks))

    # ------------------------------------------------------------------ collectives that failed

    def explain(self, error: CommError) -> CommError:
        """The error for a failed collective, with the position of every rank."""
        if len(self._ranks) < 2 or isinstance(error, DivergedRanksError):
            return error
        here = dist.get_rank()
        lines = []
        for rank, position in self._positions(here).items():
            if position is None:
                lines.append(f"rank {rank} is not in a collective of this model: it died, hangs, or runs other code")
            else:
                lines.append(f"rank {rank} was at event {position.count}: {', then '.join(position.last)}")
        return DivergedRanksError(
            f"rank {here}: a collective of fully_shard failed.\n  "
            + "\n  ".join(lines)
            + "\nAll ranks must run the same modules in the same order; a usual cause is control flow that depends on "
            f"data or rank. The first error was: {error}"
        )

    def _positions(self, here: int) -> dict[int, _Position | None]:
        """The positions of all ranks; None for ranks that do not report theirs in time."""
        mine = _Position(self._count, [f"{what} {unit.name}" for what, unit in list(self._log)[-_SHOWN:]])
        found: dict[int, _Position | None] = {rank: mine if rank == here else None for rank in self._ranks}
        deadline = time.monotonic() + _POSITIONS_SECONDS
        try:
            store = PrefixStore("terrazzo/fsdp", default_store())
            store.set(str(here), msgspec.json.encode(mine).decode())
            while None in found.values() and time.monotonic() < deadline:
                for rank, known in found.items():
                    if known is None and store.check([str(rank)]):
                        found[rank] = msgspec.json.decode(store.get(str(rank)), type=_Position)
                time.sleep(0.05)
        except RuntimeError:
            pass  # the rank that hosts the store has ended, so no positions can be read
        return found


def _first_difference(everyone: list[list[str]], ranks: tuple[int, ...]) -> str:
    """The message for the first event at which the ranks differ."""
    for i in range(max(len(names) for names in everyone)):
        at = [names[i] if i < len(names) else "nothing more" for names in everyone]
        if len(set(at)) > 1:
            which = ", ".join(f"rank {rank} {what}" for rank, what in zip(ranks, at, strict=True))
            return (
                f"ranks ran different modules: event {i + 1} of a forward or backward was {which}. Parameters and "
                "gradients may be mixed up. All ranks must run the same modules in the same order"
            )
    return "ranks ran different modules in this step"
