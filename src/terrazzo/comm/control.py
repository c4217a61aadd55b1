"""The control plane: bytes that ranks exchange besides tensors, each operation within a time limit.

It is there for common decisions. `agree` turns an error on one rank into an error on all, so that no rank goes on
alone and none waits for one that gave up; `run_together` runs a function on every rank and then agrees.

A plane has its own connections, so it never interferes with collectives that are running. A background thread uses its
own plane (`ControlPlane.create`). As with collectives, all ranks call its operations in the same order. Without a
process group it has one rank.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Self, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import ProcessGroup

from terrazzo._meant import refused
from terrazzo._torch.groups import device_types, time_limit
from terrazzo.comm.link import Link
from terrazzo.comm.memory_group import MemoryLink, is_in_process
from terrazzo.comm.simulated import Echo, is_simulated
from terrazzo.comm.waits import Doing
from terrazzo.errors import CommError, RankError, RankFailure
from terrazzo.layout.drawing import ShownAsCall

Result = TypeVar("Result")
AnyLink = Link | Echo | MemoryLink

DEFAULT_TIMEOUT = timedelta(minutes=30)  # without a process group
_LONGEST_MESSAGE = 4000  # characters of an error message that are sent to other ranks


class ControlPlane(ShownAsCall):
    """Exchanges bytes between the ranks of a process group.

    >>> plane = ControlPlane.for_group()  # of one rank, where torch.distributed is not initialised
    >>> plane.all_gather(b"state")
    [b'state']
    >>> plane.run_together(lambda: 42)
    42
    """

    def __init__(self, link: AnyLink | None, ranks: Sequence[int], index: int, timeout: timedelta) -> None:
        """Use `for_group` or `create`."""
        self._link = link
        self.ranks = tuple(ranks)  # global ranks by position
        self.index = index  # the position of this rank
        self.timeout = timeout  # for each operation

    @property
    def size(self) -> int:
        return len(self.ranks)

    @classmethod
    def for_group(cls, group: ProcessGroup | None = None, timeout: timedelta | None = None) -> Self:
        """The plane of a group (None: all ranks). Its connections are made once and shared by later calls.

        Without a `timeout`, that of the group is used.
        """
        return cls._of(group, timeout, _shared_link)

    @classmethod
    def create(cls, group: ProcessGroup | None = None, timeout: timedelta | None = None, name: str = "own") -> Self:
        """A plane with its own connections; close it after use.

        All ranks create their planes in the same order. Where threads make the order uncertain, give them names.
        """
        return cls._of(group, timeout, lambda group, ranks, timeout: _own_link(group, ranks, name, timeout))

    @classmethod
    def _of(
        cls,
        group: ProcessGroup | None,
        timeout: timedelta | None,
        link_of: Callable[[ProcessGroup, Sequence[int], timedelta], AnyLink],
    ) -> Self:
        if group is None:
            if not (dist.is_available() and dist.is_initialized()):
                return cls(None, (0,), 0, timeout or DEFAULT_TIMEOUT)
            group = dist.group.WORLD
        if not isinstance(group, ProcessGroup):
            raise CommError(f"rank {dist.get_rank()} is not in the process group, so it has no control plane there")
        ranks = dist.get_process_group_ranks(group)
        timeout = timeout or time_limit_of(group)
        link = link_of(group, ranks, timeout) if len(ranks) > 1 else None
        return cls(link, ranks, group.rank(), timeout)

    def renewed(self, timeout: timedelta | None = None) -> Self:
        """The same plane with another time limit, and with new connections if they broke on any rank.

        Call this on all ranks before going on after a `CommError`: they then have the same connections again.
        """
        timeout = timeout or self.timeout
        link = self._link.living(timeout) if self._link is not None else None
        if link is not None and link is not self._link:
            _replace_shared(self._link, link)
        return type(self)(link, self.ranks, self.index, timeout)

    def speaking_of(self, ranks: Sequence[int]) -> Self:
        """The same plane, but errors name these ranks: for processes that work on behalf of others."""
        if isinstance(self._link, Link):
            self._link.ranks = tuple(ranks)
        return type(self)(self._link, ranks, self.index, self.timeout)

    def abandon(self, why: str) -> None:
        """Leave the work that ranks do together: the others, wherever they wait, raise an error that says why."""
        if self._link is not None:
            self._link.abandon(why)

    def close(self) -> None:
        """Close the connections. Only for a plane from `create`; those of `for_group` are shared."""
        if self._link is not None:
            self._link.close()

    # -------------------------------------------------------------- bytes

    def all_gather(self, data: bytes) -> list[bytes]:
        """The data of every rank, by position."""
        return [data] if self._link is None else self._link.all_gather(data, self.timeout)

    def broadcast(self, data: bytes | None, src: int = 0) -> bytes:
        """The data of the rank at position `src`, on every rank; the others pass None."""
        self._check_root("broadcast", src, data is not None)
        if self._link is None:
            return data or b""
        return self._link.broadcast(data, src, self.timeout)

    def gather(self, data: bytes, dst: int = 0) -> list[bytes] | None:
        """The data of every rank on position `dst`, None elsewhere. Only `dst` waits for others."""
        self._check_root("gather", dst, self.index == dst)
        return [data] if self._link is None else self._link.gather(data, dst, self.timeout)

    def scatter(self, parts: Sequence[bytes] | None, src: int = 0) -> bytes:
        """The part that position `src` has for this rank; `src` passes one part per rank, the others None."""
        self._check_root("scatter", src, parts is not None)
        if parts is not None and len(parts) != self.size:
            raise CommError(f"scatter takes one part per rank: {len(parts)} parts for {self.size} ranks")
        if self._link is None:
            return parts[0] if parts else b""
        return self._link.scatter(parts, src, self.timeout)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_gather(b"")

    def _check_root(self, what: str, root: int, acts_as_root: bool) -> None:
        if not 0 <= root < self.size:
            raise CommError(f"{what}: there is no position {root} among {self.size} ranks")
        if acts_as_root != (self.index == root):
            raise CommError(f"{what}: position {root} must pass the data, and the other ranks None")

    # -------------------------------------------------------------- agreement

    def agree(self, error: BaseException | None, what: str = "") -> None:
        """Return if no rank has an error; else raise the same `RankError` on every rank.

        On a rank with an error of its own that is the cause of the `RankError`. `what` says in the message what was
        being done.
        """
        report = b"" if error is None else msgspec.msgpack.encode(_failure_of(error, self.ranks[self.index]))
        replies = self.all_gather(report)
        failures = tuple(msgspec.msgpack.decode(reply, type=RankFailure) for reply in replies if reply)
        if failures:
            raise RankError(failures, what) from error

    def run_together(self, work: Callable[[], Result], what: str = "") -> Result:
        """Run `work` on every rank, and return its result if it succeeded on all of them; else raise as `agree` does.

        The time limit counts from when this rank's work is done: the slowest rank must be done within it.
        """
        with Doing(what or "running something together", self.ranks):
            try:
                result = work()
            except Exception as error:
                self.agree(error, what)
                raise  # agree raises whenever there is an error
            except BaseException as interrupt:  # raised unchanged here, and reported to the other ranks as an error
                try:
                    self.agree(interrupt, what)
                finally:
                    raise interrupt
            self.agree(None, what)
            return result


def _failure_of(error: BaseException, rank: int) -> RankFailure:
    message = f"{error}{refused(error)}"
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE] + " ..."
    return RankFailure(rank, type(error).__qualname__, message)


# ------------------------------------------------------------------ connections by process group

_lock = threading.Lock()
_shared: weakref.WeakKeyDictionary[ProcessGroup, AnyLink] = weakref.WeakKeyDictionary()
_made: weakref.WeakKeyDictionary[ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
# Links by name that this rank has begun to connect: one that failed is what the next attempt goes on from.
_begun: weakref.WeakKeyDictionary[ProcessGroup, dict[str, AnyLink]] = weakref.WeakKeyDictionary()


def time_limit_of(group: ProcessGroup) -> timedelta:
    """The time limit of the group's collectives."""
    return DEFAULT_TIMEOUT if is_simulated(group) else time_limit(group, device_types(group)[0])


