"""Which collectives a rank asked for, so that ranks that took different paths can be told so.

Ranks that disagree about the next collective wait for each other, until the process group's time limit; or, worse, their
collectives match by size and mix up parameters.  Against the second, ranks compare the order of collectives at the end
of the first backward, and whenever it changed.  Against the first, a rank whose collective failed writes down where it
was, looks what the others wrote, and names who was elsewhere.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch
import xxhash
from torch.distributed import PrefixStore, ProcessGroup

from terrazzo.comm.axis import Axis
from terrazzo.comm.control import ControlPlane
from terrazzo.errors import CommError, DivergedRanksError
from terrazzo.fsdp.meshes import DataMesh

if TYPE_CHECKING:
    from terrazzo.fsdp.unit import Unit

_ROLL_CALL_SECONDS = 5.0
_SHOWN = 3  # collectives of a rank that a message shows
_KEPT = 4096  # collectives that are remembered


class _Position(msgspec.Struct, frozen=True):
    """Where a rank is: how many collectives it asked for, and the last ones."""

    count: int
    last: list[str]


class Watch:
    """The collectives of one root on this rank."""

    def __init__(self, mesh: DataMesh | None) -> None:
        self._axis: Axis | None = mesh.shard if mesh is not None and mesh.shard.size > 1 else None
        self._group: ProcessGroup | None = None if self._axis is None else self._axis.group
        self._log: deque[tuple[str, Unit]] = deque(maxlen=_KEPT)
        self._count = 0
        self._in_step = 0  # collectives since the last backward ended
        self._signature = 0  # of these
        self._agreed: set[int] = set()

    def note(self, unit: Unit, what: str) -> None:
        """This rank is about to ask for a collective."""
        if self._axis is None:
            return
        self._count += 1
        self._log.append((what, unit))
        self._in_step += 1
        self._signature = hash((self._signature, what, id(unit)))

    def end_step(self) -> None:
        """At the end of a backward: see that all ranks did the same since the last."""
        if self._axis is None:
            return
        steps, signature = self._in_step, self._signature
        self._in_step = self._signature = 0
        if signature in self._agreed:
            return
        recent = list(self._log)[-steps:] if steps else []
        names = [f"{what} {unit.name}" for what, unit in recent]
        digest = xxhash.xxh64("\n".join(names).encode()).digest()
        plane = ControlPlane.for_group(self._group, _time_limit(self._axis))
        digests = plane.all_gather(digest)
        if len(set(digests)) > 1:
            everyone = [
                msgspec.msgpack.decode(data, type=list[str]) for data in plane.all_gather(msgspec.msgpack.encode(names))
            ]
            raise DivergedRanksError(_first_difference(everyone, self._axis.ranks))
        self._agreed.add(signature)

    def explain(self, error: CommError) -> CommError:
        """The error of a collective that failed, with where every rank was."""
        if self._axis is None or self._group is None or isinstance(error, DivergedRanksError):
            return error
        positions = self._call_roll(self._axis, self._group)
        here = self._axis.ranks[self._axis.index]
        lines = []
        for rank, position in zip(self._axis.ranks, positions, strict=True):
            if position is None:
                lines.append(
                    f"rank {rank} does not wait for a collective of this model: it died, hangs, or does something else"
                )
            else:
                lines.append(f"rank {rank} was at collective {position.count}: {', then '.join(position.last)}")
        return DivergedRanksError(
            f"rank {here}: a collective of fully_shard failed.\n  "
            + "\n  ".join(lines)
            + "\nAll ranks have to run the same modules in the same order (control flow that depends on data or rank is the "
            f"usual cause). The first error was: {error}"
        )

    def _call_roll(self, axis: Axis, group: ProcessGroup) -> list[_Position | None]:
        mine = _Position(self._count, [f"{what} {unit.name}" for what, unit in list(self._log)[-_SHOWN:]])
        found: list[_Position | None] = [mine if i == axis.index else None for i in range(axis.size)]
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        try:
            store = PrefixStore("terrazzo/fsdp", group.get_group_store())
            store.set(str(axis.index), msgspec.json.encode(mine).decode())
            while None in found and time.monotonic() < deadline:
                for i, known in enumerate(found):
                    if known is None and store.check([str(i)]):
                        found[i] = msgspec.json.decode(store.get(str(i)), type=_Position)
                time.sleep(0.05)
        except RuntimeError:
            pass  # the store went with the rank that hosts it: then nobody can be heard of
        return found


def _time_limit(axis: Axis) -> timedelta:
    """That of the axis's collectives."""
    assert axis.group is not None
    limit: timedelta = axis.group._get_backend(torch.device(axis.device_type)).options._timeout
    return limit


def _first_difference(everyone: list[list[str]], ranks: tuple[int, ...]) -> str:
    """Where the lists of collectives part."""
    longest = max(len(names) for names in everyone)
    for i in range(longest):
        at = [names[i] if i < len(names) else "nothing more" for names in everyone]
        if len(set(at)) > 1:
            which = ", ".join(f"rank {rank} {what}" for rank, what in zip(ranks, at, strict=True))
            return (
                f"ranks ran different modules in this step: collective {i + 1} of the step was {which}. Gradients of this step "
                "may be mixed up. All ranks have to run the same modules in the same order"
            )
    return "ranks ran different modules in this step"
