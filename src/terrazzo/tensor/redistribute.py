"""Runs the steps of a planned transition on a local tensor, differentiably.

The backward of a gather depends on who uses the result. Where every rank computes the same with it, the gradient is
replicated, and each rank keeps its slice. Where ranks compute different things along a mesh dim, each has only a term
of the gradient, and the terms are reduce-scattered. `varying` lists the mesh dims of the second kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch

from terrazzo._torch.tensors import version_of
from terrazzo.comm import collectives
from terrazzo.comm import differentiable as typed
from terrazzo.comm.axis import axis_of
from terrazzo.comm.pending import Pending
from terrazzo.comm.wrapped import is_wrapper, why_not_sent
from terrazzo.layout import Layout, Partial, Replicate, Shard, plan_transition
from terrazzo.layout.transition import (
    LOCAL_STEPS,
    AllReduce,
    AllToAll,
    Exchange,
    Gather,
    ReduceScatter,
    Slice,
    Step,
    ToPartial,
    unpacked_steps,
)
from terrazzo.tensor.foreign import refuse_subclass

_R = Replicate()


def boxes_of(layout: Layout) -> Layout:
    """The layout with neither terms nor a dim that is cut in pieces: what a rank holds is one box of the tensor."""
    return layout.with_placements([p if isinstance(p, Shard) else _R for p in layout.placements], layout.order)


def replicas_of(layout: Layout) -> Layout:
    """The layout with the whole tensor on each rank."""
    return layout.with_placements((_R,) * len(layout.placements))


def redistribute_local(local: torch.Tensor, src: Layout, dst: Layout, varying: tuple[int, ...] = ()) -> torch.Tensor:
    """This rank's part under `dst`, given its part under `src`."""
    # What will become a partial term is gathered as a replica first, whatever uses the terms.
    if varying and dst.dual is not dst:
        varying = tuple(m for m in varying if not isinstance(dst.placements[m], Partial))
    if src.packed or dst.packed:
        return _redistribute_packed(local, src, dst, varying)
    for step in steps_for(local, src, dst):
        local = run_step(local, step, src.mesh, varying)
    return local


def steps_for(local: torch.Tensor, src: Layout, dst: Layout) -> Sequence[Step]:
    """The steps from `src` to `dst` for such a local tensor."""
    steps = plan_transition(src, dst)
    if is_wrapper(local) and any(isinstance(step, Exchange) for step in steps) and why_not_sent(local):
        whole = src.with_placements((_R,) * src.mesh.ndim)  # it is cut dim by dim, not box by box
        return (*plan_transition(src, whole), *plan_transition(whole, dst))
    return steps


def _redistribute_packed(local: torch.Tensor, src: Layout, dst: Layout, varying: tuple[int, ...]) -> torch.Tensor:
    """`redistribute_local` where a dim of one layout is cut in pieces: seen as two dims, it is one box."""
    if src is dst or src.coord is None:
        return local
    (first, between), (after, last) = unpacked_steps(src, dst)
    # A mesh dim that is replicated only in between, and then cut, has no users there that vary.
    still = tuple(m for m in varying if between.placements[m] is _R and dst.placements[m] is _R)
    local = _flat(redistribute_local(_in_pieces(local, src.packed), first, between, still), src.packed)
    return _flat(redistribute_local(_in_pieces(local, dst.packed), after, last, varying), dst.packed)


