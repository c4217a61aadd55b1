"""The changes from one snapshot to the next, bit for bit.

A window that has not changed is not written. Of a window that has changed, either all elements are written (dense) or
only those that changed, with their positions (sparse), whichever is shorter. Elements are compared as bits, so that a
NaN equals itself and -0.0 differs from 0.0. New values are written, not differences, so that nothing is rounded.

The bytes of a sparse window are: the new elements; the lower 16 bits of the position of each in the window; for each
run of 65536 positions, how many elements in it have changed (4 bytes each).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import msgspec
import numpy as np
import torch

from terrazzo.checkpoint.native.format import BLOCK, checksum
from terrazzo.checkpoint.native.tensors import bytes_of
from terrazzo.errors import CheckpointCorruptError
from terrazzo.layout import Box
from terrazzo.publish.host_copy import Snapshot, SnapshotWindow, aligned

_RUN: Final = 1 << 16
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Array = np.ndarray[Any, Any]


class Change(msgspec.Struct, array_like=True, frozen=True):
    """A window that has changed, and where its bytes are in what its rank wrote.

    `count` is the number of written elements if the window is sparse, and -1 if it is dense.
    """

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    nbytes: int
    count: int

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.lengths)


@dataclass(frozen=True, slots=True)
class Places:
    """The positions of the changed elements of a window, in the form in which they are written: 2 bytes for each."""

    low: Array  # the lower 16 bits of each position
    runs: Array  # how many positions there are in each run of 65536

    @classmethod
    def of(cls, places: Array, numel: int) -> Places:
        """From ascending positions in a window of `numel` elements."""
        runs = np.bincount(places >> 16, minlength=_runs(numel))
        return cls((places & (_RUN - 1)).astype("<u2"), runs.astype("<u4"))

    def all(self) -> Array:
        """The places."""
        return np.repeat(np.arange(len(self.runs), dtype=np.int64) << 16, self.runs) + self.low


@dataclass(frozen=True, slots=True)
class ChangedWindow:
    """A window that has changed, with the positions of the changed elements if it is sparse."""

    window: SnapshotWindow
    change: Change
    places: Places | None


def sums_of(snapshot: Snapshot, windows: Sequence[SnapshotWindow]) -> list[int]:
    """The checksum of each window."""
    return [checksum(bytes_of(snapshot.data(window))) for window in windows]


def differences(
    snapshot: Snapshot,
    windows: Sequence[SnapshotWindow],
    old: Snapshot | None,
    old_sums: Sequence[int],
    sums: Sequence[int],
) -> list[ChangedWindow]:
    """The windows that differ from those of `old`. Without `old`, those whose checksums differ, written densely."""
    found: list[ChangedWindow] = []
    start = 0
    for number, window in enumerate(windows):
        new = snapshot.data(window)
        places = None if old is None else _differing(new, old.data(window))
        is_same = old_sums[number] == sums[number] if old is None else places is not None and not len(places)
        if is_same:
            continue
        if places is not None and _sparse_bytes(len(places), new) >= new.nbytes:
            places = None
        count, nbytes = (-1, new.nbytes) if places is None else (len(places), _sparse_bytes(len(places), new))
        name = snapshot.names[window.part]
        change = Change(name, window.box.offsets, window.box.lengths, start, nbytes, count)
        found.append(ChangedWindow(window, change, None if places is None else Places.of(places, new.numel())))
        start += aligned(nbytes)
    return found


def written(changes: Sequence[ChangedWindow], snapshot: Snapshot) -> torch.Tensor:
    """The bytes of these changes."""
    last = changes[-1].change
    data = torch.zeros(last.start + last.nbytes, dtype=torch.uint8, device="cpu")
    for each in changes:
        target = data[each.change.start : each.change.start + each.change.nbytes]
        new = snapshot.data(each.window)
        if each.places is None:
            target.copy_(new.reshape(-1).view(torch.uint8))
            continue
        bits = _bits(new)
        split = each.change.count * new.dtype.itemsize
        target[:split].view(bits.dtype).numpy()[:] = bits.numpy()[each.places.all()]
        target.numpy()[split:] = np.concatenate([each.places.low.view(np.uint8), each.places.runs.view(np.uint8)])
    return data


def read(change: Change, data: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The positions in the window and the new elements, from a change's bytes; None and the whole window if dense."""
    box = change.box
    if change.count < 0:
        if change.nbytes != box.numel * dtype.itemsize:
            raise _wrong(change)
        return None, data.view(dtype).view(box.lengths)
    count = change.count
    if change.nbytes != count * (dtype.itemsize + 2) + 4 * _runs(box.numel):
        raise _wrong(change)
    split = count * dtype.itemsize
    values = data[:split].view(dtype)
    low = data[split : split + 2 * count].numpy().view("<u2")
    runs = data[split + 2 * count :].numpy().copy().view("<u4")
    if int(runs.sum()) != count:
        raise _wrong(change)
    places = Places(low, runs).all()
    if count and int(places.max()) >= box.numel:
        raise _wrong(change)
    return torch.from_numpy(places), values


