"""Who wants to know about communication: counters, debug modes and policies.

Every collective of `terrazzo.comm` tells the observers what it is about to do, before it does it, so that an observer
may refuse by raising.  Observers are process-wide, because backward runs on threads of its own.  With no observer the
cost is one look at an empty tuple.

What `CommEvent.bytes` counts is what the best algorithm makes a rank send, on average over the ranks of the axis
(N ranks, T the bytes of the whole tensor), so that every rank sees the same number even where parts are uneven:

    all_gather, reduce_scatter, broadcast             (N - 1) / N * T
    all_reduce                                        2 * (N - 1) / N * T
    all_to_all                                        (T - what stays where it is) / N
    exchange, scatter                                 what this rank sends to others; other ranks may see another number

An axis of one rank communicates nothing and reports nothing.

Whoever judges an event may want to know why it happens.  In backward the answer lies with the forward, so the nodes of
`differentiable` keep what `origin.describe` says when they are made, as `node.origin`.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from terrazzo._torch.autograd import current_node
from terrazzo.comm.axis import Axis


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
    """Per thread: who can say why communication happens now; usually nobody asks."""

    describe: Callable[[], Any] | None = None


origin = Origin()

era = 0
"""Advances when `describe` changes, so that nodes which operations share are not shared between origins."""


def origin_of_node() -> Any:
    """What a node that is made now keeps about its origin."""
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
        remaining = list(observers)
        remaining.remove(observer)
        observers = tuple(remaining)


def report(kind: str, axis: Axis, nbytes: int, op: str | None, async_op: bool) -> None:
    """Tell the observers; called by the collectives only when there are any."""
    event = CommEvent(kind, axis, nbytes, op, async_op, current_node() is not None)
    for observer in observers:
        observer(event)
