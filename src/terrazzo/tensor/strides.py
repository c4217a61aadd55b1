"""Strides of the global tensor, derived from the local tensor's strides or known.

Whether a tensor is contiguous, and whether a view of it with another shape exists, must have the same answer on every
rank; otherwise one rank would write to a copy and another to the tensor itself. So the question is asked of the global
tensor. A local tensor's strides answer it where the rank holds several rows along each dim. Where it holds one row they
may be anything along that dim, and without elements anything at all: there the global strides of a result are computed
(`dispatch.empties`) and noted on its local tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from terrazzo._torch.tensors import base_of

_STRIDES = "_global_strides"
"""An attribute of some local tensors: the shape of the global tensor, and its strides on one device."""

Known = tuple[tuple[int, ...], tuple[int, ...]]

_CHANNELS_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
"""By the number of dims: their order in memory in the formats `channels_last` and `channels_last_3d`."""


def note_strides(local: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """`local`, of which it is known from now on that the global tensor of this shape has these strides."""
    return note_known(local, (tuple(shape), tuple(strides)))


def note_known(local: torch.Tensor, known: Known) -> torch.Tensor:
    """The same, with shape and strides in one."""
    setattr(local, _STRIDES, known)
    return local


def keeping_strides(same: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """`same`, which has the elements of `of` in the same order, with what is known of its strides."""
    known: Known | None = getattr(of, _STRIDES, None)
    return same if known is None else note_known(same, known)


def take_over_strides(local: torch.Tensor, of: torch.Tensor) -> None:
    """Have `local`, which got the elements of `of`, know as much of its strides, and nothing of its former ones."""
    known: Known | None = getattr(of, _STRIDES, None)
    if known is not None or hasattr(local, _STRIDES):
        setattr(local, _STRIDES, known)


def what_strides_say(local: torch.Tensor) -> tuple[bool, Any]:
    """Whether the strides are known, and those that are, or the local ones: equal for tensors of one shape that
    `strides_in_memory` treats alike."""
    known: Known | None = getattr(local, _STRIDES, None)
    if known is not None:
        return True, known
    return False, (0,) if _lacks_strides(local) else local.stride()


def strides_in_memory(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides that the global tensor could have on one device, with gaps where it has some.

    >>> strides_in_memory(torch.empty(2, 3).t(), (3, 8)), strides_in_memory(torch.empty(2, 6)[:, :3], (8, 3))
    ((1, 3), (6, 1))
    """
    known: Known | None = getattr(local, _STRIDES, None)
    if known is not None and known[0] == tuple(shape):
        return known[1]
    if _lacks_strides(local) or local.dim() != len(shape):  # the latter on a rank outside the mesh
        return dense_strides(shape, range(len(shape)))
    strides, sizes, given = [0] * len(shape), local.shape, local.stride()
    channels_last = _CHANNELS_LAST.get(len(shape))
    if channels_last and given == dense_strides(sizes, channels_last) and not local.is_contiguous():
        return dense_strides(shape, channels_last)  # as C++ gives them to a new tensor, also along dims of one row
    step, expected, says_contiguous = 1, {1}, local.is_contiguous()
    # Of two dims with the same stride the inner one has a single row on this rank.
    for d in sorted(range(len(shape)), key=lambda d: (given[d], sizes[d], -d)):
        if given[d] == 0:
            continue
        if shape[d] == 1:
            strides[d] = step
            continue
        # In a slice of a tensor the rows are apart: here by twice what they need.
        strides[d] = step if given[d] in expected else 2 * step
        step, expected = strides[d] * max(shape[d], 1), {given[d] * max(sizes[d], 1)}
        if says_contiguous:  # with what C++ looks at; it may be a slice of a whole tensor nevertheless
            expected.add(given[d] * shape[d])
    return tuple(strides)


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dims have this order in memory, the outermost first.

    >>> dense_strides((3, 8), (1, 0))
    (1, 3)
    """
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def global_stride(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the global tensor without gaps, with its dims in the memory order of the local tensor.

    >>> global_stride(torch.empty(2, 6)[:, :3].t(), (3, 8))
    (1, 3)
    """
    return dense_strides(shape, order_in_memory(local, shape))


