"""The items of an index: normalised as C++ does it, and classified."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from terrazzo.layout import Box
from terrazzo.tensor.dispatch.spec import Operand


def as_tuple(index: Any) -> tuple[Any, ...]:
    """The items of an index."""
    return tuple(index) if isinstance(index, tuple) else (index,)


def normal(index: Any) -> tuple[Any, ...]:
    """The items of an index as C++ takes them: objects with `__index__` as ints, lists and arrays as tensors.

    >>> normal([0, 2]), normal((torch.tensor(1), slice(None, torch.tensor(2))))
    ((tensor([0, 2]),), (1, slice(None, 2, None)))
    """
    if isinstance(index, list) and len(index) < 32 and any(_makes_a_tuple(i) for i in index):
        index = tuple(index)
    return tuple(_normal_item(i) for i in as_tuple(index))


def _makes_a_tuple(item: Any) -> bool:
    """Whether a list with this item counts as a tuple of its items, as in old versions of numpy."""
    return item is None or item is Ellipsis or isinstance(item, (torch.Tensor, slice, Sequence, np.ndarray))


def _normal_item(item: Any) -> Any:
    if isinstance(item, slice):
        return slice(*(v if v is None else operator.index(v) for v in (item.start, item.stop, item.step)))
    if isinstance(item, torch.Tensor):
        return item if item.ndim or is_mask(item) else int(item)
    if item is None or item is Ellipsis or isinstance(item, (int, Operand)):
        return item
    if isinstance(item, np.bool_):
        return bool(item)
    if isinstance(item, np.ndarray) or isinstance(item, Sequence):
        tensor = torch.as_tensor(item)
        return tensor if tensor.numel() or isinstance(item, np.ndarray) else tensor.long()
    return operator.index(item) if hasattr(item, "__index__") else item  # C++ raises for items that are no index


def is_basic(index: Sequence[Any]) -> bool:
    """Whether all items give views: ints, slices, None, Ellipsis."""
    return all(
        i is None or i is Ellipsis or isinstance(i, slice) or (isinstance(i, int) and not isinstance(i, bool))
        for i in index
    )


def consumes(i: Any) -> int:
    """How many dims of the tensor an index item applies to."""
    if i is None or i is Ellipsis or isinstance(i, bool):
        return 0
    if isinstance(i, (torch.Tensor, Operand)) and is_mask(i):
        return i.ndim
    return 1


MASKS = frozenset((torch.bool, torch.uint8))
"""The dtypes of masks."""


def is_mask(i: Any) -> bool:
    """Whether an item is a mask."""
    return isinstance(i, torch.Tensor) and i.dtype in MASKS


def expanded(index: Any, ndim: int) -> list[Any]:
    """The index with full slices for the Ellipsis and for the dims that it leaves out at the end."""
    items = list(as_tuple(index))
    taken = sum(consumes(i) for i in items)
    if taken > ndim:
        raise IndexError(f"too many indices for a tensor of {ndim} dimensions")
    fill = [slice(None)] * (ndim - taken)
    at = next((k for k, i in enumerate(items) if i is Ellipsis), None)
    return items + fill if at is None else [*items[:at], *fill, *items[at + 1 :]]


def with_dims(index: Any, ndim: int) -> Iterator[tuple[Any, int]]:
    """Each item of the expanded index with the dim that it applies to, or that follows it."""
    d = 0
    for i in expanded(tuple(index), ndim):
        yield i, d
        d += consumes(i)


def region_of(index: Any, shape: Sequence[int]) -> Box | None:
    """The smallest box that contains what a basic index selects; None for other indices.

    >>> region_of((slice(1, 3), -1), (4, 5))
    Box(offsets=(1, 4), lengths=(2, 1))
    """
    items = as_tuple(index)
    if not is_basic(items):
        return None
    offsets, lengths = [], []
    for i, n in zip([i for i in expanded(items, len(shape)) if i is not None], shape, strict=True):
        chosen = range(n)[i] if isinstance(i, slice) else [i % max(n, 1)]  # the write itself checks the bounds
        low, high = (min(chosen), max(chosen) + 1) if chosen else (0, 0)
        offsets.append(low)
        lengths.append(high - low)
    return Box(tuple(offsets), tuple(lengths))