def in_box(places: torch.Tensor, window: Box, box: Box) -> tuple[torch.Tensor, torch.Tensor | slice]:
    """Positions in a window, converted to positions in another box of the tensor, and which of them lie in that box.

    >>> in_box(torch.tensor([0, 3]), Box((0, 0), (2, 2)), Box((1, 0), (1, 2)))
    (tensor([1]), tensor([False,  True]))
    """
    if window.lengths[1:] == box.lengths[1:] and window.offsets[1:] == box.offsets[1:] and box.contains(window):
        first = (window.offsets[0] - box.offsets[0]) * prod(box.lengths[1:]) if box.ndim else 0
        return places + first, slice(None)
    shift = [here - there for here, there in zip(window.offsets, box.offsets, strict=True)]
    index = [at + by for at, by in zip(np.unravel_index(places.numpy(), window.lengths), shift, strict=True)]
    inside = np.logical_and.reduce([(at >= 0) & (at < length) for at, length in zip(index, box.lengths, strict=True)])
    position = np.ravel_multi_index([at[inside] for at in index], box.lengths)
    return torch.from_numpy(position), torch.from_numpy(inside)


def runs_of(changes: Sequence[Change], limit: int) -> Iterator[list[Change]]:
    """Groups of changes whose bytes are near each other, each read at once: at most `limit` bytes, or one change.

    Bytes between them are read too: mostly they are in a block that has to be read whole for its checksum.
    """
    group: list[Change] = []
    for change in sorted(changes, key=lambda change: change.start):
        together = group and change.start - (group[-1].start + group[-1].nbytes) < BLOCK
        if group and (not together or change.start + change.nbytes - group[0].start > limit):
            yield group
            group = []
        group.append(change)
    if group:
        yield group


def total_bytes(changes: Sequence[ChangedWindow]) -> int:
    """The bytes that are written for the changes."""
    return sum(each.change.nbytes for each in changes)


def _differing(new: torch.Tensor, old: torch.Tensor) -> Array | None:
    """The positions of elements that differ, in order; None means all of them."""
    if new.dtype.itemsize not in _BITS:  # numpy has no integers of 16 bytes: write all elements
        same = torch.equal(new.reshape(-1).view(torch.uint8), old.reshape(-1).view(torch.uint8))
        return np.empty(0, np.int64) if same else None
    # numpy releases the GIL here, and is several times faster than torch's sums and `nonzero` of booleans.
    return np.flatnonzero(_bits(new).numpy() != _bits(old).numpy())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(_BITS[tensor.dtype.itemsize])


def _sparse_bytes(count: int, tensor: torch.Tensor) -> int:
    return count * (tensor.dtype.itemsize + 2) + 4 * _runs(tensor.numel())


def _runs(numel: int) -> int:
    return -(-numel // _RUN)


def _wrong(change: Change) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{change.name}: the changes in {change.box} do not have the size that is listed")
