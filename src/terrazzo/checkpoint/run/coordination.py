"""Steps that all ranks take together: each returns its result on all ranks, or raises all ranks' errors on all ranks.

Ranks exchange typed bytes over the control plane, whose time limit is the caller's, or that of the process group. All
messages go through the coordinator, so that their number is proportional to the number of ranks. If a step raises on
some rank, it fails on all ranks with one `CheckpointException` that names each rank that failed, and why. No rank waits
for one that has failed; ranks that died, stopped or are late are named, too.

A rank that is interrupted (`KeyboardInterrupt`, `SystemExit`) raises that, after it has sent a failure to the others.

A failure is sent as text: the type's name, the message and the traceback. On the rank itself, the original exception is
the `__cause__` of the one that all ranks raise.
"""

from __future__ import annotations

import builtins
import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, NoReturn, TypeVar

import msgspec
import torch.distributed as dist

from terrazzo import errors
from terrazzo._meant import by_text, plain_text, refused
from terrazzo.comm.control import ControlPlane
from terrazzo.comm.waits import Doing
from terrazzo.errors import CheckpointError, CheckpointException, CheckpointIOError, CommError, TerrazzoError

_Result = TypeVar("_Result")

_LONGEST: Final = 4000  # characters of a message
_DEEPEST: Final = 20  # frames, the innermost
_MOST_NAMES: Final = 50
# Attributes of our exceptions that are sent, too.
_NAMES: Final = ("missing", "mismatched")


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An exception of one rank, as data."""

    rank: int  # global
    kind: str  # the name of the exception's class
    message: str
    frames: list[tuple[str, int, str, str]] = []  # file, line, function, text of the line
    names: dict[str, list[str]] = {}

    @property
    def kind_raised(self) -> str:
        """The name of the class that the error of all ranks has by this failure."""
        like = self.exception()
        of_system = isinstance(like, OSError | EOFError) and not isinstance(like, TerrazzoError)
        return CheckpointIOError.__name__ if of_system else self.kind

    def exception(self) -> BaseException:
        """An exception like the one that was raised: of the same type, if it is ours or a builtin one."""
        known = getattr(errors, self.kind, None) or getattr(builtins, self.kind, None)
        if isinstance(known, type) and issubclass(known, BaseException):
            try:
                return known(self.message)
            except TypeError:
                pass  # its constructor needs more than a message
        return CheckpointError(f"{self.kind}: {self.message}")


def failure_of(error: BaseException, rank: int) -> Failure:
    """An exception of this rank, for the other ranks."""
    message = plain_text(str(error) or repr(error)) + refused(error)
    if len(message) > _LONGEST:
        message = message[:_LONGEST] + " ..."
    frames = traceback.extract_tb(error.__traceback__)[-_DEEPEST:]
    names = {
        name: [*map(plain_text, value[:_MOST_NAMES])]
        for name in _NAMES
        if isinstance(value := getattr(error, name, None), tuple) and all(isinstance(item, str) for item in value)
    }
    kind = type(error).__name__
    if isinstance(error, CheckpointException):  # of a save or load inside this step: the type of its failures
        kind = getattr(error, "_told", ("",))[0] or "CheckpointException"
    return Failure(rank, kind, message, [(f.filename, f.lineno or 0, f.name, f.line or "") for f in frames], names)


def failures_of(error: CommError, ranks: Iterable[int]) -> list[Failure]:
    """The failures of ranks that made a communication among `ranks` fail."""
    reports = {rank: error.reports.get(rank, "did not answer") for rank in (*error.missing, *error.reports)}
    if not reports:  # it is not known which rank failed first
        reports = dict.fromkeys(ranks, "lost its connections")
    return [Failure(rank, type(error).__name__, report) for rank, report in sorted(reports.items())]


def exception_of(
    failures: list[Failure], doing: str, cause: BaseException | None, why: str = ""
) -> CheckpointException:
    """The exception that all ranks raise, with this rank's own exception as its cause."""
    ranks = sorted({failure.rank for failure in failures})
    lines = by_text((failure.rank, f"{failure.kind}: {failure.message}") for failure in failures)
    count = f"{len(ranks)} rank" + ("s" if len(ranks) != 1 else "")
    text = "\n  ".join([f"{doing} failed on {count}:", *lines, *([why] if why else [])])
    kinds = {failure.kind_raised for failure in failures}
    return _made(kinds.pop() if len(kinds) == 1 else "", text, failures, cause)


