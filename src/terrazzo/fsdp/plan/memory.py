"""The memory of a plan: the sizes of its buffers, and how much of it is in use while operations run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from terrazzo.fsdp.plan.operations import Buffer, Operation
from terrazzo.fsdp.plan.units import Spec

_TEMPORARY = (
    "sent",
    "gathered",
    "unsharded",
    "kept",
    "gradients",
    "accumulated",
    "packed",
    "reduced",
    "exchanged",
    "result",
)


def sizes_of(spec: Spec) -> dict[Buffer, int]:
    """The bytes of all temporary buffers."""
    found: dict[Buffer, int] = {}
    for i, unit in enumerate(spec.units):
        if unit.sizes is None:
            continue
        for kind in _TEMPORARY:
            found[Buffer(kind, i)] = getattr(unit.sizes, kind)
        found[Buffer("partial", i)] = unit.sizes.reduced
    return found


class Memory:
    """The memory of buffers that are in use, while operations run one after the other."""

    def __init__(self, sizes: Mapping[Buffer, int]) -> None:
        self._sizes = sizes
        self._live: dict[Buffer, int] = {}

    def during(self, operation: Operation) -> Operation:
        """The operation, which runs now, with the memory in use."""
        for buffer in operation.takes:
            self._live[buffer] = self._sizes.get(buffer, 0)
        memory = sum(self._live.values())
        for buffer in operation.gives:
            self._live.pop(buffer, None)
        return replace(operation, memory=memory, after=sum(self._live.values()))


def peak_of(operations: Iterable[Operation], spec: Spec) -> int:
    """The most bytes in use beside shards and their gradients."""
    memory = Memory(sizes_of(spec))
    return max((memory.during(each).memory for each in operations), default=0)
