"""A store whose operations happen in an order that the test decides, whatever threads they are called by."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from terrazzo.checkpoint.stores import LARGEST, Absent, Entry, MemoryStore, Store, Version


class Killed(BaseException):
    """The end of a process in the middle of what it does."""


HERE = threading.local()  # the participant whose thread it is


def wait_for_turn() -> None:
    """Called before each operation: wait, if a participant's thread calls."""
    participant = getattr(HERE, "participant", None)
    if participant is not None:
        participant.wait()


class Participant:
    """A process that works with a store, as a thread that waits before each operation."""

    def __init__(self, work: Callable[[Any], Any], store: Store) -> None:
        self.done = 0  # operations
        self.ended = False
        self.result: Any = None  # or the error
        self._may_go, self._is_there = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False
        self._thread = threading.Thread(target=self._run, args=(work, store), daemon=True)

    def _run(self, work: Callable[[Any], Any], store: Store) -> None:
        HERE.participant = self
        try:
            self.wait()
            self.result = work(store)
        except Exception as error:
            self.result = error
        except Killed as killed:
            self.result = killed
        finally:
            self.ended = True
            self._is_there.release()

    def wait(self) -> None:
        """Called in its thread: wait until it may go on."""
        self._is_there.release()
        assert self._may_go.acquire(timeout=30)
        if self._killed:
            raise Killed

    def start(self) -> None:
        self._thread.start()
        assert self._is_there.acquire(timeout=30)
        self.step()  # up to the first operation
        self.done = 0

    def step(self) -> None:
        """Carry out one operation, up to the next one."""
        self._may_go.release()
        assert self._is_there.acquire(timeout=30)
        self.done += 1

    def run(self, count: int | None = None) -> None:
        """Carry out so many operations, or all."""
        while not self.ended and count != 0:
            self.step()
            count = None if count is None else count - 1

    def kill(self) -> None:
        self._killed = True
        self.run()
        self._thread.join()


class Ordered(MemoryStore):
    """Operations of participants wait for their turn. Every lease has expired, so each takes all others for dead."""

    lease_seconds = -1.0

    def get(self, key: str, most: int = LARGEST) -> tuple[bytes, Version]:
        wait_for_turn()
        return super().get(key, most)

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        wait_for_turn()
        return super().put(key, data, only_if=only_if)

    def list(self, prefix: str = "") -> list[Entry]:
        wait_for_turn()
        return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            wait_for_turn()
            super().delete([key])


def played(store: Store, works: Sequence[Callable[[Any], Any]], turns: Sequence[int]) -> list[Participant]:
    """The first participant carries out `turns[0]` operations, the second `turns[1]`, and so on in turn, as many as
    there are turns; it is up to the caller what becomes of the rest."""
    participants = [Participant(work, store) for work in works]
    for each in participants:
        each.start()
    for number, count in enumerate(turns):
        participants[number % len(participants)].run(count)
    return participants
