"""A step's timeline as bars: gathers, reductions, other collectives, computation and waits.

A gather lasts from when the host starts it until the parameters are unsharded; a reduction until its gradients are
finished. Other collectives, as of tensor parallelism, last until the host has waited for the result. Between two
operations of `fully_shard`, the host computes with the parameters that it used last, unless it is in a collective.
Times are those of the hosts: on an accelerator, work is queued at these times and runs later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from terrazzo.fsdp.plan.operations import Operation
from terrazzo.fsdp.timeline import Collective, Timeline

LANES: Final = ("compute", "waits", "gathers", "reductions", "collectives", "other")
OVERLAPPING: Final = frozenset({"gathers", "reductions", "collectives"})
"""Lanes in which one thing may begin before another has ended."""
_WAITS: Final = frozenset({"copy out", "settle"})
_ENDS: Final = {"gather": ("copy out", "discard"), "reduce": ("finish", "store"), "all-reduce": ("finish",)}
_LANE: Final = {"gather": "gathers", "reduce": "reductions", "all-reduce": "reductions"}
_SILENT: Final = frozenset({"use", "write", "queued", "follow"})  # operations for which the host does nothing


class Span(msgspec.Struct, frozen=True):
    """A bar of the timeline. `lane` is one of `LANES`; `groups` names modules, of a collective the mesh dims, too."""

    lane: str
    what: str
    groups: str
    begin: float
    end: float
    bytes: int
    backward: bool


def spans_of(timeline: Timeline) -> list[Span]:
    """The bars of the timeline.

    >>> from terrazzo.fsdp import Operation, Timeline
    >>> times = {"gather": (0.0, 1.0), "copy out": (3.0, 4.0), "use": (4.0, 4.0), "free": (6.0, 7.0)}
    >>> ran = [Operation(kind, 0, begin=begin, end=end) for kind, (begin, end) in times.items()]
    >>> found = spans_of(Timeline(0, 2, 0.0, False, ["w"], [(0,)], ["dp"], [""], 8, 16, operations=ran))
    >>> [(span.lane, span.begin, span.end) for span in found]
    [('gathers', 0.0, 4.0), ('waits', 3.0, 4.0), ('compute', 4.0, 6.0), ('other', 6.0, 7.0)]
    """
    found = []
    operations = timeline.operations
    ends = _ends(operations)
    used: Operation | None = None
    for number, each in enumerate(operations):
        names = timeline.names_of(each)
        if each.kind == "use" and timeline.planned:
            found.append(Span("compute", "compute", names, each.begin, each.end, 0, each.backward))
        elif each.kind in _LANE:
            end = max(each.end, ends.get(number, each.end))
            found.append(Span(_LANE[each.kind], each.kind, names, each.begin, end, each.moves, each.backward))
        elif each.kind not in _SILENT:
            lane = "waits" if each.kind in _WAITS else "other"
            found.append(Span(lane, each.kind, names, each.begin, each.end, each.moves, each.backward))
        used = each if each.kind == "use" else used
        if used is not None and not timeline.planned and number + 1 < len(operations):
            gap = operations[number + 1].begin
            backward = operations[number + 1].backward
            for begin, end in _without_collectives(each.end, gap, timeline.collectives):
                found.append(Span("compute", "compute", timeline.names_of(used), begin, end, 0, backward))
    for one, names in with_modules(timeline):
        what, over = kind_of(one), f"{names} over {one.axis}" if names else f"over {one.axis}"
        found.append(Span("collectives", what, over, one.begin, one.end, one.nbytes, one.backward))
    return found


def _without_collectives(begin: float, end: float, collectives: Sequence[Collective]) -> Iterator[tuple[float, float]]:
    """The parts of an interval in which the host is not in a collective. Collectives are in order of their begin."""
    for each in collectives:
        if each.async_op or each.end <= begin or each.begin >= end:
            continue
        if each.begin > begin:
            yield begin, each.begin
        begin = each.end
    if begin < end:
        yield begin, end


def with_modules(timeline: Timeline) -> Iterator[tuple[Collective, str]]:
    """The program's collectives, each with the module whose parameters were used last before it, or ""."""
    uses = [each for each in timeline.operations if each.kind == "use"]
    number = 0
    for one in timeline.collectives:
        while number < len(uses) and uses[number].begin <= one.begin:
            number += 1
        yield one, timeline.names_of(uses[number - 1]) if number else ""


def kind_of(collective: Collective) -> str:
    """Its kind, as it is shown."""
    return collective.kind.replace("_", "-")


def _ends(operations: Sequence[Operation]) -> dict[int, float]:
    """The times at which gathers and reductions end, by the numbers of the operations that start them."""
    waiting: dict[tuple[str, int], int] = {}  # by the kind of operation that ends it, and the unit
    found: dict[int, float] = {}
    for number, each in enumerate(operations):
        begun = waiting.pop((each.kind, each.unit), None)
        if begun is not None:
            found[begun] = max(found.get(begun, 0.0), each.end)
        for kind in _ENDS.get(each.kind, ()):
            waiting[kind, each.unit] = number
    return found


def memory_of(timeline: Timeline) -> list[tuple[float, int]]:
    """The memory over time: bytes of shards, gradients, unsharded parameters and buffers."""
    points = [(0.0, timeline.held)]
    for each in timeline.operations:
        points += [(each.begin, timeline.held + each.memory), (each.end, timeline.held + each.after)]
    return points