def _made(kind: str, text: str, failures: list[Failure], cause: BaseException | None) -> CheckpointException:
    told = {
        failure.rank: (failure.exception(), traceback.StackSummary.from_list(failure.frames)) for failure in failures
    }
    theirs = sys.modules.get("torch.distributed.checkpoint.api")
    error = _class_of(kind, getattr(theirs, "CheckpointException", None))(text, told)
    for name in _NAMES:
        names = dict.fromkeys(item for failure in failures for item in failure.names.get(name, ()))
        names |= dict.fromkeys(getattr(cause, name, ()))  # this rank has all of its own names, not only the first ones
        if names:
            setattr(error, name, tuple(names))
    if isinstance(error, CommError):
        error.missing = tuple(failure.rank for failure in failures)
        error.reports = {failure.rank: failure.message for failure in failures}
    error.__cause__ = cause
    error._told = (kind, text, failures)  # type: ignore[attr-defined]  # for `_reduced`
    return error


@functools.cache
def _class_of(kind: str, theirs: Any) -> type[CheckpointException]:
    """A `CheckpointException` that is also a subclass of the failures' common type and of PyTorch's exception."""
    known = getattr(errors, kind, None)
    more = []
    if isinstance(known, type) and issubclass(known, TerrazzoError) and not issubclass(CheckpointException, known):
        more.append(known)
    if theirs is not None and not issubclass(CheckpointException, theirs):  # after install(), theirs is ours
        more.append(theirs)
    body = {
        "__module__": CheckpointException.__module__,
        "__reduce__": _reduced,
        "__doc__": CheckpointException.__doc__,
    }
    return type("CheckpointException", (CheckpointException, *more), body)


def _reduced(error: Any) -> tuple[Any, ...]:
    return _made, (*error._told, None)


