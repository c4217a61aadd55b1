"""Ranks that are threads of one process, of which one runs at a time, and their process groups, which use memory.

A rank runs until it waits for another one; then the next rank runs. So the order is the same each time, and what a
process has once (torch's process groups, random states, tables of meshes) is changed when the running rank changes:
each rank has its own. Collectives that do not fit together, and ranks of which none can go on, raise an error at once,
where processes would wait.

The backend is called "threaded", as PyTorch's own for tests of PyTorch: only with that name are meshes of different
threads unequal, on which all caches rely.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo._meant import alike, by_text, named
from terrazzo._torch.groups import OwnGroups, autograd_in_this_thread, groups_by_thread, raise_in
from terrazzo.errors import CommError, DivergedRanksError

BACKEND: Final = "threaded"

# What a process has once, and each of these ranks has for itself: variables of modules, and what they are at first.
_VARIABLES: Final[Mapping[str, Mapping[str, Callable[[], Any]]]] = {
    "terrazzo.comm.mesh": {"_known": dict, "_without_group": dict, "_default_group": type(None)},
    "terrazzo.comm.axis": {
        "_axes_over": dict,
        "_groups": WeakValueDictionary,
        "_making": WeakValueDictionary,
    },
    "terrazzo.comm.observe": {"observers": tuple, "end_observers": tuple},
    "terrazzo.deepspeed.utils.groups": {"_meshes": dict},
    "terrazzo.fsdp.meshes": {"_default": type(None)},
}


class Rank:
    """One of the ranks: its thread, what it waits for, and what it has of what a process has once."""

    def __init__(self, ranks: ThreadRanks, number: int) -> None:
        self.ranks, self.number = ranks, number
        self.call: Callable[[], Any] | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_done = True
        self.waits: tuple[Callable[[], bool], Callable[[], str]] | None = None  # until when, and in what
        self.turn = threading.Semaphore(0)
        self._groups = OwnGroups()
        self._random: Any = None
        self._variables: dict[tuple[str, str], Any] = {}
        self.thread = threading.Thread(target=self._run, name=f"rank {number}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        _here.rank = self
        with autograd_in_this_thread():
            while True:
                self.turn.acquire()
                if self.call is None:
                    return
                try:
                    self.value = self.call()
                except BaseException as error:  # noqa: B036  # `ThreadRanks.run` raises it
                    self.error = error
                self.is_done, self.call = True, None
                self.ranks.turn.release()

    def wait_until(self, can_go_on: Callable[[], bool], where: Callable[[], str]) -> None:
        """Have other ranks run until `can_go_on` returns True; `where` says where it waits, for an error."""
        while not can_go_on():
            self._pause(can_go_on, where)
        self.waits = None

    def let_others_run(self) -> None:
        """Have each of the other ranks run, if it can, until it waits: this one asks again and again."""
        self._pause(lambda: True, str)

    def _pause(self, can_go_on: Callable[[], bool], where: Callable[[], str]) -> None:
        if self.ranks.stopped is not None:
            raise CommError(self.ranks.stopped)
        self.waits = can_go_on, where
        self.ranks.turn.release()
        self.turn.acquire()

    @contextmanager
    def as_this_process(self) -> Iterator[None]:
        """What a process has once is this rank's."""
        before, own = _random_states(), self._random
        if own is not None:
            _set_random_states(own)
        with self._groups, self._own_variables():
            try:
                yield
            finally:
                self._random = _random_states()
                _set_random_states(before)

    @contextmanager
    def _own_variables(self) -> Iterator[None]:
        before = {}
        for name, variables in _VARIABLES.items():
            module = sys.modules.get(name)
            for variable, first in variables.items() if module is not None else ():
                key = (name, variable)
                before[key] = getattr(module, variable)
                setattr(module, variable, self._variables[key] if key in self._variables else first())
        try:
            yield
        finally:
            for (name, variable), value in before.items():
                self._variables[name, variable] = getattr(sys.modules[name], variable)
                setattr(sys.modules[name], variable, value)


class _Here(threading.local):
    """Per thread: the rank that it is."""

    rank: Rank | None = None


_here = _Here()


def rank_here(group: str = "this group") -> Rank:
    """The rank that this thread is."""
    if _here.rank is None:
        raise CommError(
            f"only a rank's own thread can communicate in {group}, whose ranks are threads; this one is "
            f"{threading.current_thread().name!r}. What works in the background needs ranks in processes of their own"
        )
    return _here.rank


def is_rank_here() -> bool:
    """Whether this thread is a rank."""
    return _here.rank is not None


@dataclass(eq=False)
class Meeting:
    """One collective: what each rank has given to it."""

    kind: str
    given: dict[int, Any] = field(default_factory=dict)
    is_over: bool = False


