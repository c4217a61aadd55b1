"""Attention over a sequence that is sharded over a line of ranks: keys and values travel around a ring.

Each rank keeps its queries. In n steps it receives the blocks of keys and values of all n ranks in turn. PyTorch's
fused attention, in the inputs' dtype, gives the result of the queries with a block, and the logarithm of the softmax's
denominator (`log_sum`); results are accumulated with these, in float32. So no rank ever holds more than two blocks, nor
scores of a whole block. Backward gets the whole result and its `log_sum`, with which the contribution of each block
to the gradient is independent of the other blocks. In backward the gradients of a block travel with it, in float32, and
are back on its rank after n steps. With `rotate="allgather"` all blocks are gathered at once instead: one collective,
and memory for the whole sequence's keys and values.

Which keys a query may see depends on global positions. The rows of a rank are `Segments`: runs of consecutive
positions, in the order of the rows. Causal attention is balanced by giving each rank one chunk from the start of the
sequence and one from its end: then each rank has the same number of query-key pairs.

Where PyTorch has no fused attention (heads of values that differ in size, masks on an accelerator), the work is done
from matrix products, in float32 or wider and in tiles of `TILE_ROWS` query rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from terrazzo._torch.attention import Kernel, kernel_for
from terrazzo.comm.axis import Axis
from terrazzo.comm.collectives import all_gather, exchange_start, reduce_scatter
from terrazzo.comm.pending import Pending
from terrazzo.errors import DTensorError

Segments: TypeAlias = tuple[tuple[int, int], ...]
"""(first position, length) of each run of rows."""

Rotate: TypeAlias = Literal["alltoall", "allgather"]

TILE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Ring:
    """A line of ranks, the positions of the queries on this rank, and those of the keys on every rank."""

    axis: Axis
    queries: Segments
    keys: tuple[Segments, ...]
    rotate: Rotate = "alltoall"

    def key_rows(self, owner: int) -> int:
        return sum(length for _, length in self.keys[owner])


def head_tail(rank: int, ranks: int, length: int) -> Segments:
    """The balanced part of a sequence: chunk `rank` of 2 * `ranks` counted from the start, and the same from the end.

    >>> head_tail(0, 2, 8), head_tail(1, 2, 8)
    (((0, 2), (6, 2)), ((2, 2), (4, 2)))
    """
    chunk = length // (2 * ranks)
    return ((rank * chunk, chunk), ((2 * ranks - 1 - rank) * chunk, chunk))


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, ring: Ring, is_causal: bool, scale: float, mask: Tensor | None = None
) -> Tensor:
    """`scaled_dot_product_attention` of this rank's queries with all ranks' keys and values.

    The second to last dim is the sequence. Queries may have a multiple of the heads (dim -3) of the keys. The mask has
    this rank's queries, or 1, and the keys of the whole sequence in their order, or 1.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    shape = (*query.shape[:-1], value.shape[-1])
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else _near_zero(mask)
        mask = _in_four_dims(mask.expand(*(query.shape[:-2] if query.dim() > 4 else mask.shape[:-2]), *mask.shape[-2:]))
    rows = [_in_four_dims(t if t.stride(-1) == 1 else t.contiguous()) for t in (query, key, value)]
    result: Tensor = _RingAttention.apply(*rows, ring, is_causal, scale, mask)
    return result.view(shape)


def _near_zero(mask: Tensor) -> Tensor:
    """An additive mask that gives the same softmax, without rows that are far from zero everywhere.

    Such a row, of a query that -1e9 hides from all keys, has a `log_sum` so large that it has no digits for the number
    of the keys.
    """
    top = mask.amax(-1, keepdim=True)
    is_far = (top.abs() > 1000) & (top > torch.finfo(mask.dtype).min / 2)
    return mask - torch.where(is_far, top, 0.0)


def _in_four_dims(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-3:]) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            out, log_sum = _forward(query, key, value, *rest)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.rest = rest
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise DTensorError(
                "attention over a sharded sequence has no second derivative: gather the sequence first, with "
                "x.redistribute(...)"
            )
        query, key, value, out, log_sum = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # a kernel needs rows in memory, not an expanded sum
        with torch.autocast(query.device.type, enabled=False):
            grads = _backward(grad, query, key, value, out, log_sum, *ctx.rest)
        return (*grads, None, None, None, None)


