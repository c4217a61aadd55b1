"""Bytes between the ranks of a group, over gloo connections that belong to the link; each operation has a time limit.

A message travels in a frame of fixed size that says how long the message is, so that a short one, the usual case, takes
one round; a long one follows its frame. Operations with one sender or one receiver cost as many messages as there are
ranks; only `all_gather` costs their square.

When an operation fails (a rank died, gave up, or was too late), the ranks that notice find out why through the group's
store: each writes there what it saw (`reports`). One of them reads that and writes down the reason, and all of them
raise that same error. A silent rank on the same host is looked up in the process table, which says
whether it died, was stopped, or is only late. The link stays broken, because gloo has closed its connections; `living`
makes a new one on all ranks.

A late rank, which starts an operation (connecting is one) that the others have given up, raises the same error once, at
once: it does not wait for ranks that will not come.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from terrazzo._torch.groups import AllToAllOptions, BroadcastOptions, GatherOptions, ScatterOptions
from terrazzo.comm.pending import timed_out
from terrazzo.comm.processes import Condition, condition_of, own_identity
from terrazzo.comm.reports import read_edition, write_report
from terrazzo.comm.waits import Waiting
from terrazzo.errors import CommError, CommTimeout

_Gloo = Any  # a ProcessGroupGloo: torch's stub lacks its operations

_FRAME = 256
_HEAD = 8  # bytes of a frame that say how long the message is
_SHORT = _FRAME - _HEAD
_REPORTS_SECONDS = 2.0
_LONGEST_REPORT = 2000
# What a rank runs out of by itself; gloo says it in its messages. The others only see that a connection broke.
_SHORTAGES = tuple(os.strerror(number) for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM))


class _Verdict(msgspec.Struct, array_like=True, frozen=True):
    """The reason of a failure, as all ranks will report it."""

    text: str
    timed_out: bool
    missing: tuple[int, ...]
    reports: dict[int, str]


class Link:
    """The connections. All ranks of the group create it, and use it in the same order, as with collectives."""

    def __init__(self, store: Store, index: int, ranks: Sequence[int], name: str, generation: int = 0) -> None:
        """`name` tells apart the links of one group; `index` is this rank's position in `ranks`, the global ranks.

        It is not connected yet: `connected` and `living` do that.
        """
        self.index = index
        self.ranks = tuple(ranks)
        self.broken: str | None = None
        self._group_store = store
        self._name = name
        self._gloo: _Gloo | None = None
        self._done = 0  # how many operations this rank has completed; connecting is one
        self._lock = threading.Lock()  # while connecting
        self._identities = [""] * len(self.ranks)
        self._links: Store = PrefixStore(f"terrazzo/{name}", store)
        # Shared by all links of the group: a rank that never connects to this one may have connected to another.
        self._processes: Store = PrefixStore("terrazzo/processes", store)
        self._generation = generation
        self._store: Store = PrefixStore(str(generation), self._links)
        self._reports: Store = PrefixStore("saw", self._store)

    def close(self) -> None:
        """Close the connections."""
        self.broken = self.broken or "it was closed"
        self._gloo = None

    def connected(self, timeout: timedelta) -> Link:
        """This link, with connections; or, where it is known here to be broken, a new one in its place."""
        with self._lock:
            if self._gloo is None and self.broken is None:
                self._connect(timeout)
        return self if self.broken is None else self._next(timeout)

    def living(self, timeout: timedelta) -> Link:
        """As `connected`; and a new link if this one broke on another rank, in an operation that this rank completed.

        If it broke in an operation that this rank has not started, that is an error here too.
        """
        if self._gloo is None:
            return self.connected(timeout)
        failed = self._failed_in()
        if failed is None:
            return self
        if failed > self._done:
            with self._explained("an operation", timeout):
                raise RuntimeError("the others have given up")
        self._break("it failed on another rank")
        return self._next(timeout)

    def _connect(self, timeout: timedelta) -> None:
        with _store_needed(self.ranks):
            self._processes.set(str(self.index), own_identity().decode())
            failed = self._failed_in()
        with self._explained("connecting", timeout):
            if failed is not None:
                raise RuntimeError("the others have given up")
            self._gloo = ProcessGroupGloo(PrefixStore("gloo", self._store), self.index, len(self.ranks), timeout)
            # Also sent over the connections: the store may be gone when the identities are needed.
            n = len(self.ranks)
            frames = _all_to_all(self._gloo, [_frame(own_identity())] * n, [_FRAME] * n, timeout)
            self._identities = [bytes(_body(frame)).decode() for frame in frames]

    def _next(self, timeout: timedelta) -> Link:
        """A link in place of this one, which is broken: the first that no rank has given up."""
        generation = self._generation + 1
        with _store_needed(self.ranks):
            while self._links.check([f"broken/{generation}"]):
                generation += 1
        return Link(self._group_store, self.index, self.ranks, self._name, generation).connected(timeout)

    def _failed_in(self) -> int | None:
        """The number of the operation in which the first rank that gave up did so; None if none has."""
        key = f"broken/{self._generation}"
        with _store_needed(self.ranks):
            return int(self._links.get(key)) if self._links.check([key]) else None

    def abandon(self, why: str) -> None:
        """Break the link, and write the reason to the store for the ranks that will notice."""
        try:
            write_report(self._reports, self.index, "failed " + why[:_LONGEST_REPORT])
        except RuntimeError:
            pass  # the store is gone: the others only see closed connections
        self._break(f"this rank gave up: {why}")

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
        options = GatherOptions()
        options.rootRank, options.timeout = dst, timeout
        with self._operation("gather", timeout) as gloo:
            own = _tensor(_frame(data))
            if self.index != dst:
                gloo.gather([], [own], options).wait()
                if len(data) > _SHORT:
                    gloo.send([_tensor(bytearray(data))], dst, 0).wait(timeout)
                return None
            frames = [bytearray(_FRAME) for _ in range(n)]
            gloo.gather([[_tensor(frame) for frame in frames]], [own], options).wait()
            bodies = [bytearray(data) if i == dst else _body(frame) for i, frame in enumerate(frames)]
            long = [(i, body) for i, body in enumerate(bodies) if i != dst and len(body) > _SHORT]
            for work in [gloo.recv([_tensor(body)], i, 0) for i, body in long]:
                work.wait(timeout)
            return [bytes(body) for body in bodies]

    def scatter(self, parts: Sequence[bytes] | None, src: int, timeout: timedelta) -> bytes:
        """The part that position `src` has for this rank."""
        options = ScatterOptions()
        options.rootRank, options.timeout = src, timeout
        with self._operation("scatter", timeout) as gloo:
            frame = bytearray(_FRAME)
            if parts is None:
                gloo.scatter([_tensor(frame)], [], options).wait()
                body = _body(frame)
                if len(body) > _SHORT:
                    gloo.recv([_tensor(body)], src, 0).wait(timeout)
                return bytes(body)
            gloo.scatter([_tensor(frame)], [[_tensor(_frame(part)) for part in parts]], options).wait()
            long = [(i, part) for i, part in enumerate(parts) if i != src and len(part) > _SHORT]
            for work in [gloo.send([_tensor(bytearray(part))], i, 0) for i, part in long]:
                work.wait(timeout)
            return parts[src]

    # -------------------------------------------------------------- failure

    @contextmanager
    def _operation(self, what: str, timeout: timedelta) -> Iterator[_Gloo]:
        if self._gloo is None:
            raise CommError(f"{what} among ranks {list(self.ranks)} is not possible: {self.broken}")
        with self._explained(what, timeout):
            yield self._gloo

    @contextmanager
    def _explained(self, what: str, timeout: timedelta) -> Iterator[None]:
        """Turn errors of gloo and of the store into one that says what happened to the other ranks."""
        try:
            with Waiting(what, self.ranks):
                yield
            self._done += 1
        except RuntimeError as error:
            self._break(f"{what} failed before")
            saw = "timeout" if timed_out(error) else "lost"
            short = next((text for text in _SHORTAGES if text in str(error)), None)
            verdict = self._find_out(what, saw if short is None else f"failed {short}", timeout)
            raised = (CommTimeout if verdict.timed_out else CommError)(verdict.text)
            raised.missing = verdict.missing
            raised.reports = verdict.reports
            raise raised from error
        except BaseException as interrupt:
            self.abandon(type(interrupt).__name__)
            raise

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
        self._gloo = None  # closes the connections, so that ranks that still wait notice
        try:
            # The number of the first rank that breaks the link counts.
            self._links.compare_set(f"broken/{self._generation}", "", str(self._done + 1))
        except RuntimeError:
            pass  # without the store there will not be a new link either

    def _find_out(self, what: str, saw: str, timeout: timedelta) -> _Verdict:
        """The reason of the failure; the same on all ranks, as long as the store can be reached.

        `saw` is what happened here: "timeout", "lost", or "failed" and why, if the cause is on this rank.
        """

        def are_dead(silent: Collection[int]) -> bool:  # then none of them can report any more
            return all(self._condition(each) is Condition.DEAD for each in silent)

        def conclude(seen: dict[int, str]) -> bytes:
            return msgspec.json.encode(self._verdict(what, seen, self._silent(seen), timeout))

        try:
            if self._store.check(["verdict"]):
                return _decode(self._store.get("verdict"))
            write_report(self._reports, self.index, saw)
            for edition in count():
                piece = read_edition(
                    self._reports, edition, self.index, len(self.ranks), _REPORTS_SECONDS, conclude, are_dead
                )
                if piece:
                    # The first rank that writes a verdict decides for all.
                    return _decode(self._store.compare_set("verdict", "", piece.decode()))
        except RuntimeError:
            pass  # the store is gone
        seen = {self.index: saw}
        deadline = time.monotonic() + _REPORTS_SECONDS
        while Condition.DEAD not in (silent := self._silent(seen)).values() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._verdict(what, seen, silent, timeout, store_lost=True)

    def _silent(self, seen: Mapping[int, str]) -> dict[int, Condition]:
        """The conditions of the ranks that have not reported."""
        return {i: self._condition(i) for i in range(len(self.ranks)) if i not in seen}

    def _condition(self, i: int) -> Condition:
        if not self._identities[i]:
            with suppress(RuntimeError):  # the store is gone
                if self._processes.check([str(i)]):
                    self._identities[i] = self._processes.get(str(i)).decode(errors="replace")
        return condition_of(self._identities[i])

    def _verdict(
        self,
        what: str,
        seen: Mapping[int, str],
        conditions: Mapping[int, Condition],
        timeout: timedelta,
        *,
        store_lost: bool = False,
    ) -> _Verdict:
        reports = {self.ranks[i]: saw.removeprefix("failed ") for i, saw in seen.items() if saw.startswith("failed ")}
        by_condition = {kind: [self.ranks[i] for i, found in conditions.items() if found is kind] for kind in Condition}
        dead, stopped = by_condition[Condition.DEAD], by_condition[Condition.STOPPED]
        late, unknown = by_condition[Condition.RUNNING], by_condition[Condition.UNKNOWN]
        told = [f"rank {rank} gave up ({why})" for rank, why in reports.items()]
        if dead:
            told.append(f"{_named(dead)} died")
        if stopped:
            told.append(f"{_named(stopped)} stopped (SIGSTOP)")
        if not told:
            if late:
                told.append(f"no answer from {_named(late)}: still running; they hang or have not reached this call")
            if unknown:
                told.append(f"no answer from {_named(unknown)}: they died, hang, or have not reached this call")
        if not told:
            told.append("a connection broke, or some ranks called this only after others had given up")
        if store_lost:
            told.append("the process that hosts the group's store, usually that of rank 0, cannot be reached")
        missing = tuple(sorted(dead + stopped)) or (() if reports else tuple(sorted(late + unknown)))
        for rank in missing:
            reports[rank] = "died" if rank in dead else "stopped" if rank in stopped else "did not answer in time"
        text = (
            f"{what} among ranks {list(self.ranks)} failed: {'; '.join(told)}; "
            f"the time limit is {timeout.total_seconds():g} s"
        )
        return _Verdict(text, "timeout" in seen.values(), missing, reports)


def _decode(verdict: bytes) -> _Verdict:
    return msgspec.json.decode(verdict, type=_Verdict)


def _named(ranks: Sequence[int]) -> str:
    return f"ranks {sorted(ranks)}"


@contextmanager
def _store_needed(ranks: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommError(
            f"cannot connect ranks {list(ranks)}: the process group's store does not answer ({error}); the process "
            "that hosts it, usually that of rank 0 or of the launcher, may have died"
        ) from error


def _frame(data: bytes) -> bytearray:
    return bytearray(len(data).to_bytes(_HEAD, "little") + data[:_SHORT].ljust(_SHORT, b"\0"))


def _body(frame: bytearray) -> bytearray:
    """The message, if the frame holds all of it, else a buffer for it."""
    length = int.from_bytes(frame[:_HEAD], "little")
    return frame[_HEAD : _HEAD + length] if length <= _SHORT else bytearray(length)


def _tensor(buffer: bytearray) -> Tensor:
    """A tensor that shares the buffer's memory."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8, device="cpu")


def _all_to_all(gloo: _Gloo, pieces: Sequence[bytearray], sizes: Sequence[int], timeout: timedelta) -> list[bytearray]:
    """Send a piece to each rank; `sizes` are the bytes to receive from each."""
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
