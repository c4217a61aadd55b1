"""What a started collective returns: a result that is not there yet."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from terrazzo._meant import by_text
from terrazzo.comm import observe, wire
from terrazzo.comm.axis import Axis
from terrazzo.comm.waits import Waiting, lost
from terrazzo.errors import CommError, CommTimeout

Result = TypeVar("Result")

_UNTIL_KNOWN = 0.5  # seconds until it is known that a rank has ended, after its connections were closed


class Work(Protocol):
    """What a process group returns for an asynchronous operation, or several of these as one."""

    def wait(self) -> Any:
        """Wait until it is done."""


class Pending(Generic[Result]):
    """A collective under way; `wait` gives its result, the same one each time.

    Where the result takes a second round of communication, `wait` starts that round; so all ranks must wait for their
    pending collectives in the same order.
    """

    __slots__ = ("_finish", "_result", "_work", "axis", "kind")

    def __init__(
        self,
        kind: str,
        axis: Axis,
        work: Work | None,
        result: Result,
        finish: Callable[[], Result] | None = None,
    ) -> None:
        """`result` is valid once `work` is done; `finish`, if given, makes the result then."""
        self.kind = kind
        self.axis = axis
        self._work = work
        self._result = result
        self._finish = finish
        if wire.sending.here:
            self.wait()  # what uses the result, on any stream, waits for this one

    def __repr__(self) -> str:
        how = "done" if self._work is None and self._finish is None else "under way"
        return f"<{self.kind} on {self.axis}, {how}>"

    def wait(self) -> Result:
        """The result, once the communication is done."""
        if self._work is None and self._finish is None:
            return self._result
        if self._work is not None:
            wait_for(self._work, self.kind, self.axis)
            self._work = None
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        if observe.end_observers:
            observe.report_end(self.kind, self.axis)
        return self._result


def timed_out(error: BaseException) -> bool:
    """Whether an error of a process group or a store means that a time limit was exceeded; only its text says so.

    >>> timed_out(RuntimeError("Timed out waiting 1000ms for recv operation to complete"))
    True
    """
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def wait_for(work: Work, kind: str, axis: Axis) -> None:
    """Wait, and on failure raise an error that says which collective failed on which rank."""
    try:
        with Waiting(kind, axis.ranks, f"on {axis.name}"):
            work.wait()
    except RuntimeError as error:
        late = timed_out(error)
        gone = by_text(lost(axis.ranks, 0.0 if late else _UNTIL_KNOWN).items())
        why = (
            f"{'; '.join(gone)}. All ranks must call the same collectives, equally often"
            if gone
            else "the usual causes are a rank that ended, ranks that call different collectives, a broken connection, "
            "and tensors of other sizes than the other ranks expect, for which gloo ends a process (from_local of "
            "uneven parts needs shape=)"
        )
        raise (CommTimeout if late else CommError)(
            f"{kind} on {axis} failed on rank {axis.ranks[axis.index]}: {why}; look for the first error among the "
            f"ranks. The backend says: {error}"
        ) from error