# ------------------------------------------------------------------ the ring


def _pass_on(ring: Ring, block: Tensor, rows: int) -> Pending[list[Tensor]]:
    """Start to send a block to the next rank, and to receive one from the previous rank."""
    axis = ring.axis
    pieces: list[Tensor | None] = [None] * axis.size
    shapes: list[tuple[int, ...] | None] = [None] * axis.size
    pieces[(axis.index + 1) % axis.size] = block
    shapes[(axis.index - 1) % axis.size] = (*block.shape[:-2], rows, block.shape[-1])
    return exchange_start(pieces, axis, shapes, block)


def _arrived(ring: Ring, pending: Pending[list[Tensor]]) -> Tensor:
    return pending.wait()[(ring.axis.index - 1) % ring.axis.size]


def _owners(ring: Ring) -> list[int]:
    """Which rank's block is here at each step."""
    return [(ring.axis.index - step) % ring.axis.size for step in range(ring.axis.size)]


def _blocks(ring: Ring, block: Tensor) -> Iterator[tuple[int, Tensor]]:
    """All ranks' blocks with their owners; the next one is on its way while one is used."""
    owners = _owners(ring)
    if ring.rotate == "allgather" and ring.axis.size > 1:
        rows = [ring.key_rows(owner) for owner in range(ring.axis.size)]
        gathered = all_gather(block, ring.axis, block.dim() - 2, rows).split(rows, -2)
        yield from [(owner, gathered[owner]) for owner in owners]
        return
    for step, owner in enumerate(owners):
        pending = None
        if step + 1 < len(owners):
            pending = _pass_on(ring, block, ring.key_rows(owners[step + 1]))
        yield owner, block
        if pending is not None:
            block = _arrived(ring, pending)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, ring: Ring, is_causal: bool, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The result, and per query row the logarithm of its softmax's denominator (infinite for rows without keys)."""
    wide = torch.promote_types(query.dtype, torch.float32)
    kernel = kernel_for(query, value, mask is not None)
    log_sum = torch.full(query.shape[:-1], float("-inf"), dtype=wide, device=query.device)
    result = torch.zeros((*query.shape[:-1], value.shape[-1]), dtype=wide, device=query.device)
    for owner, block in _blocks(ring, torch.cat([key, value], -1)):
        k, v = (_for_each_head(t, query) for t in block.split([key.shape[-1], value.shape[-1]], -1))
        for tile in _tiles(ring.queries, ring.keys[owner], is_causal, kernel):
            rows, columns = tile.rows, tile.keys
            bias = tile.bias(mask, query)
            out, log = kernel.forward(
                query[..., rows, :], k[..., columns, :], v[..., columns, :], tile.causal, bias, scale
            )
            if bias is not None:
                log = log.masked_fill((bias == float("-inf")).all(-1).expand(log.shape), float("-inf"))
            _add(result[..., rows, :], log_sum[..., rows], out, log.to(wide))
    return result.to(query.dtype), log_sum.masked_fill_(log_sum == float("-inf"), float("inf"))


