"""How tensors lie in the flat buffers that are sent, and are made of those that are received."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, groupby
from math import prod

import torch
from torch import Tensor

from terrazzo.layout.box import Box


def detached(x: Tensor) -> Tensor:
    """The values of `x`, stored as they show, without history."""
    if x.requires_grad and torch.is_grad_enabled():
        x = x.detach()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x


def dense(x: Tensor) -> Tensor:
    """The values of `x` in row-major order, without history."""
    return detached(x).contiguous()


def flat_parts(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts of `x` along `dim`, each flattened in row-major order, one after the other."""
    x = detached(x)
    if prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1)
    if sizes.count(sizes[0]) == len(sizes):
        # An expanded gradient can be flattened without a copy, and still has to be one.
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
    """Sizes that are not zero, with how many of each follow one another: few, where one rule cuts for all ranks."""
    return [(size, sum(1 for _ in group)) for size, group in groupby(sizes) if size]


def concatenate(flat: Tensor, shape: Sequence[int], dim: int, sizes: Sequence[int]) -> Tensor:
    """Parts that lie in `flat` one after the other, of `shape` but for their `sizes` along `dim`, as one tensor."""
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
    return joined[0] if len(joined) == 1 else torch.cat(joined, dim)


def repeat(x: Tensor, n: int) -> Tensor:
    """The dense `x`, flattened, `n` times."""
    return x.view(-1).expand(n, -1).contiguous().view(-1)


def assemble(parts: Sequence[Tensor], boxes: Sequence[Box | None], shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor of `shape` with each part added in its box (None: the part does not count), 0 where there is none."""
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
    there = [box for box in boxes if box is not None]
    return sum(box.numel for box in there) == prod(shape) and all(
        a.intersect(b) is None for a, b in combinations(there, 2)
    )