def order_in_memory(local: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """The dims of the global tensor, from the one with the largest stride to the one with the smallest.

    >>> order_in_memory(torch.empty(3, 1).t(), (3, 3))
    [1, 0]
    """
    strides = strides_in_memory(local, shape)
    order = sorted([d for d, n in enumerate(shape) if n != 1], key=lambda d: (-strides[d], d))
    for d in reversed(range(len(shape))):
        if shape[d] == 1:  # its stride has no meaning, and may differ between ranks
            order.insert(order.index(d + 1) if d + 1 < len(shape) else len(order), d)
    return order


def is_contiguous(local: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether the global tensor is contiguous.

    >>> one_row = torch.empty(4, 3)[:1].t()
    >>> one_row.is_contiguous(), is_contiguous(one_row, (3, 4))
    (True, False)
    """
    if 0 in shape or (local.is_contiguous() and not is_thin(local.shape, shape)):
        return True
    strides = strides_in_memory(local, shape)
    dims = [d for d, n in enumerate(shape) if n != 1]
    return not dims or (strides[dims[-1]] == 1 and _follow(strides, shape, dims))


def without_data(local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A meta tensor like the global one: it answers what depends on shape and strides alone, alike on every rank."""
    return torch.empty_strided(tuple(shape), strides_in_memory(local, shape), dtype=local.dtype, device="meta")


def in_order(local: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """`local` with this order of its dims in memory, outermost first; a copy if it has another.

    >>> in_order(torch.empty(2, 3), (4, 3), (1, 0)).stride()
    (1, 2)
    """
    back = sorted(range(len(order)), key=order.__getitem__)
    local = local.permute(tuple(order)).contiguous().permute(back)
    return note_strides(local, shape, dense_strides(shape, order)) if is_thin(local.shape, shape) else local


def _follow(strides: Sequence[int], shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether along each of these dims the rows of the next one are adjacent in memory."""
    return all(strides[d] == strides[inner] * shape[inner] for d, inner in zip(dims, dims[1:], strict=False))


def _lacks_strides(local: torch.Tensor) -> bool:
    """Whether the strides are only those that C++ gives a new tensor without elements, or a view of one."""
    return not local.numel() and 0 in base_of(local).stride()


def with_strides_of(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`source`, with the strides of `target` if both are the same elements of the same memory.

    Strides of dims with one row on this rank may differ, and C++ then takes the two for tensors that overlap in part.
    """
    if source.data_ptr() != target.data_ptr() or source.shape != target.shape or source.dtype != target.dtype:
        return source
    if any(a != b and n > 1 for a, b, n in zip(source.stride(), target.stride(), source.shape, strict=True)):
        return source
    return source if source.stride() == target.stride() else source.as_strided(target.shape, target.stride())


def is_thin(local_shape: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether the local tensor has no row, or only one of several, along a dim of the global tensor."""
    return any(n < 2 and n < m for n, m in zip(local_shape, shape, strict=True))


def has_view(local: torch.Tensor, shape: Sequence[int], new_shape: Sequence[int]) -> bool:
    """Whether the global tensor of `shape` can be viewed as `new_shape` without a copy.

    >>> has_view(torch.empty(4, 6)[:, :3], (4, 3), (12,)), has_view(torch.empty(4, 6)[:, :3], (4, 3), (2, 2, 3))
    (False, True)
    """
    if 0 in shape:
        return True
    strides = strides_in_memory(local, shape)
    joined = ([d for d in old if shape[d] != 1] for old, _ in view_groups(shape, new_shape))
    return all(_follow(strides, shape, dims) for dims in joined)


def no_view(shape: Sequence[int], new_shape: Sequence[int]) -> RuntimeError:
    """PyTorch's error for a view that `has_view` says does not exist."""
    return RuntimeError(
        f"view size is not compatible with the tensor's size {tuple(shape)} and stride: a view of shape "
        f"{tuple(new_shape)} would span dims that do not follow each other in memory. Use .reshape(...) instead."
    )


def view_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dims of `old` and `new` with equal products: what each split or join is made of.

    >>> view_groups((2, 6, 5), (12, 5)), view_groups((12, 5), (3, 4, 5))
    ([([0, 1], [0]), ([2], [1])], [([0], [0, 1]), ([1], [2])])
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        first, second = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (a := prod(old[first:i])) != (b := prod(new[second:j])):
            if (a < b and i < len(old)) or j == len(new):
                i += 1
            else:
                j += 1
        groups.append((list(range(first, i)), list(range(second, j))))
    return groups


def check_no_overlap(local: torch.Tensor, shape: Sequence[int], index: Any = ...) -> None:
    """Before an in-place write: raise for an expanded tensor, also on a rank that holds too little to see it."""
    if repeats(local, shape, index):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def repeats(local: torch.Tensor, shape: Sequence[int], index: Any = ...) -> bool:
    """Whether several elements that a basic index takes of the global tensor share one memory location.

    >>> row = torch.zeros(4).expand(3, 4)
    >>> repeats(row, (3, 4)), repeats(row, (3, 4), (0, slice(2)))
    (True, False)
    """
    strides = strides_in_memory(local, shape)
    if 0 not in strides:
        return False
    taken = torch.empty_strided(tuple(shape), strides, device="meta")[index]
    return taken.numel() > 0 and any(step == 0 and n > 1 for step, n in zip(taken.stride(), taken.shape, strict=True))
