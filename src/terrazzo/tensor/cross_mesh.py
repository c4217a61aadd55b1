"""Redistribution from one mesh to another, of another shape or with other ranks.

The ranks of both meshes exchange the intersections of their boxes. A rank that already holds what it needs keeps it;
otherwise the replicas of a box take turns as senders. The gradient of a replicated value is replicated, too, so the
backward of a transfer is the transfer in the other direction, not its transpose.

Ranks outside a mesh take part with an empty local tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from terrazzo.comm.axis import axis_over
from terrazzo.comm.collectives import all_gather, exchange
from terrazzo.comm.mesh import ranks_of, when_groups_end
from terrazzo.comm.simulated import is_simulated
from terrazzo.errors import DTensorArgumentError
from terrazzo.layout import Box, Layout, cells_in, first_holders, replicas
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.redistribute import redistribute_local


@dataclass(frozen=True, slots=True)
class MeshTransfer:
    """What this rank sends to and receives from each rank of `ranks`, relative to its old and new local part."""

    ranks: tuple[int, ...]
    send: tuple[Box | None, ...]
    receive: tuple[Box | None, ...]
    shape: tuple[int, ...]


def boxes_by_rank(layout: Layout) -> dict[int, Box]:
    """For each global rank the box that it holds."""
    return layout.boxes(ranks_of(layout.mesh))


@functools.lru_cache(maxsize=1024)
def plan_transfer(src: Layout, dst: Layout, me: int) -> MeshTransfer:
    """The transfer of rank `me` between two layouts that are not partial.

    Only the boxes that intersect this rank's own are computed; of the other ranks only the numbers are needed.
    """
    holders, receivers = ranks_of(src.mesh), ranks_of(dst.mesh)
    at = {rank: index for index, rank in enumerate(holders)}
    firsts, copies = first_holders(src), replicas(src)
    ranks = tuple(sorted({*holders, *receivers}))
    place = {rank: i for i, rank in enumerate(ranks)}
    turn = {rank: i for i, rank in enumerate(sorted(receivers))}

    def sender(receiver: int, first: int) -> int:
        """The rank that sends a box to `receiver`: itself if it holds the box; otherwise the holders take turns."""
        index = at.get(receiver)
        if index is not None and firsts[index] == first:
            return receiver
        return holders[first + copies[turn[receiver] % len(copies)]]

    send: list[Box | None] = [None] * len(ranks)
    receive: list[Box | None] = [None] * len(ranks)
    shape: tuple[int, ...] = (0,)
    if me in turn:
        wanted = dst.box(_coordinate(receivers.index(me), dst.mesh_shape))
        shape = tuple(wanted.lengths)
        for first, part in cells_in(src, wanted):
            receive[place[sender(me, first)]] = part
    if me in at:
        mine = firsts[at[me]]
        beside = replicas(dst)
        for first, part in cells_in(dst, src.box(_coordinate(at[me], src.mesh_shape))):
            for copy in beside:
                receiver = receivers[first + copy]
                if sender(receiver, mine) == me:
                    send[place[receiver]] = part
    return MeshTransfer(ranks, tuple(send), tuple(receive), shape)


when_groups_end(plan_transfer.cache_clear)


def _coordinate(index: int, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    at: list[int] = []
    for n in reversed(mesh_shape):
        index, i = divmod(index, n)
        at.append(i)
    return tuple(reversed(at))


def _transfer(local: torch.Tensor, src: Layout, dst: Layout) -> torch.Tensor:
    me = dist.get_rank()
    plan = plan_transfer(src, dst, me)
    if me not in plan.ranks:
        return local.new_empty((0,))
    axis = axis_over(plan.ranks, dst.mesh.device_type)
    local = local.detach()
    pieces = [None if box is None else local[box.slices()] for box in plan.send]
    shapes = [None if box is None else box.lengths for box in plan.receive]
    arrived = exchange(pieces, axis, shapes, local)
    result = local.new_zeros(plan.shape)
    for box, piece in zip(plan.receive, arrived, strict=True):
        if box is not None:
            result[box.slices()] = piece
    return result


class _Transferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, src: Layout, dst: Layout) -> torch.Tensor:
        ctx.layouts = (src, dst)
        return _transfer(local, src, dst)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        src, dst = ctx.layouts
        return _Transferred.apply(grad, dst, src), None, None


_DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)


def _check_dtypes(local: torch.Tensor, src: Layout, dst: Layout) -> None:
    """Raise on all ranks if they do not have one dtype: ranks outside `src` hold nothing that says it.

    A receiver with another dtype would get bytes that mean nothing to it, or end the process.
    """
    holders = ranks_of(src.mesh)
    ranks = tuple(sorted({*holders, *ranks_of(dst.mesh)}))
    if len(ranks) == len(holders) or dist.get_rank() not in ranks:
        return
    axis = axis_over(ranks, dst.mesh.device_type)
    if axis.group is None or is_simulated(axis.group):
        return
    mine = torch.tensor([_DTYPES.index(local.dtype)], device=local.device)
    codes = all_gather(mine, axis, 0, (1,) * axis.size).tolist()
    if len(set(codes)) > 1:
        named = ", ".join(f"rank {rank} {_DTYPES[code]}" for rank, code in zip(ranks, codes, strict=True))
        raise DTensorArgumentError(
            f"redistribute to another mesh: the ranks hold this tensor in several dtypes ({named}); ranks outside the "
            "mesh that it comes from must have made it with the dtype that it has inside"
        )


def redistribute_across(tensor: DTensor, dst: Layout) -> DTensor:
    """`tensor` in layout `dst` on another mesh; every rank of both meshes must call this."""
    src = tensor._layout
    local = tensor._local
    if src.dual is not src:
        if src.coord is not None:
            local = redistribute_local(local, src, src.dual)
        src = src.dual
    _check_dtypes(local, src, dst)
    moved = _Transferred.apply(local, src, dst.dual)
    if dst.dual is not dst and dst.coord is not None:
        moved = redistribute_local(moved, dst.dual, dst)
    return wrap(moved, dst)
