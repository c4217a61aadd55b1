"""A step's timeline for the page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from terrazzo.errors import ViewError
from terrazzo.fsdp import Timeline
from terrazzo.fsdp.spans import LANES, kind_of, memory_of, spans_of, with_modules


class _File(msgspec.Struct, frozen=True):
    """A file of `Trace.save`, as far as it is read here."""

    terrazzo: Timeline | None = None


def read_timeline(path: str | os.PathLike[str]) -> Timeline:
    """The timeline in a file that `Trace.save` has written."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=_File).terrazzo
    except msgspec.MsgspecError as error:
        raise ViewError(f"{os.fspath(path)} is not a trace: {error}") from error
    if found is None:
        raise ViewError(f"{os.fspath(path)} has no timeline: save a trace with `terrazzo.fsdp.trace`")
    units, groups = len(found.units), len(found.groups)
    if any(each.unit >= units for each in found.operations) or any(not 0 <= g < groups for u in found.units for g in u):
        raise ViewError(f"{os.fspath(path)}: an operation names a group that is not there")
    return found


def moved_bytes(timeline: Timeline) -> dict[tuple[str, str, str], int]:
    """Bytes that a rank sends: by group (groups that share a message are one), mesh dims and kind."""
    found: Counter[tuple[str, str, str]] = Counter()
    for each in timeline.operations:
        if each.moves:
            first = timeline.groups_of(each)[0]
            over = timeline.replicas[first] if each.kind == "all-reduce" else timeline.shards[first]
            if each.is_inner:
                over += ", neighbours"
            found[timeline.names_of(each), over, each.kind] += each.moves
    for one, names in with_modules(timeline):
        if one.nbytes:
            found[names or "outside of modules", one.axis, kind_of(one)] += one.nbytes
    return dict(found)


def trace_data(timelines: Sequence[Timeline], title: str, steps: Sequence[str] | None = None) -> dict[str, Any]:
    """The page's data for a step on one rank or several, or for several steps, to compare.

    Args:
        timelines: of all ranks and steps.
        title: the title of the page.
        steps: the name of each timeline's step; None: where a rank comes again, it is another step.
    """
    if len({each.planned for each in timelines}) != 1:
        raise ViewError("a step that ran and a planned step have no common clock: show them on two pages")
    if steps is None:
        steps, seen = [], Counter[int]()
        for each in timelines:
            seen[each.rank] += 1
            steps.append(f"step {seen[each.rank]}")
    names = list(dict.fromkeys(steps))
    starts = {
        name: min(each.began for each, own in zip(timelines, steps, strict=True) if own == name) for name in names
    }
    unit = 1.0 if timelines[0].planned else 1e3  # milliseconds
    ranks = []
    for step, each in sorted(
        zip(map(names.index, steps), timelines, strict=True), key=lambda pair: (pair[0], pair[1].rank)
    ):
        later = (each.began - starts[names[step]]) * unit
        moved = [[*key, nbytes] for key, nbytes in moved_bytes(each).items()]
        ranks.append(
            {
                "step": step,
                "rank": each.rank,
                "world": each.world,
                "held": each.held,
                "bound": each.bound,
                "spans": [
                    [s.lane, s.what, s.groups, s.begin * unit + later, s.end * unit + later, s.bytes, s.backward]
                    for s in spans_of(each)
                ],
                "memory": [[at * unit + later, nbytes] for at, nbytes in memory_of(each)],
                "moved": moved,
            }
        )
    return {
        "kind_of_page": "trace",
        "title": title,
        "planned": timelines[0].planned,
        "steps": names,
        "lanes": [lane for lane in LANES if lane != "collectives" or any(each.collectives for each in timelines)],
        "ranks": ranks,
    }