class ThreadRanks:
    """The ranks of one process, and what they send each other."""

    def __init__(self, size: int, make_group: Callable[..., Any]) -> None:
        """`make_group` makes a process group of these ranks."""
        self.size, self._make_group = size, make_group
        self.turn = threading.Semaphore(0)  # of the thread that called `run`
        self.stopped: str | None = None  # why no rank waits any more
        self.meetings: dict[tuple[Any, ...], Meeting] = {}
        self.messages: dict[tuple[Any, ...], Tensor] = {}
        self._store = dist.HashStore()
        self._calling = threading.Lock()
        self._closed = False
        self.era = 0  # the number of calls that failed: what was begun in an earlier one is never met
        self.ranks = [Rank(self, number) for number in range(size)]
        hook = sys.excepthook
        self.run([self._join] * size)
        sys.excepthook = hook  # each rank has put its number before the errors of this process

    def _join(self) -> None:
        rank = rank_here().number
        dist.init_process_group(BACKEND, store=self._store, rank=rank, world_size=self.size)

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make a call on each rank, and return the results; raise the error of the first rank that had one."""
        if is_rank_here():
            raise CommError(
                "this is one rank, and it cannot have all ranks run something: pass values of all ranks as arguments "
                "of `run`, so that each rank gets its own"
            )
        if self._closed:
            raise CommError("the ranks have ended, with the `with` block in which they were made")
        if not self._calling.acquire(blocking=False):
            raise CommError("the ranks are running something else for another thread")
        try:
            self.stopped = None
            for rank, call in zip(self.ranks, calls, strict=True):
                rank.call, rank.value, rank.error, rank.is_done = call, None, None, False
                rank.waits = None
            with groups_by_thread(BACKEND, self._make_group):
                self._until_all_are_done()
            errors = {rank.number: rank.error for rank in self.ranks if rank.error is not None}
            values = [rank.value for rank in self.ranks]
            for rank in self.ranks:
                rank.value = rank.error = None
            if errors:
                self._forget()
                raise _one_error(errors, self.stopped)
            return values
        finally:
            self._calling.release()

    def _until_all_are_done(self) -> None:
        while running := [rank for rank in self.ranks if not rank.is_done]:
            ready = [rank for rank in running if rank.waits is None or rank.waits[0]()]
            if not ready:
                self.stopped = self.stopped or self._why_none_goes_on(running)
                ready = running
            for rank in ready:
                self._have_a_turn(rank)

    def _have_a_turn(self, rank: Rank) -> None:
        with rank.as_this_process():
            try:
                rank.turn.release()  # the rank may run, and be interrupted, before this returns
                while not self.turn.acquire(timeout=0.1):  # a signal just before it waits is handled when it has waited
                    pass
            except BaseException:  # as KeyboardInterrupt: what a process has once must not change while the rank runs
                self.stopped = "it was interrupted"
                raise_in(rank.thread, KeyboardInterrupt)
                self.turn.acquire()

    def _why_none_goes_on(self, running: Sequence[Rank]) -> str:
        def place(rank: Rank) -> str:
            if rank.error is not None:
                return f"raised {type(rank.error).__name__}: {rank.error}"
            return rank.waits[1]() if rank in running and rank.waits is not None else "returned"

        lines = by_text((rank.number, place(rank)) for rank in self.ranks)
        return "no rank can go on:\n  " + "\n  ".join(lines)

    def _forget(self) -> None:
        """Drop what ranks have sent that no rank has received, after an error."""
        self.meetings.clear()
        self.messages.clear()
        self.era += 1

    def close(self) -> None:
        """End the threads."""
        if sys.is_finalizing():  # they have ended with the interpreter
            return
        self.run([dist.destroy_process_group] * self.size)
        self._closed = True
        for rank in self.ranks:
            rank.turn.release()  # without a call
            rank.thread.join()


def _one_error(errors: Mapping[int, BaseException], stopped: str | None) -> BaseException:
    """The error to raise: the cause, with the ranks that had it. Ranks that only waited for others do not count."""
    own = {rank: error for rank, error in errors.items() if stopped is None or stopped not in str(error)}
    if not own:
        return KeyboardInterrupt() if stopped == "it was interrupted" else DivergedRanksError(str(stopped))
    first, *others = alike((rank, f"{type(error).__name__}: {error}") for rank, error in own.items()).items()
    notes = [f"raised on {named(first[1])}"]
    notes += [f"{named(ranks)} raised {shorten(text, 100, placeholder=' ...')}" for text, ranks in others]
    found = own[min(first[1])]
    found.add_note("\n".join(notes))
    return found


def _random_states() -> Any:
    numpy = sys.modules.get("numpy")
    found = torch.accelerator.current_accelerator(check_available=True)
    device = None if found is None else torch.get_device_module(found).get_rng_state()
    return torch.get_rng_state(), random.getstate(), device, None if numpy is None else numpy.random.get_state()


def _set_random_states(states: Any) -> None:
    own, python, device, numpys = states
    torch.set_rng_state(own)
    random.setstate(python)
    if device is not None:
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(device)
    if numpys is not None:
        sys.modules["numpy"].random.set_state(numpys)
