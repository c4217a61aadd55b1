"""What ranks tell each other about where they are, through the store of the default process group.

A rank writes there when it asks or is asked, when it leaves the process group, and when it ends. Errors and warnings
about ranks that do not come say what is found there: see `waits`, which asks and answers.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from terrazzo._torch.groups import default_group, default_store
from terrazzo.comm.processes import Condition, condition_of, own_identity

_PREFIX = "terrazzo/where"
_SHOWN = 80  # characters of a line
_LOOKED_UP = 32  # ranks; more are not looked up one by one
_LIBRARIES = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep,
    "<frozen",
)


class Progress(Protocol):
    """Something that counts what this rank has done."""

    def progress(self) -> str:
        """Such as "2 forwards"; empty: nothing yet."""


counted: weakref.WeakSet[Progress] = weakref.WeakSet()
"""What a rank that ends has to say about what it did."""


class Place(msgspec.Struct, frozen=True):
    """Where a rank was when it was asked."""

    question: int  # the number of the last question that it knew of
    operations: list[str]  # the keys of those that it takes part in
    text: str


class _End(msgspec.Struct, frozen=True):
    rank: int
    text: str


class World:
    """The store of one default process group, and what this rank has written to it."""

    def __init__(self) -> None:
        """Called in the thread that communicates, whose connection to the store is free then."""
        self.group = weakref.ref(default_group())
        self.rank, self._size = dist.get_rank(), dist.get_world_size()
        self._shared: Any = default_store()  # torch's stubs lack `clone`
        self._store = PrefixStore(_PREFIX, self._shared)
        self._store.set(f"process/{self.rank}", own_identity().decode())
        self._own: Any = None
        self._host = ""  # the identity of the process that has the store
        self._processes: dict[int, str] = {}  # the identities of other ranks that were asked for
        self._answered = 0

    @property
    def own(self) -> Any:
        """A connection to the store for the thread that asks and answers: others may be waiting on the usual one."""
        if self._own is None:
            self._own = PrefixStore(_PREFIX, self._shared.clone())
        return self._own

    def is_there(self, surely: bool = False) -> bool:
        """Whether the process that has the store is alive, or may be. torch prints each call that fails."""
        if self.rank == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return True
        if not self._host and not surely and self.own.check(["process/0"]):
            self._host = self.own.get("process/0").decode()
        condition = condition_of(self._host)
        return condition is Condition.RUNNING or (condition is Condition.UNKNOWN and not surely)

    # -------------------------------------------------------------- of the thread that asks and answers

    def ask(self) -> int:
        """Ask all ranks where they are; returns the question's number."""
        number: int = self.own.add("questions", 1)
        self.own.set(f"question/{number}", "")
        return number

    def is_asked(self) -> bool:
        """Whether there are new questions."""
        before = self._answered
        while self.own.check([f"question/{self._answered + 1}"]):
            self._answered += 1
        return self._answered > before

    def answer(self, operations: list[str], text: str) -> None:
        """Say where this rank is."""
        place = msgspec.json.encode(Place(self._answered, operations, text)).decode()
        self.own.set(f"place/{self.rank}", place)

    def places(self, ranks: Iterable[int], question: int) -> dict[int, Place]:
        """Where those ranks are that have answered a question."""
        found = {}
        for rank in ranks:
            if self.own.check([f"place/{rank}"]):
                place = msgspec.json.decode(self.own.get(f"place/{rank}"), type=Place)
                if place.question >= question:
                    found[rank] = place
        return found

    def is_first(self, operation: str) -> bool:
        """Whether this rank is the one that speaks of an operation, until it calls `give_up`."""
        own = str(self.rank)
        return bool(self.own.compare_set(f"speaker/{operation}", "", own) == own.encode())

    def give_up(self, operation: str) -> None:
        """Let another rank speak of the operation the next time."""
        self.own.compare_set(f"speaker/{operation}", str(self.rank), "")

    # -------------------------------------------------------------- of any thread

    def end(self, text: str) -> None:
        """Say that this rank takes part in nothing any more."""
        if self.is_there(surely=True):
            end = msgspec.json.encode(_End(self.rank, text)).decode()
            self._store.append("ends", end + "\n")  # type: ignore[attr-defined]  # torch's stubs leave it out

    def lost(self, ranks: Iterable[int], store: Any = None) -> dict[int, str]:
        """What is known of those ranks that cannot come any more, or are stopped; asked over the usual connection, or
        another one.

        Takes few requests: when a collective fails, all ranks ask, and more than once."""
        wanted, store = set(ranks), store or self._store
        said = store.get("ends").splitlines() if store.check(["ends"]) else []
        ends = [msgspec.json.decode(each, type=_End) for each in said]
        found = {end.rank: end.text for end in ends if end.rank in wanted}
        looked_up = sorted(wanted - found.keys())[:_LOOKED_UP]
        self._get_processes(looked_up, store)
        for rank in looked_up:
            condition = condition_of(self._processes.get(rank, ""))
            if condition is Condition.DEAD:
                found[rank] = "died"
            elif condition is Condition.STOPPED:
                found[rank] = "is stopped (SIGSTOP)"
        return found

    def _get_processes(self, ranks: Iterable[int], store: Any) -> None:
        """Get the identities of these ranks that are not known yet, as far as they are in the store."""
        keys = {rank: f"process/{rank}" for rank in ranks if rank not in self._processes}
        if keys and not store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        if keys:
            values = store.multi_get(list(keys.values()))
            self._processes.update(zip(keys, (each.decode() for each in values), strict=True))


def end_of_process() -> str:
    """What a rank says whose process ends."""
    error = getattr(sys, "last_value", None)  # of an error that nothing caught
    with_error = f" with {type(error).__name__}: {error}"[:300] if error is not None else ""
    return f"has ended{with_error}{_after()}"


def end_of_group() -> str:
    """What a rank says that destroys its process group."""
    return f"has left the process group{_after()}, at {line_of(threading.get_ident())}"


def _after() -> str:
    done = " and ".join(text for each in counted if (text := each.progress()))
    return f", after {done}" if done else ""


def line_of(thread: int | None = None) -> str:
    """The line of the program that a thread runs, by default the main thread."""
    innermost = frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "no line that is known"
    file, number = frame.f_code.co_filename, frame.f_lineno
    text = shorten(linecache.getline(file, number), _SHOWN, placeholder=" ...")
    return f"{file.removeprefix(os.getcwd() + os.sep)}:{number}{f' ({text})' if text else ''}"


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in file
