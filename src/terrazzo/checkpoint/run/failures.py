"""A rank's failure, as it is sent to the others, and the exception that all ranks raise for it.

The other ranks get text: the type's name, the message and the traceback. On the rank itself, the original exception is
the `__cause__` of the one that all ranks raise.
"""

from __future__ import annotations

import builtins
import functools
import sys
import traceback
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from terrazzo import errors
from terrazzo.errors import CheckpointError, CheckpointException, CommError, TerrazzoError

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
    message = str(error) or repr(error)
    if len(message) > _LONGEST:
        message = message[:_LONGEST] + " ..."
    frames = traceback.extract_tb(error.__traceback__)[-_DEEPEST:]
    names = {
        name: list(value)[:_MOST_NAMES]
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
    lines = [f"rank {failure.rank}: {failure.kind}: {failure.message}" for failure in failures]
    count = f"{len(ranks)} rank" + ("s" if len(ranks) != 1 else "")
    text = "\n  ".join([f"{doing} failed on {count}:", *lines, *([why] if why else [])])
    kinds = {failure.kind for failure in failures}
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
