"""Strides of the global tensor, derived from the local tensor's strides.

Whether a tensor is contiguous, and whether a view of it with another shape exists, must have the same answer on every
rank; otherwise one rank would write to a copy and another to the tensor itself. So the question is asked of the global
tensor. PyTorch's own answer for the local tensor is not enough where a rank holds at most one row: such a tensor can
be viewed as any shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terrazzo._torch.tensors import base_of

_HAS_STRIDES = "_has_strides"
"""An attribute of some tensors without elements that are views of no tensor: their strides are those of one."""


def global_stride(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the global tensor, with its dims in the memory order of the local tensor.

    >>> global_stride(torch.empty(2, 3).t(), (3, 8))
    (1, 3)
    """
    strides, step = [0] * len(shape), 1
    for d in reversed(order_in_memory(local, shape)):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def order_in_memory(local: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """The dims of the global tensor, from the one with the largest stride to the one with the smallest.

    Of two dims with the same stride the inner one has a single row on this rank.

    >>> order_in_memory(torch.empty(3, 1).t(), (3, 3))
    [1, 0]
    """
    dims = list(range(len(shape)))
    if is_contiguous(local, shape):
        return dims
    return sorted(dims, key=lambda d: (-local.stride()[d], -local.shape[d], d))


def is_contiguous(local: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether the global tensor is contiguous.

    >>> one_row = torch.empty(4, 3)[:1].t()
    >>> one_row.is_contiguous(), is_contiguous(one_row, (3, 4))
    (True, False)
    """
    says_all = local.numel() > 0 or 0 in shape  # C++ calls every empty tensor contiguous
    if (local.is_contiguous() and says_all and not is_thin(local.shape, shape)) or _lacks_strides(local):
        return True
    dims = [d for d, n in enumerate(shape) if n != 1]
    if 0 in shape or not dims:
        return True
    pairs = zip(dims, dims[1:], strict=False)
    return local.stride(dims[-1]) == 1 and all(_follow(local, shape, d, inner) for d, inner in pairs)


def shows_order(local: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """`local`, a new tensor, with strides for its single rows that show the memory order that global `strides` have.

    C++ gives the result of an operation any stride along a dim of one row, and any strides if it has no elements.

    >>> shows_order(torch.empty(1, 6).t().exp(), (6, 2), (1, 6)).stride()
    (1, 6)
    """
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    shown = _with_order(local, shape, order) if local.numel() else _copied(local, order, always=True)
    return shown if shown is local or shown.requires_grad else shown.detach()  # which is no view


def in_order(local: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """`local` with this order of its dims in memory, outermost first; a copy if it has another.

    >>> in_order(torch.empty(3, 1), (3, 3), (1, 0)).stride()
    (1, 3)
    """
    local = _copied(local, order, always=False)
    return _with_order(local, shape, order) if local.numel() else local


def before_reordering(local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`local`, or a view of it if its dims are to be reordered and its strides would not show that they were.

    If it holds one row along two adjacent dims, C++ gives both the same stride.

    >>> one = torch.empty(1, 1)
    >>> is_contiguous(one.t(), (3, 3)), is_contiguous(before_reordering(one, (3, 3)).t(), (3, 3))
    (True, False)
    """
    if not local.numel() or not is_contiguous(local, shape):
        return local
    return _with_order(local, shape, range(len(shape)))


def _copied(local: torch.Tensor, order: Sequence[int], *, always: bool) -> torch.Tensor:
    back = sorted(range(len(order)), key=order.__getitem__)
    inner = local.permute(tuple(order))
    inner = inner.clone(memory_format=torch.contiguous_format) if always else inner.contiguous()
    return inner.permute(back)


def _with_order(local: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """`local` with strides of its single rows that follow from this order of its dims in memory, outermost first."""
    wanted, step = list(local.stride()), 1
    for d in reversed(order):
        if local.shape[d] == 1:
            wanted[d] = step
        # Those of the global tensor, because with its own size of 1 the next dim would have the same stride.
        step = wanted[d] * (local.shape[d] if local.shape[d] > 1 else shape[d])
    return local if tuple(wanted) == local.stride() else local.as_strided(local.shape, wanted)


def _lacks_strides(local: torch.Tensor) -> bool:
    """Whether the strides are only those that C++ gives a new tensor without elements, or a view of one."""
    if local.numel():
        return False
    base = base_of(local)
    return 0 in base.stride() and not hasattr(base, _HAS_STRIDES)


def keeping_strides(view: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """`view`, `of` detached; if it has no elements, it is noted that its strides show the order of its dims."""
    if not view.numel() and 0 in view.stride() and not _lacks_strides(of):
        setattr(view, _HAS_STRIDES, True)
    return view


def _follow(local: torch.Tensor, shape: Sequence[int], d: int, inner: int) -> bool:
    """Whether the rows of dim `inner` are adjacent in memory along `d`: in a contiguous local tensor, or in the whole
    tensor that the local one is a slice of."""
    step = local.stride(inner)
    return local.stride(d) in (step * max(local.shape[inner], 1), step * shape[inner])


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
    """Whether the local tensor has at most one row along a dim of which the global tensor has more."""
    return any(n < 2 <= m for n, m in zip(local_shape, shape, strict=True))


def has_view(local: torch.Tensor, shape: Sequence[int], new_shape: Sequence[int]) -> bool:
    """Whether the global tensor of `shape` can be viewed as `new_shape` without a copy.

    >>> has_view(torch.empty(4, 6)[:, :3], (4, 3), (12,)), has_view(torch.empty(4, 6)[:, :3], (4, 3), (2, 2, 3))
    (False, True)
    """
    if 0 in shape or _lacks_strides(local):
        return True
    for old, _ in view_groups(shape, new_shape):
        joined = [d for d in old if shape[d] != 1]
        for d, inner in zip(joined, joined[1:], strict=False):
            if not _follow(local, shape, d, inner):
                return False
    return True


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
        a: list[int] = []
        b: list[int] = []
        pa = pb = 1
        if i < len(old):
            a.append(i)
            pa *= old[i]
            i += 1
        if j < len(new):
            b.append(j)
            pb *= new[j]
            j += 1
        while pa != pb:
            if (pa < pb and i < len(old)) or j >= len(new):
                pa *= old[i]
                a.append(i)
                i += 1
            else:
                pb *= new[j]
                b.append(j)
                j += 1
        groups.append((a, b))
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
    if 0 not in local.stride() or _lacks_strides(local):
        return False
    taken = torch.empty_strided(tuple(shape), local.stride(), device="meta")[index]
    return taken.numel() > 0 and any(step == 0 and n > 1 for step, n in zip(taken.stride(), taken.shape, strict=True))
