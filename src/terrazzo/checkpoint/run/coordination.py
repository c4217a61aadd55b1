"""Ranks doing one thing together: each step's result, or every rank's error on every rank.

Everything travels as typed bytes on the control plane, which has a time limit: that of the process group, unless the
caller says otherwise.  All that ranks tell each other goes through the coordinator, so that the messages are as many as
the ranks.  A step that fails on some rank, whatever was raised there, fails on all of them with one
`CheckpointException` that names each rank that failed and why; nobody waits for a rank that has given up, and a rank
that died, stopped or is late is named too.

A rank that was interrupted (`KeyboardInterrupt`, `SystemExit`) raises that itself, after the others were told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import msgspec
import torch.distributed as dist

from terrazzo.checkpoint.run.failures import Failure, exception_of, failure_of, failures_of
from terrazzo.comm.control import ControlPlane
from terrazzo.errors import CheckpointError, CommError


class _Message(msgspec.Struct, array_like=True, frozen=True):
    data: bytes
    failures: list[Failure]
    discard: bool = True  # whether what has been written is certainly of no use


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode


class StepFailed(Exception):
    """A step failed on some rank; `error` is what to raise, `discard` whether to remove what has been written."""

    def __init__(self, error: BaseException, discard: bool) -> None:
        self.error = error
        self.discard = discard


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among those that save or load together, and what they are doing."""

    rank: int
    ranks: tuple[int, ...]  # the global ranks
    plane: ControlPlane | None  # None exactly if there is one rank
    doing: str = "a checkpoint"

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    def reduce(
        self,
        step: Callable[[], bytes],
        combine: Callable[[list[bytes]], bytes],
        discard_if_combine_fails: Callable[[], bool] = lambda: True,
    ) -> bytes:
        """Run `step` on every rank, `combine` on the coordinator with all results; every rank gets its result."""
        own, error = self._run(step)
        with self._heard(error):
            answers, error = self._combined(own, error, lambda parts: [combine(parts)], discard_if_combine_fails)
            if self.plane is None:
                return self._received(answers[0], error)
            data = self.plane.broadcast(_encode(answers[0]) if self.is_coordinator else None, 0)
        return self._received(_decode(data), error)

    def reduce_scatter(self, step: Callable[[], bytes], combine: Callable[[list[bytes]], list[bytes]]) -> bytes:
        """Run `step` on every rank, `combine` on the coordinator with all results; each rank gets its part."""
        own, error = self._run(step)
        with self._heard(error):
            answers, error = self._combined(own, error, combine, lambda: True)
            if self.plane is None:
                return self._received(answers[0], error)
            parts = [_encode(answer) for answer in answers] if self.is_coordinator else None
            data = self.plane.scatter(parts, 0)
        return self._received(_decode(data), error)

    def together(self, step: Callable[[], object]) -> None:
        """Run `step` on every rank, and return when all are done."""

        def run() -> bytes:
            step()
            return b""

        self.reduce(run, lambda parts: b"")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What goes wrong inside, between the steps, is told to the others, who would wait for this rank."""
        try:
            yield
        except StepFailed:
            raise
        except BaseException as error:
            if self.plane is not None:
                self.plane.abandon(f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
            self._fail([failure_of(error, self.global_rank)], error, discard=False)

    # -------------------------------------------------------------- one step

    def _run(self, step: Callable[[], bytes]) -> tuple[_Message, BaseException | None]:
        """What a step gave on this rank; or that it failed, with interrupts, since the others wait for this rank."""
        try:
            return _Message(step(), []), None
        except BaseException as error:  # noqa: B036  # `_received` raises it again
            return _Message(b"", [failure_of(error, self.global_rank)]), error

    def _combined(
        self,
        own: _Message,
        error: BaseException | None,
        combine: Callable[[list[bytes]], list[bytes]],
        discard_if_combine_fails: Callable[[], bool],
    ) -> tuple[list[_Message], BaseException | None]:
        """On the coordinator: a message for each rank (or one for all); on the others none.  And this rank's error."""
        messages = [own]
        if self.plane is not None:
            gathered = self.plane.gather(_encode(own), 0)
            if gathered is None:
                return [], error
            messages = [_decode(data) for data in gathered]
        failures = [failure for message in messages for failure in message.failures]
        if failures:
            return [_Message(b"", failures)] * len(self.ranks), error
        try:
            return [_Message(answer, []) for answer in combine([message.data for message in messages])], None
        except BaseException as caught:  # noqa: B036  # `_received` raises it again
            failures = [failure_of(caught, self.global_rank)]
            return [_Message(b"", failures, discard_if_combine_fails())] * len(self.ranks), caught

    def _received(self, message: _Message, error: BaseException | None) -> bytes:
        if error is not None and not isinstance(error, Exception):
            raise error
        if message.failures:
            self._fail(message.failures, error, message.discard)
        return message.data

    @contextmanager
    def _heard(self, own: BaseException | None) -> Iterator[None]:
        """Errors of the communication itself, as failures of the ranks that are to blame."""
        try:
            yield
        except CommError as error:
            if own is not None and not isinstance(own, Exception):
                raise own from error
            failures = failures_of(error, self.ranks)
            if own is not None and all(failure.rank != self.global_rank for failure in failures):
                failures.append(failure_of(own, self.global_rank))
            self._fail(failures, error, discard=False, why=str(error))

    def _fail(self, failures: list[Failure], cause: BaseException | None, discard: bool, why: str = "") -> NoReturn:
        raise StepFailed(exception_of(failures, self.doing, cause, why), discard)


def find_place(
    process_group: Any = None,
    *,
    doing: str = "a checkpoint",
    no_dist: bool = False,
    alone: bool = False,
    timeout: timedelta | None = None,
) -> Place:
    """This process's place in a process group (the default one, or none at all).

    With `alone` it will not talk to the others, and this call does not either.  Otherwise the first call for a group
    is collective, and so is the first after connections broke.  Raises the `CheckpointException` for what went wrong.
    """
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return Place(0, (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,), None, doing)
    group = process_group if process_group is not None else dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise CheckpointError(f"rank {dist.get_rank()} is not in the process group it was told to save or load with")
    ranks = tuple(dist.get_process_group_ranks(group))
    place = Place(rank, ranks, None, doing)
    if len(ranks) == 1 or alone:
        return place
    return with_plane(place, lambda: ControlPlane.for_group(group, timeout).renewed())


def with_plane(place: Place, connect: Callable[[], ControlPlane]) -> Place:
    """The place with the plane that `connect` makes; its failure is told as any other."""
    try:
        with place._heard(None):
            return replace(place, plane=connect())
    except StepFailed as failed:
        raise failed.error from failed.error.__cause__
