"""Whether the chunks of a checkpoint make up its tensors: every element once.

A chunk that no rank wrote, or that two ranks wrote, is found here, before the checkpoint becomes valid. Tensors
with equally many dims and chunks are checked together, as one array, because there may be millions of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from terrazzo.errors import CheckpointError

Array = np.ndarray[Any, Any]
_NAMED: Final = 10  # how many tensors an error lists


def faults_of(shapes: Array, counts: Array, boxes: Array) -> list[tuple[int, str]]:
    """The numbers of the tensors whose chunks do not cover them exactly, and what is wrong with each.

    All have equally many dims: `boxes` has a row (offsets, lengths) for each chunk, `counts[n]` of them for the tensor
    of `shapes[n]`, in this order.
    """
    faults: list[tuple[int, str]] = []
    first = np.cumsum(counts) - counts
    for count in np.unique(counts).tolist():
        same = np.nonzero(counts == count)[0]
        if shapes.shape[1] == 0:
            faults += [(number, f"written by {count} ranks") for number in same.tolist() if count != 1]
            continue
        rows = boxes[first[same][:, None] + np.arange(count, dtype=np.int64)]
        found = _faults(shapes[same], rows[:, :, 0], rows[:, :, 1])
        faults += [(int(same[row]), fault) for row, fault in found]
    return faults


def refuse(faults: Sequence[tuple[str, str]]) -> None:
    """Raise if there are faults, of the tensors of these names."""
    if faults:
        lines = [f"{name}: {fault}" for name, fault in faults]
        more = f"\n  and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
        raise CheckpointError(
            "the ranks did not write each element of each tensor exactly once; do all ranks that hold a shard take "
            "part in this save?\n  " + "\n  ".join(lines[:_NAMED]) + more
        )


def _faults(shapes: Array, offsets: Array, lengths: Array) -> list[tuple[int, str]]:
    """What is wrong with tensors that have equally many chunks: `offsets` and `lengths` are (tensors, chunks, dims)."""
    whole = shapes.prod(axis=1)
    written = lengths.prod(axis=2).sum(axis=1)
    outside = (offsets + lengths > shapes[:, None]).any(axis=(1, 2))
    faults = [
        (row, f"a chunk reaches beyond the shape {shapes[row].tolist()}") for row in np.nonzero(outside)[0].tolist()
    ]
    faults += [
        (row, f"{whole[row] - written[row]} of {whole[row]} elements were not written")
        for row in np.nonzero(~outside & (written < whole))[0].tolist()
    ]
    twice = ~outside & (written > whole)
    if offsets.shape[1] > 1:
        exact = np.nonzero(~outside & (written == whole))[0]
        twice[exact] = _overlaps(shapes[exact], offsets[exact], lengths[exact])
    return faults + [(row, "some elements were written more than once") for row in np.nonzero(twice)[0].tolist()]


def _overlaps(shapes: Array, offsets: Array, lengths: Array) -> Array:
    """For tensors whose chunks have the right volume together: whether some overlap (and so leave a gap elsewhere)."""
    grid = np.ones(len(shapes), dtype=bool)
    place = np.zeros(offsets.shape[:2], dtype=np.int64)  # of a chunk's first element in the flattened tensor
    for dim in range(shapes.shape[1]):
        # A grid: in every dim, all chunks are cut at the same places.
        order = np.argsort(offsets[:, :, dim], axis=1, kind="stable")
        starts = np.take_along_axis(offsets[:, :, dim], order, axis=1)
        steps = np.take_along_axis(lengths[:, :, dim], order, axis=1)
        same = (starts[:, 1:] == starts[:, :-1]) & (steps[:, 1:] == steps[:, :-1])
        following = starts[:, 1:] == starts[:, :-1] + steps[:, :-1]
        grid &= (same | following).all(axis=1) & (starts[:, 0] == 0) & (starts[:, -1] + steps[:, -1] == shapes[:, dim])
        place = place * shapes[:, dim, None] + offsets[:, :, dim]
    place.sort(axis=1)
    overlaps: Array = (place[:, 1:] == place[:, :-1]).any(axis=1)  # in a grid, chunks that differ are disjoint
    for row in np.nonzero(~grid)[0].tolist():
        overlaps[row] = _any_pair_overlaps(offsets[row], lengths[row])
    return overlaps


def _any_pair_overlaps(offsets: Array, lengths: Array) -> bool:
    ends = offsets + lengths
    for row in range(len(offsets) - 1):
        common = (offsets[row] < ends[row + 1 :]) & (offsets[row + 1 :] < ends[row])
        if bool(common.all(axis=1).any()):
            return True
    return False
