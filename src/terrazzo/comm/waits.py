"""Waits for other ranks: one that lasts long says once which ranks have not come, and where they are.

Whatever waits for other ranks does so in a `Waiting` block. A thread looks whether one lasts for longer than half a
minute. If so, it asks all ranks through the store where they are (`whereabouts`), and warns. Of the ranks that wait in
the same operation one warns. The same thread answers other ranks' questions.

What takes time by itself before it waits, such as a save, is done in a `Doing` block: ranks that do it have come,
though they do not wait yet.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Self

import torch.distributed as dist

from terrazzo._meant import by_text, named
from terrazzo._torch.groups import default_group, is_alive
from terrazzo.comm.in_process import is_rank_here
from terrazzo.comm.mesh import when_groups_end
from terrazzo.comm.simulated import is_simulated
from terrazzo.comm.whereabouts import Place, World, end_of_group, end_of_process, line_of

LOGGER: Final = logging.getLogger("terrazzo")

_LONG = 30.0  # seconds of a wait, after which ranks are asked
_LOOK = 2.0  # seconds between two looks


class Waiting:
    """A block in which this rank waits for others of `ranks`, in an operation of a `kind` that is equal on all of them.

    The `name` is for messages.
    """

    __slots__ = ("asked", "kind", "name", "ranks", "said", "since", "thread")
    waits = True

    def __init__(self, kind: str, ranks: Sequence[int], name: str = "") -> None:
        self.kind, self.ranks, self.name = kind, ranks, name
        self.said, self.asked = False, (0, 0.0)

    def __enter__(self) -> Self:
        if _state.world is None:
            _state.begin()
        self.since, self.thread = time.monotonic(), threading.get_ident()
        _open[id(self)] = self
        return self

    def __exit__(self, *_: object) -> None:
        _open.pop(id(self), None)  # which a fork has emptied
        if self.asked[0]:
            _spoken.append(self.key)

    @property
    def operation(self) -> Waiting:
        """What this rank takes part in: what it is doing in this thread, or else this wait."""
        for each in list(_open.values()):
            if not each.waits and each.thread == self.thread:
                return each
        return self

    @property
    def key(self) -> str:
        """A short name of the operation, equal on all ranks."""
        return f"{zlib.crc32(repr((self.kind, tuple(self.ranks))).encode()):08x}"

    def __str__(self) -> str:
        return f"{self.kind}{f' {self.name}' if self.name else ''}"


class Doing(Waiting):
    """A block in which this rank takes part in something, for which it also waits in the same thread."""

    __slots__ = ()
    waits = False

    def __str__(self) -> str:
        return self.name or self.kind


def barrier(group: Any = None) -> None:
    """PyTorch's barrier, of the ranks of a group, by default of all."""
    with Waiting("barrier", dist.get_process_group_ranks(group)):
        dist.barrier(group=group)


_open: dict[int, Waiting] = {}
_spoken: list[str] = []  # operations of which this rank spoke, and which are over


class _State:
    """The thread that looks after waits, and the process group that it belongs to."""

    def __init__(self) -> None:
        self.world: World | None = None
        self._without: Any = None  # the process group whose store is gone
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def begin(self) -> None:
        """Start to look after waits, if there are other ranks, in processes of their own."""
        if is_rank_here() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        group = default_group()
        if is_simulated(group) or (self._without is not None and self._without() is group):
            return
        try:
            self.world = World()
        except RuntimeError:
            self._without = weakref.ref(group)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="terrazzo-waits", daemon=True)
            self._thread.start()
            atexit.register(self.end)

    def end(self) -> None:
        """Called when the process ends: say so."""
        self.leave(end_of_process())
        self._over.set()
        if self._thread is not None:
            self._thread.join(_LOOK)

    def leave(self, text: str) -> None:
        """Say that this rank takes part in nothing any more in the present process group."""
        world, self.world = self.world, None
        if world is not None:
            with suppress(RuntimeError):
                world.end(text)

    def _run(self) -> None:
        while not self._over.wait(_LOOK):
            world = self.world
            if world is None:
                continue
            try:
                if world.is_there():
                    _look(world)
            except RuntimeError:  # the store is gone
                self._without = world.group
                if self.world is world:
                    self.world = None


_state = _State()


def lost(ranks: Sequence[int], seconds: float = 0.0) -> dict[int, str]:
    """What is known of those ranks that cannot come any more, or are stopped: that they have ended, for example.

    Connections of a rank are closed before it says that it leaves: waits for so many seconds until one is known.
    """
    world, end = _state.world, time.monotonic() + seconds
    found: dict[int, str] = {}
    with suppress(RuntimeError):  # the store is gone
        while world is not None and not (found := world.lost(ranks)) and time.monotonic() < end:
            time.sleep(0.05)
    return found


@when_groups_end
def _leave() -> None:
    world = _state.world
    if world is not None and not is_alive(world.group()):
        _state.leave(end_of_group())


def _in_forked_process() -> None:
    global _state
    _state.world = None  # what it does when it ends is the parent's
    _open.clear()
    _spoken.clear()
    _state = _State()


os.register_at_fork(after_in_child=_in_forked_process)


def _look(world: World) -> None:
    """Answer questions, and speak of waits that last long."""
    if world.is_asked():
        operations = {each.operation.key for each in list(_open.values())}
        world.answer(sorted(operations), _own_place())
    while _spoken:
        world.give_up(_spoken.pop())
    now = time.monotonic()
    for each in list(_open.values()):
        if not each.waits or each.said or now - each.since < _LONG:
            continue
        if not each.asked[0]:
            if world.is_first(each.operation.key):
                each.asked = world.ask(), now
            else:
                each.said = True
        elif now - each.asked[1] > 2 * _LOOK:
            _speak(world, each)


def _own_place() -> str:
    """Where this rank is: what its main thread waits in, or runs; or else what another thread waits in."""
    main = threading.main_thread().ident
    waits = [each for each in list(_open.values()) if each.waits]
    for each in sorted(waits, key=lambda each: each.thread != main):
        if each.thread == main:
            return f"waits in {each.operation}, at {line_of(main)}"
        return f"runs {line_of(main)}; and waits in {each.operation} in another thread"
    return f"runs {line_of(main)}"


def _speak(world: World, waiting: Waiting) -> None:
    """Warn, with the ranks that have not come; or look again later if all are at work together."""
    operation, here = waiting.operation, world.rank
    others = [rank for rank in waiting.ranks if rank != here]
    places: dict[int, Place] = world.places(others, waiting.asked[0])
    missing = [rank for rank in others if rank not in places or operation.key not in places[rank].operations]
    if not missing and operation is not waiting:
        waiting.since = time.monotonic()
        waiting.asked = (0, 0.0)
        world.give_up(operation.key)
        return
    waiting.said = True
    ends = world.lost([rank for rank in missing if rank not in places], world.own)
    unknown = "no answer: it hangs, or has not communicated by terrazzo so far"
    texts = {rank: places[rank].text if rank in places else ends.get(rank, unknown) for rank in missing or others}
    who = f"{named(missing)} {'has' if len(missing) == 1 else 'have'} not come" if missing else "all ranks have come"
    LOGGER.warning(
        f"rank {here} has waited for {_LONG:g} s in {operation}, at {line_of(waiting.thread)}: {who}. It goes on "
        "waiting until the time limit.\n  " + "\n  ".join(by_text(texts.items()))
    )
