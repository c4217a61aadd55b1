"""What differs between two checkpoints, with little memory however large they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import isnan
from typing import Any, Final

import torch

from terrazzo.checkpoint.listing import in_order
from terrazzo.checkpoint.native.objects import encode
from terrazzo.checkpoint.native.tensors import OPAQUE, as_bytes
from terrazzo.checkpoint.tools.lazy import Checkpoint, LazyTensor
from terrazzo.errors import CheckpointError, UnsupportedValueError
from terrazzo.layout.box import row_major_windows

_WINDOW: Final = 8 << 20  # bytes that are compared at a time
_SMALL: Final = 1 << 20  # tensors up to this size are read many at once
_TOGETHER: Final = 5000  # names


@dataclass(frozen=True, slots=True)
class Difference:
    """How the values under one name differ.

    Attributes:
        name: the name of the values.
        what: the difference, in words.
        differing: the number of elements that differ, if both are tensors of the same shape and dtype.
        elements: the number of elements of each tensor.
        largest: the largest difference of two elements; 0 if the dtype has no arithmetic, nan if all that differ are
            nan in one of the two.
    """

    name: str
    what: str
    differing: int | None = field(default=None, repr=False)
    elements: int | None = field(default=None, repr=False)
    largest: float | None = field(default=None, repr=False)


def compare(
    one: Checkpoint,
    other: Checkpoint,
    *,
    tolerance: float = 0.0,
    wanted: Callable[[str], bool] = lambda name: True,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Iterator[Difference]:
    """All differences, in the order of names. Numbers within `tolerance` are equal, and nan equals nan.

    Only names that are `wanted` are compared. `progress` is called with numbers of bytes of `one`, as they are. In
    terrazzo's own format, values with equal checksums had the same bytes when they were saved, and are not read;
    `verify` checks whether they still have them.

    >>> import tempfile
    >>> from terrazzo.checkpoint import save
    >>> paths = [tempfile.mkdtemp(), tempfile.mkdtemp()]
    >>> for step, path in enumerate(paths):
    ...     _ = save({"w": torch.zeros(3), "step": step}, checkpoint_id=path)
    >>> list(compare(*map(Checkpoint, paths)))
    [Difference(name='step', what='0 and 1')]
    """
    if not tolerance >= 0:  # nan is greater than nothing, so all numbers would be equal
        raise CheckpointError(f"`tolerance` must be a number that is not negative, not {tolerance}")
    here, there = one.digests(), other.digests()
    # Values with equal checksums need not be read.
    same = {name for name, digest in here.items() if there.get(name) == digest}
    progress(one.total_bytes({name for name in one if name in same or not wanted(name)}))
    for batch in _batches(one, in_order(name for name in one if name not in same and wanted(name))):
        together = [name for name in batch if _small_in_both(one, other, name)]
        left, right = one.read_many(together), other.read_many(together)
        for name in batch:
            if name not in other:
                yield Difference(name, "only in the first")
                continue
            if name in left:
                found = _difference(name, [(left[name], right[name])], tolerance, progress)
            else:
                try:
                    a, b = one[name], other[name]
                except UnsupportedValueError as error:  # such as a member of an enum that is not imported
                    if name not in here or name not in there:
                        raise
                    yield Difference(name, f"the bytes differ; {error}")
                    continue
                if isinstance(a, LazyTensor) and isinstance(b, LazyTensor):
                    found = _tensors(a, b, tolerance, progress)
                elif isinstance(a, LazyTensor) or isinstance(b, LazyTensor):
                    found = Difference(name, "a tensor in one, an object in the other")
                else:
                    found = _objects(name, a, b, tolerance)
            if found is not None:
                yield found
    yield from (Difference(name, "only in the second") for name in in_order(filter(wanted, other.keys() - one.keys())))


@dataclass(slots=True)
class ModuleDifferences:
    """The differences of the values of one module.

    Attributes:
        module: the names without their last part.
        values: how many values differ.
        differing: how many of their elements differ, where that is known.
        elements: how many elements these have.
        largest: the largest difference of two elements; nan where one of the two is nan.
    """

    module: str
    values: int = 0
    differing: int = 0
    elements: int = 0
    largest: float = 0.0


def by_module(differences: Iterable[Difference]) -> list[ModuleDifferences]:
    """Differences by module, in the order of the first of each.

    >>> by_module([Difference("m.w", "", 2, 4, 0.5), Difference("m.b", "", 1, 4, 0.25), Difference("step", "")])[0]
    ModuleDifferences(module='m', values=2, differing=3, elements=8, largest=0.5)
    """
    found: dict[str, ModuleDifferences] = {}
    for each in differences:
        module = each.name.rpartition(".")[0]
        of_module = found.setdefault(module, ModuleDifferences(module))
        of_module.values += 1
        of_module.differing += each.differing or 0
        of_module.elements += each.elements or 0
        if each.largest is not None and (isnan(each.largest) or each.largest > of_module.largest):
            of_module.largest = each.largest
    return list(found.values())


def _batches(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[list[str]]:
    """The names in batches, whose small tensors are read together."""
    batch: list[str] = []
    nbytes = 0
    for name in names:
        batch.append(name)
        nbytes += checkpoint.nbytes(name)
        if nbytes >= _WINDOW or len(batch) >= _TOGETHER:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _small_in_both(one: Checkpoint, other: Checkpoint, name: str) -> bool:
    """Whether both have a small tensor of this name, of the same shape and dtype."""
    a, b = one.tensor(name), other.tensor(name) if name in other else None
    return a is not None and b is not None and a.nbytes <= _SMALL and (a.shape, a.dtype) == (b.shape, b.dtype)


def _tensors(a: LazyTensor, b: LazyTensor, tolerance: float, progress: Callable[[int], None]) -> Difference | None:
    if a.shape != b.shape:
        return Difference(a.name, f"shapes {list(a.shape)} and {list(b.shape)}")
    if a.dtype != b.dtype:
        return Difference(a.name, f"dtypes {a.dtype} and {b.dtype}")
    boxes = row_major_windows(a.shape, max(_WINDOW // a.dtype.itemsize, 1))
    return _difference(a.name, ((a.read(box), b.read(box)) for box in boxes), tolerance, progress)


def _difference(
    name: str, pieces: Iterable[tuple[torch.Tensor, torch.Tensor]], tolerance: float, progress: Callable[[int], None]
) -> Difference | None:
    """The difference of two tensors, given as pieces; None if they are equal."""
    differing, largest, numel, nans = 0, 0.0, 0, 0
    for left, right in pieces:
        progress(left.nbytes)
        numel += left.numel()
        if torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)):
            continue
        if left.dtype in OPAQUE:
            differing += int((as_bytes(left) != as_bytes(right)).sum())
            continue
        wide = torch.complex128 if left.is_complex() else torch.float64
        gap = (left.to(wide) - right.to(wide)).abs().nan_to_num(nan=0.0, posinf=float("inf"))
        unlike = left.to(wide).isnan() != right.to(wide).isnan()
        nans += int(unlike.sum())
        different = (gap > tolerance) | unlike
        if not left.is_floating_point() and not left.is_complex() and tolerance < 1:
            different = left != right  # float64 cannot tell large integers apart
        differing += int(different.sum())
        largest = max(largest, float(gap.max()))
    if not differing:
        return None
    what = f"{differing} of {numel} elements differ"
    if nans == differing:
        return Difference(name, f"{what}: nan in one of the two", differing, numel, float("nan"))
    also = f"; in {nans} of them one of the two is nan" if nans else ""
    return Difference(name, f"{what}, by up to {largest:g}{also}", differing, numel, largest)


def _objects(name: str, a: Any, b: Any, tolerance: float) -> Difference | None:
    if tolerance and type(a) is type(b) and type(a) in (int, float) and abs(a - b) <= tolerance:
        return None
    try:
        same = encode(a) == encode(b)
    except UnsupportedValueError:
        same = a == b
    return None if same else Difference(name, f"{_short(a)} and {_short(b)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
