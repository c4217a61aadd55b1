"""Races as Python objects, and their text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)')
_NOT_USERS = ("/torch/", "terrazzo/testing/late/", "contextlib.py", "<frozen")
_LINES = 10


@dataclass(frozen=True)
class Access:
    """One of the two accesses of a race."""

    operation: str
    """Its name: that of an operator of `torch.ops.aten`, of a collective or of a copy."""

    does: str
    """What it does with the memory: `"reads"` or `"writes"`; `"uses"` for the host."""

    tensor: str
    """The dtype and the sizes of the tensor: `"Float[8, 16]"`."""

    stream: str
    """Which stream it is on: `"stream 5 of late:0"`."""

    lines: tuple[str, ...]
    """The lines of the program that called it, the innermost first, without those of torch."""

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.operation} {self.does} {self.tensor} on {self.stream}", *(f"    {at}" for at in self.lines)]
        )


@dataclass(frozen=True)
class Race:
    """Two accesses to the same memory, at least one of which writes, and nothing makes the second wait for the first.

    The first is the one that the program called first. It may run later, or at the same time.
    """

    first: Access
    second: Access
    overlap: int
    """How many bytes of memory both use; 0 if the second access is the host's."""

    def __str__(self) -> str:
        return f"{self.second}\n  does not wait for\n{self.first}"


def race_of(first: Mapping[str, Any], second: Mapping[str, Any], size: int) -> Race:
    """A race of two operations of the device."""
    return Race(_access(first), _access(second), size)


def host_race_of(is_pinned: bool, copy: Mapping[str, Any] | None, stack: str) -> Race:
    """The host used pinned memory too early, or memory of the device; `stack` is what faulthandler writes."""
    frames = [match.groupdict() for match in _FRAME.finditer(stack)]
    lines = [f"{f['file']}:{f['line']} in {f['name']}" for f in frames if not any(n in f["file"] for n in _NOT_USERS)]
    memory = "pinned memory" if is_pinned else "memory of the device"
    host = Access("the host", "uses", memory, "no stream", tuple(lines[:_LINES]))
    others = Access("a copy" if is_pinned else "any operation", "uses", memory, "some stream", ())
    return Race(others if copy is None else _access(copy), host, 0)


def text_of(races: Sequence[Race]) -> str:
    """What an error says about these races."""
    count = f"{len(races)} pairs of accesses are" if len(races) != 1 else "one pair of accesses is"
    return f"{count} not ordered by any event, wait or synchronization:\n\n" + "\n\n".join(map(str, races))


def _access(access: Mapping[str, Any]) -> Access:
    tensor = f"{access['dtype']}{list(access['sizes'])}"
    does = "writes" if access["writes"] else "reads"
    return Access(access["operation"], does, tensor, access["stream"], tuple(access["lines"]))
