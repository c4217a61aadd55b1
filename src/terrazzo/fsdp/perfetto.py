"""Timelines as a file for Perfetto and chrome://tracing: a process per rank, a row per lane, memory as counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from terrazzo.fsdp.spans import LANES, OVERLAPPING, memory_of, spans_of
from terrazzo.fsdp.timeline import Timeline


def perfetto(timelines: Sequence[Timeline], **more: Timeline) -> bytes:
    """The timelines of one or several ranks as a JSON trace, and `more`. In a plan, an operation takes a microsecond.

    >>> import json
    >>> document = json.loads(perfetto([Timeline(3, 4, 0.0, True, [], [], [], [], 8, 16)]))
    >>> document["traceEvents"][0]
    {'name': 'process_name', 'ph': 'M', 'pid': 3, 'args': {'name': 'rank 3 of 4'}}
    """
    start = min((each.began for each in timelines), default=0.0)
    events: list[dict[str, Any]] = []
    for each in timelines:
        unit = 1.0 if each.planned else 1e6  # microseconds
        later = (each.began - start) * unit
        name = f"rank {each.rank} of {each.world}"
        events.append({"name": "process_name", "ph": "M", "pid": each.rank, "args": {"name": name}})
        for number, lane in enumerate(LANES):
            about = {"ph": "M", "pid": each.rank, "tid": number}
            events.append({"name": "thread_name", **about, "args": {"name": lane}})
            events.append({"name": "thread_sort_index", **about, "args": {"sort_index": number}})
        events += _of_spans(each, unit, later)
        for at, nbytes in memory_of(each):
            values = {"bytes": nbytes, "bound": each.bound}
            events.append({"name": "memory", "ph": "C", "ts": at * unit + later, "pid": each.rank, "args": values})
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", **more})


def _of_spans(timeline: Timeline, unit: float, later: float) -> list[dict[str, Any]]:
    """The events of bars. In some lanes bars overlap, so they are asynchronous events there."""
    found: list[dict[str, Any]] = []
    for number, span in enumerate(spans_of(timeline)):
        about = {
            "name": f"{span.what} {span.groups}",
            "cat": "backward" if span.backward else "forward",
            "pid": timeline.rank,
            "tid": LANES.index(span.lane),
        }
        begin, took = span.begin * unit + later, (span.end - span.begin) * unit
        if span.lane in OVERLAPPING:
            both = {**about, "id": f"{timeline.rank}.{number}"}
            found.append({**both, "ph": "b", "ts": begin, "args": {"bytes": span.bytes}})
            found.append({**both, "ph": "e", "ts": begin + took, "args": {}})
        else:
            found.append({**about, "ph": "X", "ts": begin, "dur": took, "args": {"bytes": span.bytes}})
    return found
