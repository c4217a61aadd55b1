"""Packing tensors into the flat buffers that are sent, and unpacking those that are received."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from terrazzo.layout.box import Box, make_up


def detached(x: Tensor) -> Tensor:
    """`x` detached from autograd, with pending conjugation and negation applied."""
    if x.requires_grad and torch.is_grad_enabled():
        x = x.detach()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x


def dense(x: Tensor) -> Tensor:
    """The values of `x`, contiguous and detached from autograd."""
    return detached(x).contiguous()


def flat_parts(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts of `x` along `dim`, each flattened in row-major order, one after the other."""
    x = detached(x)
    if prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1)
    if sizes.count(sizes[0]) == len(sizes):
        # flatten of an expanded tensor (a gradient, for example) may return a view; here it has to be a copy.
        parts = x.view(*x.shape[:dim], len(sizes), sizes[0], *x.shape[dim + 1 :]).movedim(dim, 0)
        return parts.reshape(-1).contiguous()
    flat = x.new_empty(x.numel())
    begin = start = 0
    for size, count in _runs(sizes):
        piece = x.narrow(dim, begin, size * count)
        parts = piece.unflatten(dim, (count, size)).movedim(dim, 0)
        stop = start + parts.numel()
        flat[start:stop].view(parts.shape).copy_(parts)
        begin, start = begin + size * count, stop
    return flat


def _runs(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The nonzero sizes, as (size, how many in a row): few entries where one rule cuts for all ranks."""
    return [(size, sum(1 for _ in group)) for size, group in groupby(sizes) if size]


def concatenate(flat: Tensor, shape: Sequence[int], dim: int, sizes: Sequence[int]) -> Tensor:
    """One tensor from the parts that lie in `flat`: of `shape`, except for their `sizes` along `dim`."""
    before, after = tuple(shape[:dim]), tuple(shape[dim + 1 :])
    if prod(before) == 1:
        return flat.view(*before, sum(sizes), *after)
    runs = _runs(sizes)
    row = prod(before) * prod(after)
    parts = flat.split_with_sizes([size * count * row for size, count in runs]) if runs else ()
    joined = [
        part.view(count, *before, size, *after).movedim(0, dim).reshape(*before, count * size, *after)
        for part, (size, count) in zip(parts, runs, strict=True)
    ]
    if not joined:
        return flat.view(*before, 0, *after)
    # Parts of length 1 can be stacked without a copy, but not in this order.
    return joined[0].contiguous() if len(joined) == 1 else torch.cat(joined, dim)


def repeat(x: Tensor, n: int) -> Tensor:
    """The dense `x`, flattened, `n` times."""
    return x.view(-1).expand(n, -1).contiguous().view(-1)


def assemble(parts: Sequence[Tensor], boxes: Sequence[Box | None], shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor of `shape` to which each part is added in its box (a None box is skipped); 0 elsewhere."""
    out = like.new_empty(tuple(shape))
    once = _tile(tuple(boxes), tuple(shape))
    if not once:
        out.zero_()
    for box, part in zip(boxes, parts, strict=True):
        if box is not None:
            target = out[box.slices()]
            if once:
                target.copy_(part)
            else:
                target.add_(part)
    return out


@lru_cache(maxsize=1024)
def _tile(boxes: tuple[Box | None, ...], shape: tuple[int, ...]) -> bool:
    """Whether the boxes cover a tensor of `shape`, each element once."""
    return make_up(Box.whole(shape), filter(None, boxes))
