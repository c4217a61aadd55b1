"""Bytes between the ranks of a group, over gloo connections of its own, each operation within a time limit.

A message travels in a frame of fixed size that says how long the message is, so that a short one, the usual case, is
there after one round; a long one follows its frame.

When an operation fails (a rank died, or did not come in time), the ranks that notice call the roll through the
group's store: each writes what it saw and looks who else does.  So all of them raise the same error, and it names the
ranks that nobody has heard of.  The link is broken from then on: gloo has closed its connections.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, Work

from terrazzo._torch.groups import AllToAllOptions, BroadcastOptions
from terrazzo.errors import CommError, CommTimeout

_Gloo = Any  # a ProcessGroupGloo: torch's stub lacks its operations

_FRAME = 256
_HEAD = 8  # bytes of a frame that say how long the message is
_SHORT = _FRAME - _HEAD
_ROLL_CALL_SECONDS = 2.0


class Link:
    """The connections.  All ranks of the group make it, and use it in the same order, as with collectives."""

    def __init__(self, group: ProcessGroup, ranks: Sequence[int], name: str, timeout: timedelta) -> None:
        """`ranks` are the group's global ranks, for messages; `name` tells the links of one group apart."""
        self.index = group.rank()
        self.ranks = tuple(ranks)
        self.broken: str | None = None
        self._store: Store = PrefixStore(f"terrazzo/{name}", group.get_group_store())
        with self._explained("connecting", timeout):
            self._gloo: _Gloo | None = ProcessGroupGloo(
                PrefixStore("gloo", self._store), self.index, len(self.ranks), timeout
            )

    def close(self) -> None:
        """Close the connections."""
        self._break("it was closed")

    def all_gather(self, data: bytes, timeout: timedelta) -> list[bytes]:
        """The data of every rank."""
        n = len(self.ranks)
        with self._operation("all_gather", timeout) as gloo:
            bodies: list[bytes | bytearray] = []
            started = []
            for source, frame in enumerate(_all_to_all(gloo, [_frame(data)] * n, [_FRAME] * n, timeout)):
                body = bytearray(data) if source == self.index else _body(frame)
                if len(body) > _SHORT:
                    started.append(_start_broadcast(gloo, body, source, timeout))
                bodies.append(body)
            for work in started:
                work.wait()
            return [bytes(body) for body in bodies]

    def broadcast(self, data: bytes | None, src: int, timeout: timedelta) -> bytes:
        """The data of position `src`, on every rank."""
        with self._operation("broadcast", timeout) as gloo:
            frame = bytearray(_FRAME) if data is None else _frame(data)
            _start_broadcast(gloo, frame, src, timeout).wait()
            body = _body(frame) if data is None else bytearray(data)
            if len(body) > _SHORT:
                _start_broadcast(gloo, body, src, timeout).wait()
            return bytes(body)

    def gather(self, data: bytes, dst: int, timeout: timedelta) -> list[bytes] | None:
        """The data of every rank, on position `dst`."""
        n = len(self.ranks)
        if self.index != dst:
            self._send_and_receive("gather", [data if i == dst else None for i in range(n)], [], timeout)
            return None
        received = self._send_and_receive("gather", [None] * n, [i for i in range(n) if i != dst], timeout)
        return [data if i == dst else received[i] for i in range(n)]

    def scatter(self, parts: Sequence[bytes] | None, src: int, timeout: timedelta) -> bytes:
        """The part that position `src` has for this rank."""
        if parts is None:
            return self._send_and_receive("scatter", [None] * len(self.ranks), [src], timeout)[src]
        others = [None if i == src else part for i, part in enumerate(parts)]
        self._send_and_receive("scatter", others, [], timeout)
        return parts[src]

    def _send_and_receive(
        self, what: str, outgoing: Sequence[bytes | None], sources: Sequence[int], timeout: timedelta
    ) -> dict[int, bytes]:
        """Send messages to some ranks, and receive one from each of `sources`."""
        with self._operation(what, timeout) as gloo:
            frames = [bytearray() if data is None else _frame(data) for data in outgoing]
            sizes = [_FRAME if i in sources else 0 for i in range(len(self.ranks))]
            incoming = _all_to_all(gloo, frames, sizes, timeout)
            bodies = {source: _body(incoming[source]) for source in sources}
            started = [
                gloo.send([_tensor(bytearray(data))], peer, 0)
                for peer, data in enumerate(outgoing)
                if data is not None and len(data) > _SHORT
            ]
            started += [gloo.recv([_tensor(body)], source, 0) for source, body in bodies.items() if len(body) > _SHORT]
            for work in started:
                work.wait(timeout)
            return {source: bytes(body) for source, body in bodies.items()}

    # -------------------------------------------------------------- failure

    @contextmanager
    def _operation(self, what: str, timeout: timedelta) -> Iterator[_Gloo]:
        if self._gloo is None:
            raise CommError(f"{what} among ranks {list(self.ranks)} is not possible: {self.broken}")
        with self._explained(what, timeout):
            yield self._gloo

    @contextmanager
    def _explained(self, what: str, timeout: timedelta) -> Iterator[None]:
        """Turn gloo's and the store's errors into one that says who is missing."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            timed_out = "timed out" in text or "timeout" in text
            self._break(f"{what} failed before")
            seen = self._call_roll("timeout" if timed_out else "lost")
            missing = tuple(rank for rank, saw in zip(self.ranks, seen, strict=True) if saw is None)
            cause = (
                f"no word from ranks {list(missing)}, which died, hang, or have not come this far"
                if missing
                else "a connection broke, or some ranks came only after others had given up"
            )
            limit = f"{timeout.total_seconds():g} s"
            raised = (CommTimeout if "timeout" in seen else CommError)(
                f"{what} among ranks {list(self.ranks)} failed: {cause}; the time limit is {limit}"
            )
            raised.missing = missing
            raise raised from error

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
        self._gloo = None  # closes the connections, which tells ranks that still wait

    def _call_roll(self, saw: str) -> list[str | None]:
        """What each rank saw, None for a rank that says nothing."""
        seen: list[str | None] = [saw if i == self.index else None for i in range(len(self.ranks))]
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        try:
            self._store.set(f"saw/{self.index}", saw)
            while None in seen and time.monotonic() < deadline:
                for i, known in enumerate(seen):
                    if known is None and self._store.check([f"saw/{i}"]):
                        seen[i] = self._store.get(f"saw/{i}").decode()
                time.sleep(0.02)
        except RuntimeError:
            pass  # the store went with the rank that hosts it: then nobody can be heard of
        return seen


def _frame(data: bytes) -> bytearray:
    return bytearray(len(data).to_bytes(_HEAD, "little") + data[:_SHORT].ljust(_SHORT, b"\0"))


def _body(frame: bytearray) -> bytearray:
    """The message, if the frame holds all of it, else room for it."""
    length = int.from_bytes(frame[:_HEAD], "little")
    return frame[_HEAD : _HEAD + length] if length <= _SHORT else bytearray(length)


def _tensor(buffer: bytearray) -> Tensor:
    """The buffer itself as a tensor."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)


def _all_to_all(gloo: _Gloo, pieces: Sequence[bytearray], sizes: Sequence[int], timeout: timedelta) -> list[bytearray]:
    """Send a piece to each rank; `sizes` says how much comes from each."""
    options = AllToAllOptions()
    options.timeout = timeout
    received = bytearray(sum(sizes))
    sent_sizes = [len(piece) for piece in pieces]
    sent = bytearray().join(pieces)
    gloo.alltoall_base(_tensor(received), _tensor(sent), list(sizes), sent_sizes, options).wait()
    parts = []
    start = 0
    for size in sizes:
        parts.append(received[start : start + size])
        start += size
    return parts


def _start_broadcast(gloo: _Gloo, buffer: bytearray, src: int, timeout: timedelta) -> Work:
    options = BroadcastOptions()
    options.rootRank = src
    options.timeout = timeout
    return gloo.broadcast([_tensor(buffer)], options)
