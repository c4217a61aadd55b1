"""Copies in host memory of a rank's part of the model: the publisher's snapshot, and the receiver's second copy.

A snapshot has what a rank publishes, at one moment and in the published dtype. Training goes on as soon as it is taken;
everything else reads it. Tensors are cut into windows of some MB, which are compared, written and sent one by one, so
that little memory is needed beside the copy.

A receiver's copy gets a version, piece by piece, while the model is in use. When every rank has all of it, it is copied
into the model between two forward passes; no network or disk is used for that, which could fail on some ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from terrazzo.checkpoint.native.tensors import as_bytes, can_convert, is_lossless, same_memory
from terrazzo.errors import CheckpointMismatchError
from terrazzo.layout import Box
from terrazzo.layout.box import row_major_windows
from terrazzo.publish.parts import ModelPart, Parts, TensorInfo, changed, published_dtype

WINDOW: Final = 4 << 20  # bytes
_CAST: Final = 64 << 20  # bytes that are converted at once on an accelerator
_ALIGNED: Final = 16  # bytes


def aligned(nbytes: int) -> int:
    """The first place from here on at which a tensor of any dtype may begin."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, slots=True)
class SnapshotWindow:
    """Consecutive rows of a part."""

    part: int
    box: Box  # in the whole tensor
    within: Box  # in the part


def _host_memory(box: Box, dtype: torch.dtype, model_is_on_cpu: bool) -> torch.Tensor:
    return torch.empty(box.lengths, dtype=dtype, pin_memory=not model_is_on_cpu, device="cpu")


