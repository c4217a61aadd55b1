"""Which modules a rank ran and which collectives it asked for, so that ranks that took different paths can be told so.

Ranks that disagree about the next collective wait for each other, until the process group's time limit; or, worse,
their collectives match and mix up parameters, or match but for their sizes, and gloo ends the process.

Against the second, ranks compare what they did.  On CPU a checksum of it travels after every forward and every
backward: sixteen bytes on connections of their own, which nobody waits for.  They are looked at before the next
backward or forward, that is before anything could be mixed up; the first forward of all gathers by messages, which
cannot be.  On accelerators, where looking would make the host wait, ranks compare when the order is new to them, as in
the first step.

Against the first, a rank whose collective failed writes down where it was, looks what the others wrote, and names who
was elsewhere.
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

_ROLL_CALL_SECONDS = 5.0
_SHOWN = 3  # events of a rank that a message shows
_KEPT = 4096  # events that are remembered


class Named(Protocol):
    """A unit, or several, as far as it matters here."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def index(self) -> int:
        """The same on all ranks, and of no other."""


class _Position(msgspec.Struct, frozen=True):
    """Where a rank is: how many events there were, and the last ones."""

    count: int
    last: list[str]


@dataclass(frozen=True, slots=True)
class _Comparing:
    """A comparison under way."""

    work: Any
    both: Tensor  # the largest checksum of all ranks, and the smallest, negated
    names: list[str]  # what this rank's checksum is of


_CODES = {"run": 1, "unshard": 2, "reduce": 3}


class Watch:
    """The modules run and the collectives of one root on this rank."""

    def __init__(self, mesh: DataMesh | None) -> None:
        # Those that run the same modules step by step, and those that wait for each other at all: replicas may
        # accumulate gradients of other numbers of batches.
        axis = None if mesh is None else mesh.shard
        others = axis is not None and axis.group is not None and not is_simulated(axis.group)
        self._axis: Axis | None = axis if others else None
        self._ranks: list[int] = ranks_of(mesh.mesh) if mesh is not None else []
        on_cpu = self._axis is not None and self._axis.device_type == "cpu"
        self._beside = axis_beside(self._axis) if on_cpu and self._axis is not None else None
        self._log: deque[tuple[str, Named]] = deque(maxlen=_KEPT)
        self._count = 0
        self._in_part = 0  # events since the last comparison
        self._checksum = 0  # of these
        self._agreed: set[int] = set()
        self._comparing: _Comparing | None = None
        self.has_agreed = self._axis is None  # whether ranks are known to have done the same once

    def note(self, unit: Named, what: str) -> None:
        """This rank is about to run a unit's module, or to ask for a collective."""
        if len(self._ranks) < 2:
            return
        self._count += 1
        self._in_part += 1
        self._log.append((what, unit))
        self._checksum = (self._checksum * 1000003 + unit.index * 4 + _CODES[what]) & 0x7FFFFFFFFFFFFFFF

    def compare(self) -> None:
        """At the end of a forward or backward: begin to see whether all ranks did the same since the last."""
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
        """See what the last comparison found."""
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
        """A forward or backward failed here: there is nothing to compare."""
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
        """The error of a collective that failed, with where every rank was."""
        if len(self._ranks) < 2 or isinstance(error, DivergedRanksError):
            return error
        here = dist.get_rank()
        lines = []
        for rank, position in self._call_roll(here).items():
            if position is None:
                lines.append(
                    f"rank {rank} does not wait for a collective of this model: it died, hangs, or does something else"
                )
            else:
                lines.append(f"rank {rank} was at event {position.count}: {', then '.join(position.last)}")
        return DivergedRanksError(
            f"rank {here}: a collective of fully_shard failed.\n  "
            + "\n  ".join(lines)
            + "\nAll ranks have to run the same modules in the same order (control flow that depends on data or rank "
            f"is the usual cause). The first error was: {error}"
        )

    def _call_roll(self, here: int) -> dict[int, _Position | None]:
        mine = _Position(self._count, [f"{what} {unit.name}" for what, unit in list(self._log)[-_SHOWN:]])
        found: dict[int, _Position | None] = {rank: mine if rank == here else None for rank in self._ranks}
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        try:
            store = PrefixStore("terrazzo/fsdp", default_store())
            store.set(str(here), msgspec.json.encode(mine).decode())
            while None in found.values() and time.monotonic() < deadline:
                for rank, known in found.items():
                    if known is None and store.check([str(rank)]):
                        found[rank] = msgspec.json.decode(store.get(str(rank)), type=_Position)
                time.sleep(0.05)
        except RuntimeError:
            pass  # the store went with the rank that hosts it: then nobody can be heard of
        return found


def _first_difference(everyone: list[list[str]], ranks: tuple[int, ...]) -> str:
    """Where the lists of collectives part."""
    for i in range(max(len(names) for names in everyone)):
        at = [names[i] if i < len(names) else "nothing more" for names in everyone]
        if len(set(at)) > 1:
            which = ", ".join(f"rank {rank} {what}" for rank, what in zip(ranks, at, strict=True))
            return (
                f"ranks ran different modules: event {i + 1} of a forward or backward was {which}. What came of "
                "it may be mixed up. All ranks have to run the same modules in the same order"
            )
    return "ranks ran different modules in this step"