def _in_pieces(local: torch.Tensor, pieces: Mapping[int, int]) -> torch.Tensor:
    for dim in sorted(pieces, reverse=True):
        local = local.unflatten(dim, (pieces[dim], local.shape[dim] // pieces[dim]))
    return local


def _flat(local: torch.Tensor, pieces: Mapping[int, int]) -> torch.Tensor:
    for dim in sorted(pieces):
        local = local.flatten(dim, dim + 1)
    return local


class Gathered:
    """What a gathered replica was gathered from.

    Users of the replica that vary over the ranks need another backward, a reduce-scatter; the gathered data is reused.
    """

    __slots__ = ("_mesh", "_source", "_step", "_version")

    def __init__(self, source: torch.Tensor, step: Gather, mesh: Any, version: int) -> None:
        self._source, self._step, self._mesh, self._version = source, step, mesh, version

    def varying(self, local: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        """`local`, the replica, for users that vary over the mesh dims `dims`."""
        step = self._step
        if local._version != self._version or not set(step.mesh_dims) <= set(dims):
            return typed.cast(local, axis_of(self._mesh, dims))
        axis = axis_of(self._mesh, step.mesh_dims)
        received = Pending("all_gather", axis, None, local.detach())
        result = typed.gather_varying(self._source, axis, step.dim, step.sizes, received)
        rest = tuple(m for m in dims if m not in step.mesh_dims)
        return typed.cast(result, axis_of(self._mesh, rest)) if rest else result


def gathered_from(local: torch.Tensor, src: Layout, dst: Layout, replica: torch.Tensor) -> Gathered | None:
    """The record for a differentiable replica that was made by one gather alone, else None."""
    if not replica.requires_grad or not dst.is_replicated:
        return None
    steps = () if src.packed else plan_transition(src, dst)
    if len(steps) != 1 or not isinstance(steps[0], Gather) or axis_of(src.mesh, steps[0].mesh_dims).size == 1:
        return None
    return Gathered(local, steps[0], src.mesh, version_of(replica))


def run_step(local: torch.Tensor, step: Step, mesh: Any, varying: tuple[int, ...], pending: Any = None) -> torch.Tensor:
    """Run one step; `pending` is its communication if `start_step` has started it."""
    if isinstance(step, Gather) and len({m in varying for m in step.mesh_dims}) > 1:
        for single in _split_gather(step, mesh.get_coordinate(), mesh.shape):
            local = run_step(local, single, mesh, varying)
        return local
    axis = axis_of(mesh, step.mesh_dims)
    if axis.size == 1:
        return local
    if type(local) is not torch.Tensor and not isinstance(step, LOCAL_STEPS):
        refuse_subclass("redistribute", local, isinstance(step, (Gather, AllToAll)))
    args, started = step.arguments, () if pending is None else (pending,)
    if isinstance(step, Gather):
        gather = typed.gather_varying if step.mesh_dims[0] in varying else typed.gather_replicate
        return gather(local, axis, *args, *started)
    if _reduces_first(step):
        return typed.slice_own(typed.reduce_replicate(local, axis, step.op, *started), axis, step.dim, step.sizes)
    return _RUN[type(step)](local, axis, *args, *started)


def start_step(local: torch.Tensor, step: Step, mesh: Any) -> Any:
    """Start the communication of one step; `run_step` finishes it."""
    axis = axis_of(mesh, step.mesh_dims)
    refuse_subclass("redistribute", local, isinstance(step, (Gather, AllToAll)))
    local = local.detach()
    if _reduces_first(step):
        return collectives.all_reduce_start(local, axis, step.op)
    if not isinstance(step, Exchange):
        return _START[type(step)](local, axis, *step.arguments)
    pieces = [None if box is None else local[box.slices()] for box in step.send]
    shapes = [None if box is None else box.lengths for box in step.receive]
    return collectives.exchange_start(pieces, axis, shapes, local)


def _reduces_first(step: Step) -> TypeGuard[ReduceScatter]:
    """Whether all terms are reduced on every rank, which keeps its part: of products, maxima and minima."""
    return isinstance(step, ReduceScatter) and step.op not in ("sum", "avg")


def _split_gather(step: Gather, coord: Sequence[int], mesh_shape: Sequence[int]) -> list[Gather]:
    """One gather per mesh dim, innermost first: for mesh dims whose gathers have different backwards."""
    result: list[Gather] = []
    sizes, dims = list(step.sizes), list(step.mesh_dims)
    while dims:
        m = dims.pop()
        n = mesh_shape[m]
        mine = 0
        for outer in dims:
            mine = mine * mesh_shape[outer] + coord[outer]
        result.append(Gather((m,), step.dim, tuple(sizes[mine * n : mine * n + n])))
        sizes = [sum(sizes[i : i + n]) for i in range(0, len(sizes), n)]
    return result


_RUN: dict[type, Callable[..., torch.Tensor]] = {
    Slice: typed.slice_own,
    AllReduce: typed.reduce_replicate,
    ReduceScatter: typed.reduce_scatter,
    AllToAll: typed.all_to_all,
    ToPartial: typed.replicate_to_partial,
    Exchange: typed.exchange,
}
_START: dict[type, Callable[..., Any]] = {
    Gather: collectives.all_gather_start,
    AllReduce: collectives.all_reduce_start,
    ReduceScatter: collectives.reduce_scatter_start,
    AllToAll: collectives.all_to_all_start,
}
