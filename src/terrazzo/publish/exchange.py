"""Send and receive the messages of a transfer, over a process group of the publisher's and the receiver's ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, Store

from terrazzo._torch.groups import gloo_group
from terrazzo.checkpoint.native.dtypes import as_bytes
from terrazzo.comm.pending import timed_out
from terrazzo.errors import CommError, CommTimeout
from terrazzo.publish.host_copy import Slot
from terrazzo.publish.snapshot import Snapshot
from terrazzo.publish.transfer import IN_FLIGHT, Message, Piece


class Header(NamedTuple):
    """The first message of a transfer."""

    sequence: int
    number: int


class Connections:
    """A process group of all senders and all receivers; senders have the lower ranks.

    With an `address` of this host it listens there only.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        senders: int,
        receivers: int,
        timeout: timedelta,
        address: str | None = None,
    ) -> None:
        self._senders = senders
        self._timeout = timeout
        self.sent = 0  # bytes of the present transfer so far
        with _explained(f"connecting publisher and receivers as {name}", timeout):
            self._gloo: Any = gloo_group(PrefixStore(name, store), rank, senders + receivers, timeout, address)

    def send(self, messages: Sequence[Message], header: Header, receivers: Sequence[int], snapshot: Snapshot) -> int:
        """Send this rank's messages, after a header to each of `receivers` (which only the first sender has)."""
        under_way: deque[tuple[Any, torch.Tensor]] = deque()
        gloo, self.sent = self._gloo, 0
        with _explained("sending weights", self._timeout):
            for receiver in receivers:
                data = torch.tensor(header, device="cpu")
                under_way.append((gloo.send([data], self._senders + receiver, 0), data))
            for message in messages:
                while len(under_way) >= IN_FLIGHT:
                    under_way.popleft()[0].wait(self._timeout)
                data = _packed(message, snapshot)
                self.sent += data.numel()
                work = gloo.send([data], self._senders + message.receiver, message.number + 1)
                under_way.append((work, data))
            while under_way:
                under_way.popleft()[0].wait(self._timeout)
        return self.sent

    def close(self) -> None:
        """Close the connections, also if something (an error's traceback, say) still refers to this object."""
        self._gloo = None

    def receive_header(self) -> Header:
        """Receive the header from the first sender."""
        data = torch.empty(len(Header._fields), dtype=torch.int64, device="cpu")
        with _explained("waiting for the publisher", self._timeout):
            self._gloo.recv([data], 0, 0).wait(self._timeout)
        return Header(*data.tolist())

    def receive(self, messages: Sequence[Message], slots: Sequence[Slot]) -> int:
        """Receive this rank's messages, and copy their pieces into the slots."""
        under_way: deque[tuple[Any, Message, torch.Tensor]] = deque()
        received = 0

        def finish() -> None:
            work, message, data = under_way.popleft()
            work.wait(self._timeout)
            for piece in message.pieces:
                slot = slots[piece.target]
                target = slot.data[piece.box.relative_to(slot.box).slices()]
                as_bytes(target).copy_(as_bytes(_view(data, piece)))
                slot.is_dirty = True

        with _explained("receiving weights", self._timeout), torch.no_grad():
            for message in messages:
                while len(under_way) >= IN_FLIGHT:
                    finish()
                data = torch.empty(message.nbytes, dtype=torch.uint8, device="cpu")
                received += message.nbytes
                under_way.append((self._gloo.recv([data], message.sender, message.number + 1), message, data))
            while under_way:
                finish()
        return received


@torch.no_grad()
def _packed(message: Message, snapshot: Snapshot) -> torch.Tensor:
    data = torch.empty(message.nbytes, dtype=torch.uint8, device="cpu")
    for piece in message.pieces:
        box, tensor = snapshot.boxes[piece.source], snapshot.tensors[piece.source]
        as_bytes(_view(data, piece)).copy_(as_bytes(tensor[piece.box.relative_to(box).slices()]))
    return data


def _view(data: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The bytes of a piece as a tensor of its dtype and shape."""
    return data[piece.start : piece.start + piece.nbytes].view(piece.dtype).view(piece.box.lengths)


@contextmanager
def _explained(what: str, timeout: timedelta) -> Iterator[None]:
    """Gloo's errors as terrazzo's."""
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        reason = str(error).partition(". ")[0] or "a connection broke"
        raise (CommTimeout if timed_out(error) else CommError)(
            f"{what} failed: {reason}; a rank of the other side has "
            f"died or is late (the time limit is {timeout.total_seconds():g} s)"
        ) from error
