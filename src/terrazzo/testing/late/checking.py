"""The schedule of the device, and the check that a program does not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from terrazzo.errors import LateDeviceError, RaceError
from terrazzo.testing.late import build, reports
from terrazzo.testing.late.reports import Race
from terrazzo.testing.late.starting import init

MODES = ("eager", "needed", "default_first", "default_last", "random")
"""When tasks run: as soon as they can; only those that the host waits for; those of default streams first; those of
other streams first; in random order."""


@dataclass(frozen=True)
class _Settings:
    mode: str = "eager"
    seed: int = 0
    idle_ms: int = 100
    queries: int = 3
    hang_s: float = 300.0


_present = _Settings()


def schedule(
    mode: str = "eager", seed: int = 0, *, idle_ms: int = 100, queries: int = 3, hang_s: float = 300.0
) -> None:
    """Choose when tasks run. A program without races computes the same, bit by bit, in every mode and with every seed.

    Args:
        mode: One of `MODES`.
        seed: For orders that are left to chance.
        idle_ms: After so many milliseconds in which the program does nothing on the device, what is queued runs.
            Without this, ranks of which only one waits would wait for each other forever.
        queries: How often `query` of an event says that it has not happened, before it happens.
        hang_s: After so many seconds in which nothing could run, a wait raises an error.
    """
    global _present
    if mode not in MODES:
        raise LateDeviceError(f"`mode` must be one of {', '.join(map(repr, MODES))}, not {mode!r}")
    init()
    _present = _Settings(mode, seed, idle_ms, queries, hang_s)
    build.load().configure(mode, seed, idle_ms, queries, hang_s)


def races() -> list[Race]:
    """The races that were found since the last call, each pair of lines once."""
    init()
    library = build.load()
    found = [reports.race_of(*race) for race in library.take_races()]
    hosts = [reports.host_race_of(*fault) for fault in library.take_host_faults()]
    return found + list(dict.fromkeys(hosts))


def host_waits() -> int:
    """How often the host has waited so far for what was not done yet, by whatever call. A copy from pageable memory to
    the device counts too: CUDA may wait for it."""
    init()
    return int(build.load().host_waits())


@contextmanager
def checked(mode: str = "eager", seed: int = 0) -> Iterator[None]:
    """A block, or a function that this decorates, in which nothing may depend on when tasks run.

    At its end the host waits for the device. The mode that held before is restored then.

    Raises:
        RaceError: Two accesses to the same memory have no order, or the host used memory that a copy was still using.
            `races` has them; the message names operations, tensors, streams and lines of the program. If the block
            raised another error, the races are added to that one's notes.
    """
    before = _present
    init()
    library = build.load()
    library.synchronize(-1)
    races()
    library.protect_again()
    schedule(mode, seed)
    try:
        yield
        library.synchronize(-1)
    except BaseException as error:
        if found := races():
            error.add_note("The device `late` found: " + reports.text_of(found))
        raise
    finally:
        schedule(before.mode, before.seed, idle_ms=before.idle_ms, queries=before.queries, hang_s=before.hang_s)
    if found := races():
        raise RaceError(reports.text_of(found), tuple(found))
