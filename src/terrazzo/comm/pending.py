"""What a started collective returns: a result that is on its way."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from terrazzo.comm.axis import Axis
from terrazzo.errors import CommError, CommTimeout

Result = TypeVar("Result")


class Work(Protocol):
    """What a process group returns, or several of these in one."""

    def wait(self) -> Any:
        """Until it is done."""


class Pending(Generic[Result]):
    """A collective under way; `wait` gives its result, the same one each time.

    For a result that takes a second round of communication `wait` starts that round, so all ranks must wait for their
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
        """`result` as it will be when `work` is done, or what `finish` makes of it then."""
        self.kind = kind
        self.axis = axis
        self._work = work
        self._result = result
        self._finish = finish

    def wait(self) -> Result:
        """The result, as soon as it is there."""
        if self._work is not None:
            wait_for(self._work, self.kind, self.axis)
            self._work = None
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


def wait_for(work: Work, kind: str, axis: Axis) -> None:
    """Wait, and say on failure what failed where."""
    try:
        work.wait()
    except RuntimeError as error:
        timed_out = "timed out" in str(error).lower()
        raise (CommTimeout if timed_out else CommError)(
            f"{kind} on {axis} failed on rank {axis.ranks[axis.index]}: {error}. "
            "The usual causes are a rank that ended, one that left the common order of collectives, and a broken "
            "connection; look for the first error among the ranks."
        ) from error