class _StepResult(msgspec.Struct, array_like=True, frozen=True):
    data: bytes
    failures: list[Failure]
    discard: bool = True  # whether the checkpoint is certainly not committed, so that its files can be removed
    doing: str = ""  # the coordinator's, if there are failures: ranks may have different names for the place


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_StepResult).decode


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks that save or load together, as this process sees them: which of them it is, and the steps of all.

    `doing` is what they do, for messages.
    """

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
        step: Callable[[], bytes | None],
        combine: Callable[[list[bytes]], bytes | None],
        discard_if_combine_fails: Callable[[], bool] = lambda: True,
    ) -> bytes:
        """Call `step` on every rank, then `combine` on the coordinator with all results; every rank gets its result.

        None is no bytes.
        """
        with self._here:
            own, error = self._run(step)
            with self._heard(error):
                answers, error = self._combined(
                    own, error, lambda parts: [combine(parts) or b""], discard_if_combine_fails
                )
                if self.plane is None:
                    return self._received(answers[0], error)
                data = self.plane.broadcast(_encode(answers[0]) if self.is_coordinator else None, 0)
            return self._received(_decode(data), error)

    def reduce_scatter(self, step: Callable[[], bytes], combine: Callable[[list[bytes]], list[bytes]]) -> bytes:
        """Call `step` on every rank, then `combine` on the coordinator with all results; each rank gets its part."""
        with self._here:
            own, error = self._run(step)
            with self._heard(error):
                answers, error = self._combined(own, error, combine, lambda: True)
                if self.plane is None:
                    return self._received(answers[0], error)
                parts = [_encode(answer) for answer in answers] if self.is_coordinator else None
                data = self.plane.scatter(parts, 0)
            return self._received(_decode(data), error)

    def together(self, step: Callable[[], _Result]) -> _Result:
        """Call `step` on every rank; returns its result on this rank, when all are done."""
        results: list[_Result] = []

        def run() -> None:
            results.append(step())

        self.reduce(run, lambda parts: None)
        return results[0]

    def first(self, work: Callable[[], bytes | None]) -> bytes:
        """Call `work` on the coordinator when all ranks are here; every rank gets its result."""
        return self.reduce(lambda: None, lambda _: work())

    def all_true(self, yes: bool) -> bool:
        """Whether `yes` is true on all ranks."""
        return self.reduce(lambda: b"yes" if yes else b"", lambda said: b"yes" if all(said) else b"") == b"yes"

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Send errors that are raised inside, between the steps, to the other ranks, which would wait for this one."""
        try:
            yield
        except BaseException as error:
            if hasattr(error, "_discard"):  # of a step: all ranks raise it
                raise
            if self.plane is not None:
                self.plane.abandon(plain_text(f"{type(error).__name__}: {error}"))
            if not isinstance(error, Exception):
                raise
            self._fail([failure_of(error, self.global_rank)], error, discard=False)

    # -------------------------------------------------------------- one step

    @property
    def _here(self) -> Doing:
        return Doing("a save or load", self.ranks, self.doing)

    def _run(self, step: Callable[[], bytes | None]) -> tuple[_StepResult, BaseException | None]:
        """A step's result on this rank, or its failure; also of interrupts, because other ranks wait for this one."""
        try:
            return _StepResult(step() or b"", []), None
        except BaseException as error:  # noqa: B036  # `_received` raises it again
            return _StepResult(b"", [failure_of(error, self.global_rank)]), error

    def _combined(
        self,
        own: _StepResult,
        error: BaseException | None,
        combine: Callable[[list[bytes]], list[bytes]],
        discard_if_combine_fails: Callable[[], bool],
    ) -> tuple[list[_StepResult], BaseException | None]:
        """On the coordinator a message for each rank (or one for all), on the others none; and this rank's error."""
        messages = [own]
        if self.plane is not None:
            gathered = self.plane.gather(_encode(own), 0)
            if gathered is None:
                return [], error
            messages = [_decode(data) for data in gathered]
        failures = [failure for message in messages for failure in message.failures]
        if failures:
            return [_StepResult(b"", failures, doing=plain_text(self.doing))] * len(self.ranks), error
        try:
            return [_StepResult(answer, []) for answer in combine([message.data for message in messages])], None
        except BaseException as caught:  # noqa: B036  # `_received` raises it again
            failures = [failure_of(caught, self.global_rank)]
            return [_StepResult(b"", failures, discard_if_combine_fails(), plain_text(self.doing))] * len(
                self.ranks
            ), caught

    def _received(self, message: _StepResult, error: BaseException | None) -> bytes:
        if error is not None and not isinstance(error, Exception):
            raise error
        if message.failures:
            why = "" if message.discard else "The checkpoint may have been committed all the same, so its files stay"
            self._fail(message.failures, error, message.discard, why, message.doing)
        return message.data

    @contextmanager
    def _heard(self, own: BaseException | None) -> Iterator[None]:
        """Turn errors of the communication into failures of the ranks that caused them."""
        try:
            yield
        except CommError as error:
            if hasattr(error, "_discard"):  # of a step that raised one
                raise
            if own is not None and not isinstance(own, Exception):
                raise own from error
            failures = failures_of(error, self.ranks)
            if own is not None and all(failure.rank != self.global_rank for failure in failures):
                failures.append(failure_of(own, self.global_rank))
            self._fail(failures, error, discard=False, why=str(error))

    def _fail(
        self, failures: list[Failure], cause: BaseException | None, discard: bool, why: str = "", doing: str = ""
    ) -> NoReturn:
        error: Any = exception_of(failures, doing or self.doing, cause, why)
        error._discard = discard  # whether written files can be removed: the checkpoint is certainly not committed
        raise error


def find_team(
    process_group: Any = None,
    *,
    doing: str = "a checkpoint",
    no_dist: bool = False,
    alone: bool = False,
    timeout: timedelta | None = None,
) -> Team:
    """The team of the ranks of a process group: the given one, or the default one. Without any, this process alone.

    With `alone` the team will not communicate. Otherwise the first call for a group is collective, and so is the first
    call after connections broke. Raises a `CheckpointException`.
    """
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return Team(0, (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,), None, doing)
    group = process_group if process_group is not None else dist.group.WORLD
    rank = group.rank() if isinstance(group, dist.ProcessGroup) else -1  # one of several jobs has ranks of its own
    if rank < 0:
        raise CheckpointError(
            f"rank {dist.get_rank()} is not in the process group: call save or load on the ranks of the group only"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    team = Team(rank, ranks, None, doing)
    if len(ranks) == 1 or alone:
        return team
    return with_plane(team, lambda: ControlPlane.for_group(group, timeout).renewed())


def with_plane(team: Team, connect: Callable[[], ControlPlane]) -> Team:
    """The team with the control plane from `connect`. If that raises, this raises as a failed step does."""
    with team._here, team._heard(None):
        connected = replace(team, plane=connect())
    return connected