def _add(result: Tensor, log_sum: Tensor, out: Tensor, log: Tensor) -> None:
    """Add to the results of some queries, in place, those with more keys."""
    both = torch.logaddexp(log_sum, log)
    base = both.masked_fill(both == float("-inf"), 0.0)  # rows without a visible key so far
    result.mul_((log_sum - base).exp_().unsqueeze(-1)).add_(out * (log - base).exp_().unsqueeze(-1))
    log_sum.copy_(both)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, ring: Ring,
    is_causal: bool, scale: float, mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(query.dtype, torch.float32)
    kernel = kernel_for(query, value, mask is not None)
    axis, sizes = ring.axis, [key.shape[-1], value.shape[-1]]
    dq = torch.zeros(query.shape, dtype=wide, device=query.device)
    travelling: Pending[list[Tensor]] | None = None
    shares: list[Tensor] = []
    for step, (owner, block) in enumerate(_blocks(ring, torch.cat([key, value], -1))):
        k, v = (_for_each_head(t, query) for t in block.split(sizes, -1))
        share = torch.zeros(block.shape, dtype=wide, device=block.device)
        dk, dv = share.split(sizes, -1)
        for tile in _tiles(ring.queries, ring.keys[owner], is_causal, kernel):
            rows, columns = tile.rows, tile.keys
            grads = kernel.backward(
                grad[..., rows, :], query[..., rows, :], k[..., columns, :], v[..., columns, :], out[..., rows, :],
                log_sum[..., rows], tile.causal, tile.bias(mask, query), scale,
            )  # fmt: skip
            dq[..., rows, :] += grads[0]
            dk[..., columns, :] += _of_each_group(grads[1], key)
            dv[..., columns, :] += _of_each_group(grads[2], key)
        if ring.rotate == "allgather":
            shares.append(share)
            continue
        if travelling is not None:
            share += _arrived(ring, travelling)
        if axis.size > 1:
            travelling = _pass_on(ring, share, ring.key_rows(_owners(ring)[(step + 1) % axis.size]))
    if travelling is not None:
        share = _arrived(ring, travelling)
    if ring.rotate == "allgather":
        in_order = [shares[_owners(ring).index(owner)] for owner in range(axis.size)]
        share = reduce_scatter(torch.cat(in_order, -2), axis, key.dim() - 2, [s.shape[-2] for s in in_order])
    dk, dv = share.to(key.dtype).split(sizes, -1)
    return dq.to(query.dtype), dk.contiguous(), dv.contiguous()


def _for_each_head(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values for each head of the queries."""
    return x if x.shape[-3] == query.shape[-3] else x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)


def _of_each_group(grad: Tensor, key: Tensor) -> Tensor:
    """The gradient of what `_for_each_head` has repeated."""
    if grad.shape[-3] == key.shape[-3]:
        return grad
    return grad.unflatten(-3, (key.shape[-3], -1)).sum(-3, dtype=torch.promote_types(grad.dtype, torch.float32))


# ------------------------------------------------------------------ tiles


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some query rows and the keys that at least one of them may see, both as local row numbers.

    `offset` is the position of the first query minus that of the first key; None where every query sees every key.
    `causal`: the queries and the keys are at the same positions. `position` is that of the first key.
    """

    rows: slice
    keys: slice
    offset: int | None
    causal: bool
    position: int

    def bias(self, mask: Tensor | None, query: Tensor) -> Tensor | None:
        """What is added to the scores, in the queries' dtype: minus infinity for hidden pairs. None: all are seen."""
        keys = self.keys.stop - self.keys.start
        if mask is not None:
            if mask.shape[-2] != 1:
                mask = mask[..., self.rows, :]
            if mask.shape[-1] != 1:
                mask = mask[..., self.position : self.position + keys]
            seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            added = query.new_zeros(()) if mask.dtype == torch.bool else mask.to(query.dtype)
            bias = torch.where(seen, added, float("-inf"))
            return bias.expand(*bias.shape[:-2], self.rows.stop - self.rows.start, keys)
        if self.offset is None or self.causal:
            return None
        rows = self.rows.stop - self.rows.start
        bias = torch.full((rows, keys), float("-inf"), dtype=query.dtype, device=query.device)
        return bias.triu_(self.offset + 1)[None, None]


def _tiles(queries: Segments, keys: Segments, is_causal: bool, kernel: Kernel) -> Iterator[_Tile]:
    """All tiles of these queries and keys: a fused kernel takes runs as a whole, where no mask is to be made."""
    row = 0
    for q_start, q_length in queries:
        column = 0
        for k_start, k_length in keys:
            apart = not is_causal or q_start >= k_start + k_length
            whole = kernel.fused and (apart or (q_start == k_start and q_length <= k_length))
            step = max(q_length, 1) if whole else TILE_ROWS
            for at in range(0, q_length, step):
                count = min(step, q_length - at)
                rows = slice(row + at, row + at + count)
                first, last = q_start + at, q_start + at + count - 1
                seen = min(k_length, last - k_start + 1) if is_causal else k_length
                if seen > 0:
                    all_seen = not is_causal or first >= k_start + seen - 1
                    offset = None if all_seen else first - k_start
                    causal = offset == 0 and count == seen and kernel.fused
                    yield _Tile(rows, slice(column, column + seen), offset, causal, k_start)
            column += k_length
        row += q_length
