"""`page_of`: the page of an object."""

from __future__ import annotations

from typing import Any

from torch import nn

from terrazzo.checkpoint import Checkpoint
from terrazzo.comm.mesh import ranks_of
from terrazzo.errors import ViewError
from terrazzo.fsdp import Timeline, Trace, timeline
from terrazzo.launch.config import Run
from terrazzo.layout import Layout
from terrazzo.tensor import DTensor
from terrazzo.view.data.checkpoint_data import checkpoint_data
from terrazzo.view.data.diff_data import diff_data
from terrazzo.view.data.layout_data import layout_data
from terrazzo.view.data.run_data import data_of_run, runs_data
from terrazzo.view.data.trace_data import trace_data
from terrazzo.view.page import Page


def page_of(*things: Any, title: str = "") -> Page:
    """A page that shows a checkpoint or two, a layout, a DTensor, a step or several, a sharded model, or runs.

    `page_of(...).save("page.html")` writes it to a file. A notebook displays it.

    >>> from terrazzo.layout import Layout, Shard
    >>> from terrazzo.view.data.layout_data import SketchedMesh
    >>> page_of(Layout.of(SketchedMesh((64, 8), ("dp", "tp")), [Shard(0), Shard(1)], (4096, 4096))).title
    'layout'

    Args:
        things: a `Checkpoint`, or two to compare; a `Layout` or a `DTensor`; the `Trace` or the `Timeline` of each
            rank, and to compare steps those of others after them; a module that `fully_shard` was called on, whose
            planned step is shown; a `Run`, or several.
        title: the title of the page.
    """
    if not things:
        raise ViewError("page_of needs an argument: a checkpoint, a layout, a trace, a sharded model or a run")
    if all(isinstance(thing, Checkpoint) for thing in things) and len(things) <= 2:
        if len(things) == 1:
            return Page(checkpoint_data(things[0], title or "checkpoint"))
        return Page(diff_data(things[0], things[1], ("the first", "the second")))
    if all(isinstance(thing, (Trace, Timeline)) for thing in things):
        found = [thing.timeline() if isinstance(thing, Trace) else thing for thing in things]
        return Page(trace_data(found, title or "step"))
    if all(isinstance(thing, Run) for thing in things):
        return Page(runs_data([data_of_run(thing) for thing in things], title))
    if len(things) == 1:
        (thing,) = things
        if isinstance(thing, DTensor):
            layout = thing._layout
            ranks = ranks_of(layout.mesh)
            return Page(layout_data(layout, ranks=ranks, itemsize=thing.dtype.itemsize, title=title or "DTensor"))
        if isinstance(thing, Layout):
            return Page(layout_data(thing, title=title))
        if isinstance(thing, nn.Module):
            return Page(trace_data([timeline(thing)], title or f"planned step of {type(thing).__name__}"))
    kinds = ", ".join(type(thing).__name__ for thing in things)
    raise ViewError(
        f"page_of cannot show {kinds} on one page: it takes a checkpoint or two, a layout, a DTensor, traces, a "
        "sharded model, or runs"
    )
