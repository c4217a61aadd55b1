"""What a receiver's rank asks of the publisher's ranks: which boxes, in messages of bounded size.

A box that it needs is cut at the boundaries of the publisher's boxes, and into pieces that fit into a message;
neighbouring pieces share a message. The sender converts, if the receiver's dtype is smaller than the published one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import torch

from terrazzo.checkpoint.native.datafile import row_major_windows
from terrazzo.checkpoint.native.dtypes import as_bytes, can_convert, dtype_from_name, dtype_name
from terrazzo.errors import PublishError, TerrazzoError
from terrazzo.layout import Box
from terrazzo.publish.snapshot import Snapshot

_ALIGNED: Final = 16


class ListedBox(msgspec.Struct, array_like=True, frozen=True):
    """A box that a sender has."""

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class AskedBox(msgspec.Struct, array_like=True, frozen=True):
    """A box in a message: the index of the sender's box that contains it, and its dtype on the way."""

    source: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: str

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.lengths)


@dataclass(frozen=True, slots=True)
class Message:
    """What a receiver's rank asks of a sender at once, and for each box the index of the receiver's own."""

    sender: int
    asked: tuple[AskedBox, ...]
    targets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return _starts(self.asked)[1]

    def views(self, data: torch.Tensor) -> Iterator[torch.Tensor]:
        """The boxes in the message's bytes."""
        return _views(data, self.asked)


def plan_messages(
    held: Sequence[Sequence[ListedBox]],
    wanted: Sequence[tuple[str, Box, torch.dtype]],
    dtypes: Mapping[str, torch.dtype],
    message_bytes: int,
) -> list[Message]:
    """The messages with which a receiver's rank gets the boxes that it needs.

    >>> held = [[ListedBox("w", (0,), (2,))], [ListedBox("w", (2,), (2,))]]
    >>> for message in plan_messages(held, [("w", Box((1,), (3,)), torch.float32)], {"w": torch.float32}, 1 << 20):
    ...     print(message.sender, message.asked[0].box)
    0 Box(offsets=(1,), lengths=(1,))
    1 Box(offsets=(2,), lengths=(2,))
    """
    by_name: dict[str, list[tuple[int, int, Box]]] = {}
    for rank, has_all in enumerate(held):
        for place, each in enumerate(has_all):
            by_name.setdefault(each.name, []).append((rank, place, Box(each.offsets, each.lengths)))
    pairs: dict[int, list[tuple[AskedBox, int]]] = {}
    for target, (name, box, dtype) in enumerate(wanted):
        on_the_way = dtype if dtype.itemsize < dtypes[name].itemsize else dtypes[name]
        lacking = box.numel
        for rank, source, has in by_name.get(name, ()):
            common = box.intersect(has)
            if common is None:
                continue
            lacking -= common.numel
            for window in row_major_windows(common.lengths, max(message_bytes // on_the_way.itemsize, 1)):
                offsets, lengths = window.shifted(common.offsets).offsets, window.lengths
                pairs.setdefault(rank, []).append((AskedBox(source, offsets, lengths, dtype_name(on_the_way)), target))
        if lacking:
            raise PublishError(f"{name}: no sender has {lacking} elements of {box}")
    return [message for rank, pieces in sorted(pairs.items()) for message in _messages(rank, pieces, message_bytes)]


def _messages(sender: int, pieces: Sequence[tuple[AskedBox, int]], limit: int) -> Iterator[Message]:
    start = 0
    together: list[tuple[AskedBox, int]] = []
    for asked, target in pieces:
        nbytes = asked.box.numel * dtype_from_name(asked.dtype).itemsize
        if together and start + nbytes > limit:
            yield Message(sender, *map(tuple, zip(*together, strict=True)))
            start, together = 0, []
        together.append((asked, target))
        start = -(-(start + nbytes) // _ALIGNED) * _ALIGNED
    yield Message(sender, *map(tuple, zip(*together, strict=True)))


@torch.no_grad()
def packed(asked: Sequence[AskedBox], snapshot: Snapshot, most: int) -> torch.Tensor:
    """The bytes of a message; `PublishError` if that is not published, or has more than `most` bytes."""
    _check(asked, snapshot)
    nbytes = _starts(asked)[1]
    if len(asked) > 1 and nbytes > most:
        raise PublishError(f"a receiver asks for {nbytes} bytes at once, and at most {most} are sent")
    data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    for each, view in zip(asked, _views(data, asked), strict=True):
        box, tensor = snapshot.boxes[each.source], snapshot.tensors[each.source]
        as_bytes(view).copy_(as_bytes(tensor[each.box.relative_to(box).slices()]))
    return data


def _check(asked: Sequence[AskedBox], snapshot: Snapshot) -> None:
    for each in asked:
        try:
            box, tensor = snapshot.boxes[each.source], snapshot.tensors[each.source]
            fits = each.source >= 0 and box.contains(each.box) and not each.box.is_empty
            fits = fits and can_convert(tensor.dtype, dtype_from_name(each.dtype))
        except (IndexError, ValueError, TypeError, KeyError, TerrazzoError) as error:
            raise PublishError(f"a receiver asks for {each}: {error}") from error
        if not fits:
            raise PublishError(
                f"a receiver asks for {each}, which does not fit the {tensor.dtype} box {box} of "
                f"{snapshot.names[each.source]!r}"
            )


def _starts(asked: Sequence[AskedBox]) -> tuple[list[int], int]:
    """Where each box begins in a message, and the message's bytes."""
    starts, end = [], 0
    for each in asked:
        starts.append(-(-end // _ALIGNED) * _ALIGNED)
        end = starts[-1] + each.box.numel * dtype_from_name(each.dtype).itemsize
    return starts, end


def _views(data: torch.Tensor, asked: Sequence[AskedBox]) -> Iterator[torch.Tensor]:
    for start, each in zip(_starts(asked)[0], asked, strict=True):
        dtype = dtype_from_name(each.dtype)
        yield data[start : start + each.box.numel * dtype.itemsize].view(dtype).view(each.lengths)
