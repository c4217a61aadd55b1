"""Ranks doing one thing together: each step's result, or every rank's error on every rank.

Everything travels as bytes on the control plane, which has a time limit.  A step that fails on some rank fails
on all of them with one exception that names each rank that failed and why; nobody waits for a rank that has
given up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import msgspec
import torch.distributed as dist

from terrazzo import errors
from terrazzo.comm.control import DEFAULT_TIMEOUT, ControlPlane
from terrazzo.errors import CheckpointError


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """A rank's error, as it is told to the others."""

    rank: int
    kind: str
    message: str


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
    """Where this process stands among those that save or load together."""

    rank: int
    ranks: tuple[int, ...]  # the global ranks
    plane: ControlPlane | None  # None exactly if there is one rank

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def all_gather(self, step: Callable[[], bytes]) -> list[bytes]:
        """What the step gave on each rank."""
        own, error = _run(self.rank, step)
        if self.plane is None:
            messages = [own]
        else:
            messages = [_decode(data) for data in self.plane.all_gather(_encode(own))]
        failures = [failure for message in messages for failure in message.failures]
        if failures:
            _fail(failures, error, discard=True)
        return [message.data for message in messages]

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's data."""
        return [data] if self.plane is None else self.plane.all_gather(data)

    def reduce(
        self,
        step: Callable[[], bytes],
        combine: Callable[[list[bytes]], bytes],
        discard_if_combine_fails: Callable[[], bool] = lambda: True,
    ) -> bytes:
        """Run `step` on every rank, `combine` on the coordinator with all results; every rank gets its result."""
        answers = self._through_coordinator(step, lambda parts: [combine(parts)], discard_if_combine_fails)
        if self.plane is None:
            return answers[0].data
        outcome = self.plane.broadcast(_encode(answers[0]) if self.is_coordinator else None, 0)
        return _received(_decode(outcome))

    def reduce_scatter(self, step: Callable[[], bytes], combine: Callable[[list[bytes]], list[bytes]]) -> bytes:
        """Run `step` on every rank, `combine` on the coordinator with all results; each rank gets its part."""
        answers = self._through_coordinator(step, combine, lambda: True)
        if self.plane is None:
            return answers[0].data
        parts = [_encode(answer) for answer in answers] if self.is_coordinator else None
        return _received(_decode(self.plane.scatter(parts, 0)))

    def _through_coordinator(
        self,
        step: Callable[[], bytes],
        combine: Callable[[list[bytes]], list[bytes]],
        discard_if_combine_fails: Callable[[], bool],
    ) -> list[_Message]:
        """On the coordinator: a message for each rank (or one for all); on the others nothing."""
        own, error = _run(self.rank, step)
        if self.plane is None:
            messages = [own]
        else:
            gathered = self.plane.gather(_encode(own), 0)
            if not self.is_coordinator:
                return []
            messages = [_decode(data) for data in gathered or []]
        failures = [failure for message in messages for failure in message.failures]
        discard = True
        answers: list[bytes] = []
        if not failures:
            try:
                answers = combine([message.data for message in messages])
            except Exception as caught:
                error = caught
                failures = [_failure(self.rank, caught)]
                discard = discard_if_combine_fails()
        if failures:
            if self.plane is None:
                _fail(failures, error, discard)
            return [_Message(b"", failures, discard)] * len(self.ranks)
        return [_Message(answer, []) for answer in answers]


def _run(rank: int, step: Callable[[], bytes]) -> tuple[_Message, BaseException | None]:
    try:
        return _Message(step(), []), None
    except Exception as error:
        return _Message(b"", [_failure(rank, error)]), error


def _failure(rank: int, error: BaseException) -> Failure:
    return Failure(rank, type(error).__name__, str(error) or repr(error))


def _received(message: _Message) -> bytes:
    if message.failures:
        _fail(message.failures, None, message.discard)
    return message.data


def _fail(failures: list[Failure], cause: BaseException | None, discard: bool) -> NoReturn:
    """Raise the error that all ranks raise: of the failures' own type where they agree on one of ours."""
    kinds = {failure.kind for failure in failures}
    known = getattr(errors, next(iter(kinds)), None) if len(kinds) == 1 else None
    kind = known if isinstance(known, type) and issubclass(known, CheckpointError) else CheckpointError
    messages = {failure.message for failure in failures}
    if len(messages) == 1 and kind is not CheckpointError:
        text = f"rank {', '.join(str(failure.rank) for failure in failures)}: {messages.pop()}"
    else:
        text = "\n  ".join(f"rank {failure.rank}: {failure.kind}: {failure.message}" for failure in failures)
        text = f"failed on {len(failures)} rank{'s' if len(failures) > 1 else ''}:\n  {text}"
    error = kind(text)
    error.failures = tuple((failure.rank, failure.kind, failure.message) for failure in failures)
    error.__cause__ = cause
    raise StepFailed(error, discard)


def find_place(
    process_group: Any = None,
    *,
    no_dist: bool = False,
    alone: bool = False,
    timeout: timedelta | None = None,
) -> Place:
    """This process's place in a process group (the default one, or none at all).

    With `alone` it will not talk to the others, and this call does not either.  Otherwise the first call for a group
    is collective.
    """
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return Place(0, (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,), None)
    group = process_group if process_group is not None else dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(group))
    rank = dist.get_rank(group)
    if rank < 0:
        raise CheckpointError(f"rank {dist.get_rank()} is not in the process group it was told to save or load with")
    if len(ranks) == 1 or alone:
        return Place(rank, ranks, None)
    limit = timeout or DEFAULT_TIMEOUT
    return Place(rank, ranks, ControlPlane.for_group(group, limit))
