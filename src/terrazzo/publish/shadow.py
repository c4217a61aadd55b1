"""A receiver's second copy of its part of the model, on the host.

What arrives goes there, piece by piece, while the model serves.  When all of a version is there, on every rank, it is
copied into the model between two forward passes: no step of that can fail for what the network or a disk does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from terrazzo.checkpoint.native.dtypes import as_bytes, is_lossless
from terrazzo.checkpoint.native.memory import same_memory
from terrazzo.checkpoint.plan.chunked import ChunkedTensor
from terrazzo.errors import CheckpointMismatchError, PublishError
from terrazzo.layout import Box
from terrazzo.publish.parts import About, Part, Parts

_NAMED = 50


@dataclass(eq=False, slots=True)
class Slot:
    """A box of a published tensor, memory for it, and where it is in the model: tied weights may be in two places."""

    source: str  # the published name
    box: Box
    data: torch.Tensor
    lives: list[torch.Tensor]
    is_dirty: bool = False


def sources_of(
    parts: Parts,
    published: Mapping[str, About],
    aliases: Mapping[str, str],
    *,
    strict: bool,
    allow_lossy_dtype: bool,
) -> dict[str, str]:
    """The published name of each of the receiver's names; one error for all that does not fit."""
    found: dict[str, str] = {}
    missing: list[str] = []
    wrong: list[str] = []
    by_name: dict[str, list[str]] = {name: [name] for name in parts.abouts}
    for alias, name in parts.aliases.items():
        by_name[name].append(alias)
    for name, about in parts.abouts.items():
        known = (aliases.get(other, other) for other in by_name[name])
        source = next((other for other in known if other in published), None)
        if source is None:
            missing.append(name)
            continue
        offered = published[source]
        if offered.shape != about.shape:
            wrong.append(f"{name}: {list(offered.shape)} is published, the receiver has {list(about.shape)}")
        elif not is_lossless(offered.dtype, about.dtype) and not (
            allow_lossy_dtype and offered.dtype.is_floating_point and about.dtype.is_floating_point
        ):
            wrong.append(
                f"{name}: {offered.dtype} is published, and {about.dtype} does not hold all of its values; publish "
                f"with dtype={about.dtype}, or pass allow_lossy_dtype=True to the Receiver"
            )
        found[name] = source
    lines = [f"{name}: is not published" for name in missing if strict] + wrong
    if lines:
        more = f"\n  and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
        raise CheckpointMismatchError(
            "what is published does not fit the receiver's model:\n  " + "\n  ".join(lines[:_NAMED]) + more,
            missing=tuple(missing) if strict else (),
            mismatched=tuple(line.partition(":")[0] for line in wrong),
        )
    return found


_Key = tuple[str, Box, torch.dtype]


class Shadow:
    """Memory for all of this rank's part that is published."""

    def __init__(self, parts: Parts, sources: Mapping[str, str]) -> None:
        self._sources = sources
        slots: dict[_Key, Slot] = {}
        for key, part in self._keyed(parts):
            if key not in slots:
                data = torch.empty(part.box.lengths, dtype=part.data.dtype, pin_memory=part.data.device.type == "cuda")
                slots[key] = Slot(key[0], part.box, data, [])
            slots[key].lives.append(part.data)
        self.slots = list(slots.values())
        self._by_source: dict[str, list[Slot]] = {}
        for slot in self.slots:
            self._by_source.setdefault(slot.source, []).append(slot)

    def _keyed(self, parts: Parts) -> list[tuple[_Key, Part]]:
        return [
            ((self._sources[part.name], part.box, part.data.dtype), part)
            for part in parts.parts
            if part.name in self._sources
        ]

    def follow(self, parts: Parts) -> None:
        """The model may have moved to other memory, or another device, since: this is what it has now."""
        lives: dict[_Key, list[torch.Tensor]] = {}
        for key, part in self._keyed(parts):
            lives.setdefault(key, []).append(part.data)
        slots = {(slot.source, slot.box, slot.data.dtype): slot for slot in self.slots}
        if lives.keys() != slots.keys():
            raise PublishError(
                "the model has other tensors, dtypes or another layout than when a version came; make another Receiver"
            )
        for key, slot in slots.items():
            if not _same_memory(lives[key], slot.lives):
                slot.lives, slot.is_dirty = lives[key], True

    @property
    def nbytes(self) -> int:
        return sum(slot.data.nbytes for slot in self.slots)

    def of(self, source: str) -> list[Slot]:
        """The slots of a published tensor."""
        return self._by_source.get(source, [])

    def targets(self, published: Mapping[str, About]) -> Iterator[dict[str, ChunkedTensor]]:
        """All of it as what `load` fills, in one or more state dicts: in each, a tensor's boxes begin at places of
        their own."""
        waiting = list(self.slots)
        while waiting:
            chunks: dict[str, dict[tuple[int, ...], tuple[Box, torch.Tensor]]] = {}
            later = []
            for slot in waiting:
                taken = chunks.setdefault(slot.source, {})
                if slot.box.offsets in taken:
                    later.append(slot)
                else:
                    taken[slot.box.offsets] = slot.box, slot.data
            yield {
                name: ChunkedTensor(torch.Size(published[name].shape), next(iter(found.values()))[1].dtype, found, None)
                for name, found in chunks.items()
            }
            waiting = later

    def all_dirty(self) -> None:
        """Everything has to be copied into the model."""
        for slot in self.slots:
            slot.is_dirty = True

    @torch.no_grad()
    def apply(self) -> int:
        """Copy what has arrived into the model; returns how many bytes."""
        copied = 0
        devices = set()
        for slot in self.slots:
            if not slot.is_dirty:
                continue
            for live in slot.lives:
                as_bytes(live).copy_(as_bytes(slot.data), non_blocking=True)
                copied += slot.data.nbytes
                devices.add(live.device)
            slot.is_dirty = False
        for device in devices:
            if device.type == "cuda":  # the copies are under way, and the memory may be filled again
                torch.cuda.synchronize(device)
        return copied


def _same_memory(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(same_memory(a, b) for a, b in zip(one, other, strict=True))
