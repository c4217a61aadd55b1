"""Attention over a sequence that is sharded over a line of ranks: keys and values travel around a ring.

Each rank keeps its queries. In n steps it receives the blocks of keys and values of all n ranks in turn. The softmax is
accumulated block by block, with a running maximum and sum per query (online softmax), so that no rank ever holds more
than two blocks. Backward needs the local result and the logarithm of the softmax's denominator: with these, the
contribution of each block to the gradient is independent of the other blocks. In backward the gradients of a block
travel with it, and are back on its rank after n steps.

Which keys a query may see depends on global positions. The rows of a rank are `Segments`: runs of consecutive
positions, in the order of the rows. Causal attention is balanced by giving each rank one chunk from the start of the
sequence and one from its end: then each rank has the same number of query-key pairs.

The work is done in tiles of a bounded number of query rows, in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from terrazzo.comm.axis import Axis
from terrazzo.comm.collectives import exchange_start
from terrazzo.comm.pending import Pending
from terrazzo.errors import DTensorError

Segments: TypeAlias = tuple[tuple[int, int], ...]
"""(first position, length) of each run of rows."""

TILE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Ring:
    """A line of ranks, the positions of the queries on this rank, and those of the keys on every rank."""

    axis: Axis
    queries: Segments
    keys: tuple[Segments, ...]

    def key_rows(self, owner: int) -> int:
        return sum(length for _, length in self.keys[owner])


def head_tail(rank: int, ranks: int, length: int) -> Segments:
    """The balanced part of a sequence: chunk `rank` of 2 * `ranks` counted from the start, and the same from the end.

    >>> head_tail(0, 2, 8), head_tail(1, 2, 8)
    (((0, 2), (6, 2)), ((2, 2), (4, 2)))
    """
    chunk = length // (2 * ranks)
    return ((rank * chunk, chunk), ((2 * ranks - 1 - rank) * chunk, chunk))


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring, is_causal: bool, scale: float) -> Tensor:
    """`scaled_dot_product_attention` of this rank's queries with all ranks' keys and values.

    The second to last dim is the sequence. Queries may have a multiple of the heads (dim -3) of the keys.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    result: Tensor = _RingAttention.apply(query, key, value, ring, is_causal, scale)
    return result


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, is_causal: bool, scale: float
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            out, log_sum = _forward(query, key, value, ring, is_causal, scale)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.rest = (ring, is_causal, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise DTensorError(
                "attention over a sharded sequence has no second derivative: gather the sequence first, with "
                "x.redistribute(...)"
            )
        query, key, value, out, log_sum = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            grads = _backward(grad, query, key, value, out, log_sum, *ctx.rest)
        return (*grads, None, None, None)


# ------------------------------------------------------------------ the ring


def _pass_on(ring: Ring, block: Tensor, received: torch.Size) -> Pending[list[Tensor]]:
    """Start to send a block to the next rank, and to receive one from the previous rank."""
    axis = ring.axis
    pieces: list[Tensor | None] = [None] * axis.size
    shapes: list[torch.Size | None] = [None] * axis.size
    pieces[(axis.index + 1) % axis.size] = block
    shapes[(axis.index - 1) % axis.size] = received
    return exchange_start(pieces, axis, shapes, block)


def _arrived(ring: Ring, pending: Pending[list[Tensor]]) -> Tensor:
    return pending.wait()[(ring.axis.index - 1) % ring.axis.size]


def _owners(ring: Ring) -> list[int]:
    """Which rank's block is here at each step."""
    return [(ring.axis.index - step) % ring.axis.size for step in range(ring.axis.size)]


def _packed_shape(key_value: Tensor, rows: int) -> torch.Size:
    return torch.Size((*key_value.shape[:-2], rows, key_value.shape[-1]))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, ring: Ring, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result, and per query row the logarithm of its softmax's denominator (infinite for rows without keys)."""
    wide = _wide_dtype(query.dtype)
    q = _grouped(query, key)
    state = _Softmax(
        torch.full((*q.shape[:-1], 1), float("-inf"), dtype=wide, device=q.device),
        torch.zeros((*q.shape[:-1], 1), dtype=wide, device=q.device),
        torch.zeros((*q.shape[:-1], value.shape[-1]), dtype=wide, device=q.device),
    )
    owners = _owners(ring)
    block = torch.cat([key, value], -1)
    for step, owner in enumerate(owners):
        pending = None
        if step + 1 < len(owners):
            pending = _pass_on(ring, block, _packed_shape(block, ring.key_rows(owners[step + 1])))
        k, v = block.split([key.shape[-1], value.shape[-1]], -1)
        for tile in _tiles(ring.queries, ring.keys[owner], is_causal):
            state.add(tile, q, k[..., tile.keys, :].to(wide), v[..., tile.keys, :].to(wide), scale)
        if pending is not None:
            block = _arrived(ring, pending)
    out, log_sum = state.finish()
    return out.to(query.dtype).reshape(*query.shape[:-1], value.shape[-1]), log_sum


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    ring: Ring,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide_dtype(query.dtype)
    q, dy = _grouped(query, key), _grouped(grad, key)
    # The sum in the gradient of a softmax, which is subtracted from the gradient of each score of the row.
    pull = (dy.to(wide) * _grouped(out, key).to(wide)).sum(-1, keepdim=True)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    owners = _owners(ring)
    n = len(owners)
    block = torch.cat([key, value], -1)
    travelling: Pending[list[Tensor]] | None = None
    for step, owner in enumerate(owners):
        pending = None
        if step + 1 < n:
            pending = _pass_on(ring, block, _packed_shape(block, ring.key_rows(owners[step + 1])))
        k, v = block.split([key.shape[-1], value.shape[-1]], -1)
        share = torch.zeros(block.shape, dtype=wide, device=block.device)
        dk, dv = share.split([key.shape[-1], value.shape[-1]], -1)
        for tile in _tiles(ring.queries, ring.keys[owner], is_causal):
            rows, columns = tile.rows, tile.keys
            wide_k, wide_v = k[..., columns, :].to(wide), v[..., columns, :].to(wide)
            q_rows, dy_rows = _folded(q, rows, wide), _folded(dy, rows, wide)
            scores = tile.mask(q_rows @ wide_k.mT * scale, q)
            p = (scores - _folded(log_sum, rows, wide)).exp_()
            dv[..., columns, :] += p.mT @ dy_rows
            ds = (dy_rows @ wide_v.mT - _folded(pull, rows, wide)).mul_(p).mul_(scale)
            dk[..., columns, :] += ds.mT @ q_rows
            dq[..., rows, :] += (ds @ wide_k).view(dq[..., rows, :].shape)
        if travelling is not None:
            share += _arrived(ring, travelling)
        if n > 1:
            travelling = _pass_on(ring, share, _packed_shape(share, ring.key_rows(owners[(step + 1) % n])))
        if pending is not None:
            block = _arrived(ring, pending)
    if travelling is not None:
        share = _arrived(ring, travelling)
    dk, dv = share.to(key.dtype).split([key.shape[-1], value.shape[-1]], -1)
    return dq.to(query.dtype).view(query.shape), dk.contiguous(), dv.contiguous()


# ------------------------------------------------------------------ tiles


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some query rows and the keys that at least one of them may see, both as local row numbers.

    `offset` is the position of the first query minus that of the first key; None where every query sees every key.
    """

    rows: slice
    keys: slice
    offset: int | None

    def mask(self, scores: Tensor, q: Tensor) -> Tensor:
        """Scores of hidden pairs become minus infinity; in `scores` the heads of a group are folded into the rows."""
        if self.offset is None:
            return scores
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        visible = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).tril_(self.offset)
        grouped = scores.view(*scores.shape[:-2], q.shape[-3], rows, keys)
        return grouped.masked_fill_(~visible, float("-inf")).view(scores.shape)


def _tiles(queries: Segments, keys: Segments, is_causal: bool) -> Iterator[_Tile]:
    """All tiles of these queries and keys."""
    row = 0
    for q_start, q_length in queries:
        for at in range(0, q_length, TILE_ROWS):
            count = min(TILE_ROWS, q_length - at)
            rows = slice(row + at, row + at + count)
            first, last = q_start + at, q_start + at + count - 1
            column = 0
            for k_start, k_length in keys:
                seen = min(k_length, last - k_start + 1) if is_causal else k_length
                if seen > 0:
                    all_seen = not is_causal or first >= k_start + seen - 1
                    yield _Tile(rows, slice(column, column + seen), None if all_seen else first - k_start)
                column += k_length
        row += q_length


class _Softmax:
    """The accumulated softmax-weighted values: per row the maximum so far, and sums relative to it."""

    def __init__(self, top: Tensor, total: Tensor, values: Tensor) -> None:
        self.top, self.total, self.values = top, total, values

    def add(self, tile: _Tile, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        rows = tile.rows
        scores = tile.mask(_folded(q, rows, k.dtype) @ k.mT * scale, q)
        old, total, values = self.top[..., rows, :], self.total[..., rows, :], self.values[..., rows, :]
        top = torch.maximum(old, scores.amax(-1, keepdim=True).view(old.shape))
        base = top.masked_fill(top == float("-inf"), 0.0)  # rows without a visible key so far
        kept = (old - base).exp_()
        p = (scores - base.reshape(*scores.shape[:-1], 1)).exp_()
        total.mul_(kept).add_(p.sum(-1, keepdim=True).view(old.shape))
        values.mul_(kept).add_((p @ v).view(values.shape))
        old.copy_(top)

    def finish(self) -> tuple[Tensor, Tensor]:
        blind = self.total == 0
        out = self.values.div_(self.total.masked_fill(blind, 1.0))
        return out, (self.top + self.total.log()).masked_fill_(blind, float("inf"))


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """With a dim of query heads per key head before the sequence: (..., heads, group, rows, features)."""
    if x.dim() < 3 or x.shape[-3] == key.shape[-3]:
        return x.unsqueeze(-3)
    return x.unflatten(-3, (key.shape[-3], -1))


def _folded(x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """Some rows of a grouped tensor, with the group folded into the rows."""
    part = x[..., rows, :].to(dtype)
    return part.reshape(*part.shape[:-3], -1, part.shape[-1])
