"""Statistics of one stored tensor, which is read twice, a few MiB at a time."""

from __future__ import annotations

from typing import Any, Final

import torch

from terrazzo.checkpoint import LazyTensor
from terrazzo.checkpoint.native.tensors import OPAQUE
from terrazzo.errors import UnsupportedValueError
from terrazzo.layout.box import row_major_windows
from terrazzo.view.data.numbers import plain

WINDOW: Final = 8 << 20  # bytes that are read at a time
_BINS: Final = 64


def statistics(tensor: LazyTensor, *, bins: int = _BINS, window: int = WINDOW) -> dict[str, Any]:
    """Minimum, maximum, mean, deviation and a histogram of a tensor's finite values; complex ones by magnitude.

    >>> import tempfile
    >>> from terrazzo.checkpoint import Checkpoint, save
    >>> path = tempfile.mkdtemp()
    >>> _ = save({"w": torch.tensor([0.0, 1.0, 3.0, float("nan")])}, checkpoint_id=path)
    >>> found = statistics(Checkpoint(path)["w"], bins=3)
    >>> found["nan"], found["min"], found["max"], found["counts"]
    (1, 0.0, 3.0, [1, 1, 1])
    """
    if tensor.dtype in OPAQUE:
        raise UnsupportedValueError(f"{tensor.name}: {tensor.dtype} has no numbers for statistics")
    boxes = row_major_windows(tensor.shape, max(window // max(tensor.dtype.itemsize, 8), 1))

    finite = nan = infinite = zeros = 0
    least, largest, total = float("inf"), float("-inf"), 0.0
    for box in boxes:
        values = _values(tensor.read(box))
        nan += int(values.isnan().sum())
        infinite += int(values.isinf().sum())
        zeros += int((values == 0).sum())
        values = values[values.isfinite()]
        if values.numel():
            finite += values.numel()
            least, largest = min(least, float(values.min())), max(largest, float(values.max()))
            total += float(values.sum())
    about = {"elements": tensor.shape.numel(), "finite": finite, "nan": nan, "infinite": infinite, "zeros": zeros}
    if not finite:
        return about | {"min": None, "max": None, "mean": None, "std": None, "edges": [], "counts": []}

    mean, squares = total / finite, 0.0
    edges = _edges(least, largest, bins)
    inner = torch.tensor(edges[1:-1], dtype=torch.float64, device="cpu")
    counts = torch.zeros(len(edges) - 1, dtype=torch.int64, device="cpu")
    for box in boxes:
        values = _values(tensor.read(box))
        values = values[values.isfinite()]
        squares += float((values - mean).square().sum())
        counts += torch.bincount(torch.bucketize(values, inner, right=True), minlength=len(counts))
    return about | {
        "min": least,
        "max": largest,
        "mean": plain(mean),
        "std": plain((squares / finite) ** 0.5),
        "edges": edges,
        "counts": counts.tolist(),
    }


def _edges(least: float, largest: float, bins: int) -> list[float]:
    """The edges of bins of equal width; one bin if all numbers are equal."""
    if least == largest:
        return [least, largest]
    # By interpolation, because the difference may be larger than the largest float.
    return [*(least * ((bins - number) / bins) + largest * (number / bins) for number in range(bins)), largest]


def _values(piece: torch.Tensor) -> torch.Tensor:
    flat = piece.reshape(-1)
    return flat.to(torch.complex128).abs() if flat.is_complex() else flat.double()
