"""Observers of communication: counters, debug modes and policies.

Every collective of `terrazzo.comm` calls the observers just before it starts, so that an observer can prevent it by
raising. Observers are process-wide, because backward runs on its own threads. Without observers the cost is a check
of an empty tuple.

`CommEvent.bytes` is what a rank sends with the best algorithm, on average over the ranks of the axis (N ranks, T the
bytes of the whole tensor), so that every rank reports the same number even where parts are uneven:

    all_gather, reduce_scatter, broadcast             (N - 1) / N * T
    all_reduce                                        2 * (N - 1) / N * T
    all_to_all                                        (T - what stays on its rank) / N
    exchange, scatter                                 what this rank sends to others; it may differ between ranks

An axis of one rank communicates nothing and reports nothing.

An observer may want to know why a collective happens. In backward the reason lies in the forward, so each node of
`differentiable` keeps the result of `origin.describe` from when it was made, as `node.origin`.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from terrazzo._torch.autograd import current_node
from terrazzo.comm.axis import Axis

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One collective, as seen by this rank just before it starts."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, exchange, broadcast or scatter
    axis: Axis
    bytes: int
    op: str | None  # sum, avg, product, max or min, for the kinds that reduce
    async_op: bool
    in_backward: bool


class Origin(threading.local):
    """Per thread: a function that says why communication happens now, if one is set."""

    describe: Callable[[], Any] | None = None


origin = Origin()

era = 0
"""Incremented when `describe` changes: nodes that are shared between operations must have the same origin."""


def origin_of_node() -> Any:
    """The origin of a node that is made now."""
    describe = origin.describe
    return None if describe is None else describe()


Observer = Callable[[CommEvent], None]

# Read by every collective; replaced as a whole, never changed in place, so that reading it needs no lock.
observers: tuple[Observer, ...] = ()
_lock = threading.Lock()


def add_observer(observer: Observer) -> None:
    """Have `observer` called with each `CommEvent` of this process from now on.

    >>> seen = []
    >>> add_observer(seen.append)
    >>> remove_observer(seen.append)
    """
    global observers
    with _lock:
        observers = (*observers, observer)


def remove_observer(observer: Observer) -> None:
    """Undo one `add_observer`; an observer that is not there is a `ValueError`."""
    global observers
    with _lock:
        observers = _without(observers, observer)


# Called with the kind and the axis of each collective whose result was waited for.
end_observers: tuple[Callable[[str, Axis], None], ...] = ()


def add_end_observer(observer: Callable[[str, Axis], None]) -> None:
    """Call `observer` with the kind and the axis of each collective when its result has been waited for."""
    global end_observers
    with _lock:
        end_observers = (*end_observers, observer)


def remove_end_observer(observer: Callable[[str, Axis], None]) -> None:
    """Undo one `add_end_observer`."""
    global end_observers
    with _lock:
        end_observers = _without(end_observers, observer)


def _without(those: tuple[T, ...], one: T) -> tuple[T, ...]:
    """A tuple less the first element that is equal to `one`; a `ValueError` if there is none."""
    place = those.index(one)
    return those[:place] + those[place + 1 :]


def report_end(kind: str, axis: Axis) -> None:
    """Call the end observers; only called if there are any."""
    for observer in end_observers:
        observer(kind, axis)


def report(kind: str, axis: Axis, nbytes: int, op: str | None, async_op: bool) -> None:
    """Call the observers; the collectives call this only when there are any."""
    event = CommEvent(kind, axis, nbytes, op, async_op, current_node() is not None)
    for observer in observers:
        observer(event)
