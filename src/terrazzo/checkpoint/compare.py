"""What differs between two checkpoints, with little memory however large they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from terrazzo.checkpoint.lazy import Checkpoint, LazyTensor, names_of
from terrazzo.checkpoint.native.datafile import row_major_windows
from terrazzo.checkpoint.objects import encode
from terrazzo.errors import UnsupportedValueError

_WINDOW: Final = 8 << 20  # bytes of a tensor that are compared at a time


@dataclass(frozen=True, slots=True)
class Difference:
    """A name, and what is not the same under it."""

    name: str
    what: str


def compare(
    one: Checkpoint,
    other: Checkpoint,
    *,
    tolerance: float = 0.0,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Iterator[Difference]:
    """All differences, in the order of names.  Numbers within `tolerance` are equal, and nan equals nan.

    `progress` hears of the bytes of `one` as they are compared.

    >>> import tempfile
    >>> from terrazzo.checkpoint import save
    >>> paths = [tempfile.mkdtemp(), tempfile.mkdtemp()]
    >>> for step, path in enumerate(paths):
    ...     _ = save({"w": torch.zeros(3), "step": step}, checkpoint_id=path)
    >>> list(compare(*map(Checkpoint, paths)))
    [Difference(name='step', what='0 and 1')]
    """
    for name in names_of(one):
        if name not in other:
            yield Difference(name, "only in the first")
            continue
        a, b = one[name], other[name]
        if isinstance(a, LazyTensor) and isinstance(b, LazyTensor):
            what = _tensors(a, b, tolerance, progress)
        elif isinstance(a, LazyTensor) or isinstance(b, LazyTensor):
            what = "a tensor in one, an object in the other"
        else:
            what = _objects(a, b)
        if what is not None:
            yield Difference(name, what)
    for name in names_of(other):
        if name not in one:
            yield Difference(name, "only in the second")


def _tensors(a: LazyTensor, b: LazyTensor, tolerance: float, progress: Callable[[int], None]) -> str | None:
    if a.shape != b.shape:
        return f"shapes {list(a.shape)} and {list(b.shape)}"
    if a.dtype != b.dtype:
        return f"dtypes {a.dtype} and {b.dtype}"
    differing, largest = 0, 0.0
    for box in row_major_windows(a.shape, _WINDOW // a.dtype.itemsize):
        left, right = a.read(box), b.read(box)
        progress(left.nbytes)
        if torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)):
            continue
        wide = torch.complex128 if left.is_complex() else torch.float64
        gap = (left.to(wide) - right.to(wide)).abs().nan_to_num(0.0)
        different = (gap > tolerance) | (left.to(wide).isnan() != right.to(wide).isnan())
        if not left.is_floating_point() and not left.is_complex() and tolerance == 0:
            different = left != right  # float64 cannot tell large integers apart
        differing += int(different.sum())
        largest = max(largest, float(gap.max()))
    return f"{differing} of {a.shape.numel()} elements differ, by up to {largest:g}" if differing else None


def _objects(a: Any, b: Any) -> str | None:
    try:
        same = encode(a) == encode(b)
    except UnsupportedValueError:
        same = a == b
    return None if same else f"{_short(a)} and {_short(b)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
