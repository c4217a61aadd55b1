"""What a process table says of a process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from terrazzo.comm.processes import Condition, condition_of, host_identity, own_identity


def test_a_process_that_the_table_does_not_show_may_be_another_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may hide the processes of other users in /proc; a signal to one is refused then."""
    if not host_identity():
        pytest.skip("needs /proc")
    ended = subprocess.Popen(["true"])
    ended.wait()
    host, pid, start = own_identity().decode().rsplit(" ", 2)
    assert condition_of(f"{host} {ended.pid} {start}") is Condition.DEAD
    assert condition_of(f"{host} {10**30} {start}") is Condition.DEAD
    assert condition_of(f"{host} {pid} 1{start}") is Condition.DEAD  # the number was used again

    def hidden(*_: object) -> str:
        raise FileNotFoundError

    def refused(process: int, number: int) -> None:
        assert (process, number) == (os.getpid(), 0)
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", hidden)
    monkeypatch.setattr(os, "kill", refused)
    assert condition_of(f"{host} {pid} {start}") is Condition.UNKNOWN
