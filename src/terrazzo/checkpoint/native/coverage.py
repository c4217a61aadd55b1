"""Whether the chunks of a checkpoint make up its tensors: every element once.

A chunk that nobody wrote, or that two ranks wrote, is found here, before the checkpoint becomes valid.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.checkpoint.native.manifest import TensorEntry
from terrazzo.errors import CheckpointError

Array = np.ndarray[Any, Any]
_NAMED = 10  # how many tensors an error lists


def check_coverage(entries: list[TensorEntry], counts: Array, boxes: list[Array]) -> None:
    """Raise unless each tensor's chunks cover it exactly.

    `boxes[d]` has a row (offsets, lengths) for each chunk of a tensor of `d` dims, in the order of the table.
    """
    faults = []
    first = [0] * max(len(boxes), 1 + max((len(entry.shape) for entry in entries), default=0))
    for entry, count in zip(entries, counts.tolist(), strict=True):
        ndim = len(entry.shape)
        if ndim == 0:
            if count != 1:
                faults.append(f"{entry.name}: written by {count} ranks")
            continue
        rows = boxes[ndim][first[ndim] : first[ndim] + count] if count else np.empty((0, 2, ndim), np.int64)
        first[ndim] += count
        fault = _fault(entry.shape, rows[:, 0], rows[:, 1])
        if fault:
            faults.append(f"{entry.name}: {fault}")
    if faults:
        more = f"\n  and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise CheckpointError(
            "the ranks did not write each element of each tensor exactly once; do all ranks that hold a shard take "
            "part in this save?\n  " + "\n  ".join(faults[:_NAMED]) + more
        )


def _fault(shape: tuple[int, ...], offsets: Array, lengths: Array) -> str | None:
    whole = int(np.prod(shape, dtype=np.int64))
    if len(offsets) == 1:  # the usual case, without array arithmetic
        if offsets[0].any() or tuple(lengths[0].tolist()) != shape:
            return f"only {offsets[0].tolist()} + {lengths[0].tolist()} of shape {list(shape)} was written"
        return None
    if len(offsets) and bool((offsets + lengths > np.array(shape)).any()):
        return f"a chunk reaches beyond the shape {list(shape)}"
    written = int(lengths.prod(axis=1, dtype=np.int64).sum())
    if written < whole:
        return f"{whole - written} of {whole} elements were not written"
    if written > whole or (len(offsets) > 1 and _overlap(shape, offsets, lengths)):
        return "some elements were written more than once"
    return None


def _overlap(shape: tuple[int, ...], offsets: Array, lengths: Array) -> bool:
    """Whether chunks that have the right volume together overlap (and so leave a gap elsewhere)."""
    if _is_grid(shape, offsets, lengths):
        return len(np.unique(offsets, axis=0)) < len(offsets)
    ends = offsets + lengths
    for row in range(len(offsets) - 1):
        inner = (offsets[row] < ends[row + 1 :]) & (offsets[row + 1 :] < ends[row])
        if bool(inner.all(axis=1).any()):
            return True
    return False


def _is_grid(shape: tuple[int, ...], offsets: Array, lengths: Array) -> bool:
    """Whether every dim is cut at the same places for all chunks: then different chunks are disjoint."""
    for dim, size in enumerate(shape):
        cuts = np.unique(np.stack([offsets[:, dim], lengths[:, dim]], axis=1), axis=0)
        if cuts[0, 0] != 0 or cuts[-1].sum() != size or bool((cuts[:-1].sum(axis=1) != cuts[1:, 0]).any()):
            return False
    return True
