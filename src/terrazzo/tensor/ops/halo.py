"""Windows that slide over a sharded dim: each rank fetches the rows beyond its own that its windows need.

Inputs and outputs are both cut as `torch.chunk` does, so which rows a window needs is arithmetic. The rows come from
the ranks that hold them (neighbours, except for tiny shards), and their gradients go back the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from terrazzo.comm.axis import Axis, axis_of
from terrazzo.comm.differentiable import exchange
from terrazzo.layout import Box, Layout


@dataclass(frozen=True, slots=True)
class Window:
    """A window over one dim.

    >>> Window(kernel=3, before=1, after=1).outputs(8)
    8
    >>> Window(kernel=3, before=1, after=1).reach(2, 4)  # the inputs of outputs 2 and 3
    (1, 5)
    """

    kernel: int
    stride: int = 1
    before: int = 0  # padding
    after: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, size: int) -> int:
        """The number of outputs for `size` inputs."""
        return (size + self.before + self.after - self.span) // self.stride + 1

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """The inputs that outputs `start` to `stop` need; padding counts as below 0 and beyond the last input."""
        return start * self.stride - self.before, (stop - 1) * self.stride - self.before + self.span


@dataclass(frozen=True, slots=True)
class _Fetch:
    """What this rank sends and receives along one dim, and the resulting shape."""

    axis: Axis
    send: tuple[Box | None, ...]
    receive: tuple[Box | None, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Halo:
    """How one rank gets all rows that its windows need."""

    fetches: tuple[_Fetch, ...]
    pads: tuple[int, ...]  # as `torch.nn.functional.pad` takes them

    def around(self, x: torch.Tensor, padding: float) -> torch.Tensor:
        """The local tensor with the rows around it; `padding` fills the ends of the whole tensor."""
        for fetch in self.fetches:
            x = exchange(x, fetch.axis, fetch.send, fetch.receive, fetch.shape)
        return F.pad(x, self.pads, value=padding) if any(self.pads) else x


def plan_halo(
    source: Layout, result: Layout, windows: Mapping[int, Window], sharded: Mapping[int, Sequence[int]]
) -> Halo:
    """How this rank gets the rows that `windows` (per dim) need; `sharded` has the mesh dims, outermost first.

    Dims that are not sharded are only padded.
    """
    shape = list(source.local_shape)
    fetches = []
    pads = [0] * (2 * len(shape))
    for dim, window in windows.items():
        mesh_dims = tuple(sharded.get(dim, ()))
        if mesh_dims:
            fetch, before, after = _plan_fetch(source, result, dim, window, mesh_dims, shape)
            fetches.append(fetch)
            shape[dim] = fetch.shape[dim]
        else:
            before, after = window.before, window.after
        at = 2 * (len(shape) - 1 - dim)
        pads[at : at + 2] = before, after
    return Halo(tuple(fetches), tuple(pads))


def _plan_fetch(
    source: Layout, result: Layout, dim: int, window: Window, mesh_dims: tuple[int, ...], shape: Sequence[int]
) -> tuple[_Fetch, int, int]:
    assert source.coord is not None
    held, needed, raw = [], [], []
    for position in product(*(range(source.mesh_shape[m]) for m in mesh_dims)):
        coordinate = list(source.coord)
        for m, index in zip(mesh_dims, position, strict=True):
            coordinate[m] = index
        held.append(_span(source.box(tuple(coordinate)), dim))
        start, stop = _span(result.box(tuple(coordinate)), dim)
        low, high = window.reach(start, stop) if start < stop else (0, 0)
        raw.append((low, high))
        needed.append((min(max(low, 0), source.shape[dim]), max(min(high, source.shape[dim]), 0)))
    axis = axis_of(source.mesh, mesh_dims)
    mine, wanted = held[axis.index], needed[axis.index]
    low, high = wanted
    rows = max(high - low, 0)

    def box(common: tuple[int, int], origin: int) -> Box | None:
        start, stop = common
        if start >= stop:
            return None
        offsets, lengths = [0] * len(shape), list(shape)
        offsets[dim], lengths[dim] = start - origin, stop - start
        return Box(tuple(offsets), tuple(lengths))

    send = tuple(box(_common(mine, theirs), mine[0]) for theirs in needed)
    receive = tuple(box(_common(theirs, wanted), low) for theirs in held)
    own = list(shape)
    own[dim] = rows
    first, last = raw[axis.index]
    # A window that lies in the padding alone contains no row: all of it is padding.
    before, after = (low - first, last - high) if rows else (last - first, 0)
    return _Fetch(axis, send, receive, tuple(own)), before, after


def _span(box: Box, dim: int) -> tuple[int, int]:
    return box.offsets[dim], box.offsets[dim] + box.lengths[dim]


def _common(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), min(a[1], b[1])


def each(value: Any, n: int) -> tuple[int, ...]:
    """An argument that is given once for all dims or once for each.

    >>> each(2, 3), each((1, 2), 2)
    ((2, 2, 2), (1, 2))
    """
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values
