"""The state of another rank's process, if it runs on this host.

A rank that does not answer may have died, be stopped, or be late; on one host the process table knows which. An
identity names a host and a process. It includes the start time, because process numbers are reused.
"""

from __future__ import annotations

import os
from enum import Enum
from functools import cache
from pathlib import Path


class Condition(Enum):
    """What is known of a process."""

    DEAD = "dead"
    STOPPED = "stopped"
    RUNNING = "running"
    UNKNOWN = "unknown"  # on another host, or a system without /proc


def own_identity() -> bytes:
    """The identity of this process, for `condition_of` on other ranks; empty where the system does not provide it."""
    host = host_identity()
    started = _state_and_start(os.getpid())
    return f"{host} {os.getpid()} {started[1]}".encode() if host and started else b""


@cache
def host_identity() -> str:
    """This boot of the host, and the process namespace (containers have their own)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + "/" + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def condition_of(identity: str) -> Condition:
    """What is known of the process with this identity.

    >>> condition_of(own_identity().decode()) in (Condition.RUNNING, Condition.UNKNOWN)
    True
    """
    host, _, process = identity.partition(" ")
    if not host or host != host_identity():
        return Condition.UNKNOWN
    number, _, start = process.partition(" ")
    found = _state_and_start(int(number))
    if found is None and _exists(int(number)):
        return Condition.UNKNOWN
    if found is None or found[1] != start or found[0] in "ZX":
        return Condition.DEAD
    return Condition.STOPPED if found[0] in "Tt" else Condition.RUNNING


def _exists(process: int) -> bool:
    """Whether there is such a process, of another user if /proc does not show it."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _state_and_start(process: int) -> tuple[str, str] | None:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the process name before it may contain spaces and brackets
    return fields[0], fields[19]