class Snapshot:
    """Host memory for the parts that this rank publishes."""

    def __init__(self, parts: Sequence[ModelPart], dtype: torch.dtype | None) -> None:
        self.names = [part.name for part in parts]
        self.boxes = [part.box for part in parts]
        self.tensors = [
            _host_memory(part.box, published_dtype(part.data.dtype, dtype), part.data.is_cpu) for part in parts
        ]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @torch.no_grad()
    def take(self, parts: Sequence[ModelPart]) -> None:
        """Copy the model's present values."""
        for part, target in zip(parts, self.tensors, strict=True):
            copy_into(target, part.data)

    def windows(self) -> list[SnapshotWindow]:
        """All parts, cut into pieces that are contiguous in memory."""
        found = []
        for number, (box, tensor) in enumerate(zip(self.boxes, self.tensors, strict=True)):
            for within in row_major_windows(box.lengths, max(WINDOW // tensor.dtype.itemsize, 1)):
                found.append(SnapshotWindow(number, within.shifted(box.offsets), within))
        return found

    def data(self, window: SnapshotWindow) -> torch.Tensor:
        """The elements of a window."""
        return self.tensors[window.part][window.within.slices()]


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between any dtypes and devices; conversion to a smaller dtype happens before the transfer."""
    if source.device.type == "cpu" or source.dtype.itemsize <= target.dtype.itemsize:
        as_bytes(target).copy_(as_bytes(source))
        return
    for box in row_major_windows(source.shape, _CAST // source.dtype.itemsize):
        target[box.slices()].copy_(source[box.slices()].to(target.dtype))


# ------------------------------------------------------------------ the publisher's


_NAMED = 50


class NeededBox(NamedTuple):
    """A box of a published tensor that a receiver needs, and its dtype there."""

    source: str  # the published name
    box: Box
    dtype: torch.dtype


@dataclass(eq=False, slots=True)
class ReceivedBox:
    """A box of a published tensor, host memory for it, and the model's memory: two tensors if weights are tied."""

    source: str  # the published name
    box: Box
    data: torch.Tensor
    in_model: list[torch.Tensor]
    is_dirty: bool = False

    @property
    def needed(self) -> NeededBox:
        return NeededBox(self.source, self.box, self.data.dtype)


def sources_of(
    parts: Parts,
    published: Mapping[str, TensorInfo],
    aliases: Mapping[str, str],
    *,
    strict: bool,
    allow_lossy_dtype: bool,
) -> dict[str, str]:
    """The published name for each of the receiver's names. One error lists all tensors that do not fit."""
    found: dict[str, str] = {}
    missing: list[str] = []
    wrong: list[str] = []
    by_name: dict[str, list[str]] = {name: [name] for name in parts.infos}
    for alias, name in parts.aliases.items():
        by_name[name].append(alias)
    for name, info in parts.infos.items():
        known = (aliases.get(other, other) for other in by_name[name])
        source = next((other for other in known if other in published), None)
        if source is None:
            missing.append(name)
            continue
        offered = published[source]
        if offered.shape != info.shape:
            wrong.append(f"{name}: the published shape is {list(offered.shape)}, the receiver's {list(info.shape)}")
        elif not can_convert(offered.dtype, info.dtype):
            wrong.append(f"{name}: the published dtype is {offered.dtype}, which torch cannot convert to {info.dtype}")
        elif not is_lossless(offered.dtype, info.dtype) and not (
            allow_lossy_dtype and offered.dtype.is_floating_point and info.dtype.is_floating_point
        ):
            wrong.append(
                f"{name}: the published dtype is {offered.dtype}, which {info.dtype} cannot represent exactly: "
                f"publish with dtype={info.dtype}, or pass allow_lossy_dtype=True"
            )
        found[name] = source
    lines = [f"{name}: not published" for name in missing if strict] + wrong
    if lines:
        more = f"\n  and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
        raise CheckpointMismatchError(
            "the published tensors do not fit the receiver's model:\n  " + "\n  ".join(lines[:_NAMED]) + more,
            missing=tuple(missing) if strict else (),
            mismatched=tuple(line.partition(":")[0] for line in wrong),
        )
    return found


def targets_of(parts: Parts, sources: Mapping[str, str]) -> dict[NeededBox, list[torch.Tensor]]:
    """The boxes that the receiver needs, each with the model's memory for it: two tensors if weights are tied."""
    found: dict[NeededBox, list[torch.Tensor]] = {}
    for part in parts.parts:
        if part.name in sources:
            found.setdefault(NeededBox(sources[part.name], part.box, part.data.dtype), []).append(part.data)
    return found


class HostCopy:
    """Host memory for this rank's part of the published tensors. The memory of the one `before` is used again, as far
    as it fits."""

    def __init__(self, parts: Parts, sources: Mapping[str, str], before: HostCopy | None = None) -> None:
        self._sources = sources
        self.slots: list[ReceivedBox] = []
        self._by_source: dict[str, list[ReceivedBox]] = {}
        targets = targets_of(parts, sources)
        known: dict[NeededBox, torch.Tensor] = {}
        if before is not None:
            known = {slot.needed: slot.data for slot in before.slots if slot.needed in targets}
            before.slots, before._by_source = [], {}  # frees what does not fit before more is allocated
        for needed, in_model in targets.items():
            data, is_cpu = known.get(needed), in_model[0].is_cpu
            if data is None or data.is_pinned() == is_cpu:
                data = _host_memory(needed.box, needed.dtype, is_cpu)
            slot = ReceivedBox(needed.source, needed.box, data, in_model)
            self.slots.append(slot)
            self._by_source.setdefault(slot.source, []).append(slot)

    def follow(self, parts: Parts) -> None:
        """Refer to the model's present memory: it may have been moved, for instance to another device."""
        in_model = targets_of(parts, self._sources)
        if in_model.keys() != {slot.needed for slot in self.slots}:
            raise changed("a version was received: construct another Receiver")
        for slot in self.slots:
            present = in_model[slot.needed]
            if len(present) != len(slot.in_model) or not all(map(same_memory, present, slot.in_model)):
                slot.in_model, slot.is_dirty = present, True

    def of(self, source: str) -> list[ReceivedBox]:
        """The slots of a published tensor."""
        return self._by_source.get(source, [])

    @torch.no_grad()
    def apply(self) -> None:
        """Copy received slots into the model."""
        devices = set()
        for slot in self.slots:
            if not slot.is_dirty:
                continue
            for live in slot.in_model:
                as_bytes(live).copy_(as_bytes(slot.data), non_blocking=True)
                if not live.is_cpu:
                    devices.add(live.device)
            slot.is_dirty = False
        for device in devices:  # the copies are asynchronous, and the next poll writes to the slots
            torch.accelerator.current_stream(device).synchronize()


# Allocates the memory for published tensors, of which some have other names, or raises if they do not fit the model.
Match = Callable[[Mapping[str, TensorInfo], Mapping[str, str]], HostCopy]
