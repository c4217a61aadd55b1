"""The memory of a plan: the sizes of its buffers, and how much of it is in use while operations run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from terrazzo.fsdp.plan.operations import Buffer, Operation
from terrazzo.fsdp.plan.units import Sizes, Spec


def sizes_of(spec: Spec) -> dict[Buffer, int]:
    """The bytes of all buffers, which have the names of sizes."""
    found: dict[Buffer, int] = {}
    for i, unit in enumerate(spec.units):
        if unit.sizes is None:
            continue
        for kind, size in zip(Sizes.__annotations__, unit.sizes, strict=True):
            found[Buffer(kind, i)] = size
        found[Buffer("partial", i)] = unit.sizes.reduced
    return found


class Memory:
    """The memory of buffers that are in use, or not freed, while operations run one after the other."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self._sizes = spec, sizes_of(spec)
        self._live: dict[Buffer, int] = {}
        self._idle: Counter[tuple[str, int]] = Counter()  # of double buffers, by kind and size

    def during(self, operation: Operation) -> Operation:
        """The operation, which runs now, with the memory in use."""
        for buffer in operation.takes:
            size = self._live[buffer] = self._sizes.get(buffer, 0)
            if self._is_double(buffer) and self._idle[buffer.kind, size]:
                self._idle[buffer.kind, size] -= 1
        memory = self._in_use()
        for buffer in operation.gives:
            size = self._live.pop(buffer, 0)
            if size and self._is_double(buffer) and self._idle[buffer.kind, size] < 2:
                self._idle[buffer.kind, size] += 1
        return replace(operation, memory=memory, after=self._in_use())

    def _is_double(self, buffer: Buffer) -> bool:
        return buffer.kind in ("gathered", "packed") and self._spec.units[buffer.unit].double_buffers

    def _in_use(self) -> int:
        return sum(self._live.values()) + sum(size * count for (_, size), count in self._idle.items())


def peak_of(operations: Sequence[Operation], spec: Spec) -> int:
    """The most bytes in use beside shards and their gradients; with double buffers in a step after another."""
    memory, steps = Memory(spec), 1 + any(unit.double_buffers for unit in spec.units)
    return max((memory.during(each).memory for each in [*operations] * steps), default=0)
