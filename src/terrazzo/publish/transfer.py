"""The plan of a transfer from one group of ranks to another: which messages, with which boxes, in which order.

Both sides compute the plan from the same two tables (the boxes that each sender has, and those that each receiver
needs); each rank computes only its own messages. A box that a receiver needs is cut at the boundaries of senders'
boxes, and into pieces that fit into a message; neighbouring pieces share a message.

All ranks handle their messages in the same order, a few at a time. So the first unfinished message is first in its
sender's queue and in its receiver's, and there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import torch

from terrazzo.checkpoint.native.datafile import row_major_windows
from terrazzo.checkpoint.native.dtypes import dtype_from_name
from terrazzo.errors import PublishError
from terrazzo.layout import Box

_ALIGNED: Final = 16
IN_FLIGHT: Final = 4  # messages that a rank sends or receives at once


class Held(msgspec.Struct, array_like=True, frozen=True):
    """A box that a sender has."""

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class Wanted(msgspec.Struct, array_like=True, frozen=True):
    """A box that a receiver needs, and its dtype there."""

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A box in a message: the indices of the sender's and the receiver's boxes that contain it, and where it begins in
    the message."""

    source: int
    target: int
    box: Box
    dtype: torch.dtype
    start: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Message:
    """A message from one rank to another; `number` counts the messages of this pair of ranks."""

    sender: int
    receiver: int
    number: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.pieces[-1].start + self.pieces[-1].nbytes


def plan_messages(
    held: Sequence[Sequence[Held]],
    wanted: Sequence[Sequence[Wanted]],
    dtypes: Mapping[str, torch.dtype],
    message_bytes: int,
    *,
    sender: int | None = None,
    receiver: int | None = None,
) -> tuple[Message, ...]:
    """The messages of one sender, of one receiver, or all, in the order in which they are handled.

    If the receiver's dtype is smaller than the published one, the sender converts.

    >>> held = [[Held("w", (0,), (2,))], [Held("w", (2,), (2,))]]
    >>> wanted = [[Wanted("w", (1,), (3,), "float32")]]
    >>> for message in plan_messages(held, wanted, {"w": torch.float32}, 1 << 20):
    ...     print(message.sender, message.receiver, message.pieces[0].box)
    0 0 Box(offsets=(1,), lengths=(1,))
    1 0 Box(offsets=(2,), lengths=(2,))
    """
    by_name: dict[str, list[tuple[int, int, Box]]] = {}
    for rank, has_all in enumerate(held):
        for place, each in enumerate(has_all):
            by_name.setdefault(each.name, []).append((rank, place, Box(each.offsets, each.lengths)))
    messages: list[Message] = []
    for to, boxes in enumerate(wanted):
        if receiver is not None and to != receiver:
            continue
        pairs: dict[int, list[tuple[int, int, Box, torch.dtype]]] = {}
        for target, want in enumerate(boxes):
            box, dtype = Box(want.offsets, want.lengths), _on_the_way(dtypes[want.name], dtype_from_name(want.dtype))
            lacking = box.numel
            for rank, source, has in by_name.get(want.name, ()):
                common = box.intersect(has)
                if common is None:
                    continue
                lacking -= common.numel
                if sender is None or rank == sender:
                    pairs.setdefault(rank, []).append((source, target, common, dtype))
            if lacking:
                raise PublishError(f"{want.name}: no sender has {lacking} elements of {box}")
        for rank, pieces in pairs.items():
            messages += _messages(rank, to, pieces, message_bytes)
    count = max(len(held), len(wanted))
    return tuple(sorted(messages, key=lambda each: (each.number, (each.receiver - each.sender) % count, each.sender)))


def _on_the_way(published: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    return wanted if wanted.itemsize < published.itemsize else published


def _messages(
    sender: int, receiver: int, pieces: Sequence[tuple[int, int, Box, torch.dtype]], limit: int
) -> Iterator[Message]:
    number, start = 0, 0
    together: list[Piece] = []
    for source, target, box, dtype in pieces:
        for window in row_major_windows(box.lengths, max(limit // dtype.itemsize, 1)):
            nbytes = window.numel * dtype.itemsize
            if together and start + nbytes > limit:
                yield Message(sender, receiver, number, tuple(together))
                number, start, together = number + 1, 0, []
            together.append(Piece(source, target, window.shifted(box.offsets), dtype, start))
            start = -(-(start + nbytes) // _ALIGNED) * _ALIGNED
    if together:
        yield Message(sender, receiver, number, tuple(together))