def _replace_shared(old: AnyLink | None, new: AnyLink) -> None:
    with _lock:
        for group, link in _shared.items():
            if link is old:
                _shared[group] = new
                return


def _shared_link(group: ProcessGroup, ranks: Sequence[int], timeout: timedelta) -> AnyLink:
    with _lock:
        known = _shared.get(group)
        if known is None:
            known = _shared[group] = _new_link(group, ranks, "plane")
    link = known.connected(timeout)  # without the lock: connecting may take as long as the slowest rank
    if link is not known:
        _replace_shared(known, link)
    return link


def _new_link(group: ProcessGroup, ranks: Sequence[int], name: str) -> AnyLink:
    if is_simulated(group):
        return Echo(len(ranks), group.rank())
    if is_in_process(group):
        return MemoryLink(group, ranks, name)
    return Link(group.get_group_store(), group.rank(), ranks, name)


def _own_link(group: ProcessGroup, ranks: Sequence[int], name: str, timeout: timedelta) -> AnyLink:
    """A new link that is not shared, also if others have the same name."""
    with _lock:
        numbers = _made.setdefault(group, Counter())
        begun = _begun.setdefault(group, {})
        if name not in begun:
            begun[name] = _new_link(group, ranks, f"plane/{name}/{numbers[name]}")
        link = begun[name]
    # Outside the lock: connecting may take as long as the slowest rank. Counted after it succeeded, because a rank
    # that could not connect tries again under the same name.
    link = link.connected(timeout)
    with _lock:
        numbers[name] += 1
        begun.pop(name, None)
    return link
