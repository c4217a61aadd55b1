"""The spare process: ranks that are forked from it are as those that are started anew, and what it may not import."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from terrazzo.launch import forking
from terrazzo.launch.spare import Forked, Spare

ENDS = 60.0  # seconds in which what is waited for comes

RANK = """
import json, os, random, signal, sys, threading
import numpy, torch
case, = sys.argv[1:]
if case == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "main": sys.modules["__main__"].case,
    "environment": dict(os.environ), "folder": os.getcwd(), "threads": len(os.listdir("/proc/self/task")),
    "leads": os.getsid(0) == os.getpid() == os.getpgid(0), "parent": os.getppid(),
    "unbuffered": sys.stdout.write_through, "torch": torch.get_num_threads(),
    "draws": [random.random(), numpy.random.rand(), torch.initial_seed()],
    "handler": getattr(signal.getsignal(signal.SIGINT), "__name__", "ignored"),  # as started in the background
    "own": sorted(name for name in sys.modules if name == "beside"),
}))
import beside
sys.exit(beside.STATUS) if case == "ends" else None
raise ValueError("it fails")
"""


def finished(process: Any, path: Path) -> tuple[int, str, str]:
    return process.wait(ENDS), (path / "out").read_text(), (path / "err").read_text()


def test_a_forked_rank_is_as_one_that_is_started_anew(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "beside.py").write_text("STATUS = 7")
    said: list[str] = []
    spare = Spare(said.append)
    environment = {**os.environ, "RANK": "3", "ONLY": "here \udc80"}

    def both(*arguments: str, ways: tuple[bool, ...] = (True, False)) -> list[tuple[int, str, str]]:
        found = []
        for forks in ways:
            with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
                process: Any = (
                    spare.start(arguments, environment, (0, out.fileno(), err.fileno()))
                    if forks
                    else subprocess.Popen(
                        [sys.executable, "-u", *arguments], env=environment, stdout=out, stderr=err,
                        start_new_session=True,
                    )
                )  # fmt: skip
                assert isinstance(process, Forked) == forks
                found.append(finished(process, tmp_path))
        return found

    try:
        assert spare.start(["-c", ""], environment, (0, 1, 2)) is None, "it is not ready"
        spare.learn(["numpy", "beside", "no_such_module"], [str(tmp_path), *sys.path], ["RANK"])
        until = time.monotonic() + ENDS
        spare.look()
        while not spare.is_ready and not said and time.monotonic() < until:
            time.sleep(0.05)
            spare.look()
        script = str(tmp_path / "rank.py")
        (status, text, errors), (expected_status, expected_text, expected_errors) = both(script, "ends")
        assert (status, errors) == (expected_status, expected_errors) == (7, ""), errors
        rank, expected = json.loads(text), json.loads(expected_text)
        assert rank["parent"] == os.getpid()
        ((_, again, _),) = both(script, "ends", ways=(True,))
        draws = [rank.pop("draws"), expected.pop("draws"), json.loads(again)["draws"]]
        assert all(len(set(drawn)) == 3 for drawn in zip(*draws, strict=True)), "all processes draw others"
        # Modules are imported from the same places; the test gave the spare process one of the program's own.
        assert rank.pop("own") == ["beside"] and expected.pop("own") == []
        assert rank == expected
        (status, _, errors), (_, _, expected_errors) = both(script, "fails")
        assert status == 1
        assert errors.splitlines()[-3:] == expected_errors.splitlines()[-3:] and "ValueError: it fails" in errors
        assert both(script, "killed", ways=(True,)) == [(-signal.SIGKILL, "", "")]
        forked, anew = both("-m", "platform", "--terse")
        assert forked == anew and forked[0] == 0 and forked[1]
        assert not said
    finally:
        spare.close()
    assert spare.start([script, "ends"], environment, (0, 1, 2)) is None


def test_what_the_spare_process_does_not_import(tmp_path: Path) -> None:
    """Each is trouble: a thread, which a fork does not copy, and a value that differs from rank to rank."""
    modules = {
        "plain": "import os; HERE = os.environ.get('HOME')",
        "copies": "import subprocess, os; subprocess.run(['true'], env=os.environ | {'MORE': '1'})",
        "raises": "raise SystemExit('no')",
        "reads": "import os; RANK = int(os.environ.get('RANK', 0))",
        "starts": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "outer": "import starts",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)

    def answers(names: list[str], without: list[str]) -> Any:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, "-u", forking.__file__, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | {"RANK": "0"})
            theirs.close()
            path = [str(tmp_path), *sys.path]
            forking.send(ours, {"modules": names, "path": path, "own": ["RANK"], "without": without})
            answer, _ = forking.receive(ours)
        assert process.wait(ENDS) == 0, "it ends with who has started it"
        return answer

    names = list(modules)
    assert answers(names, []) == {"trouble": "reads", "why": "it reads the variable RANK"}
    assert answers(names, ["reads"]) == {"trouble": "starts", "why": "it starts threads"}
    assert answers(names, ["reads", "starts"]) == {"trouble": "outer", "why": "it starts threads"}
    assert answers(names, ["reads", "starts", "outer"]).keys() == {"imported"}


@pytest.mark.long
def test_without_what_cannot_be_shared_it_begins_again(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text("import threading; threading.Thread(target=threading.Event().wait).start()")
    (tmp_path / "rank.py").write_text("import sys; sys.exit(3 if 'wave' in sys.modules else 4)")
    said: list[str] = []
    spare = Spare(said.append)

    def wait() -> None:
        until = time.monotonic() + ENDS
        while not spare.is_ready and not said and time.monotonic() < until:
            spare.look()
            time.sleep(0.05)

    try:
        spare.learn(["starts", "wave"], [str(tmp_path), *sys.path], [])
        wait()
        started = spare.start([str(tmp_path / "rank.py")], dict(os.environ), (0, 1, 2))
        assert started is not None and started.wait(ENDS) == 3 and not said
        (tmp_path / "ends.py").write_text("import os; os._exit(5)")
        spare.learn(["ends"], [str(tmp_path), *sys.path], [])
        spare.look()
        wait_for = time.monotonic() + ENDS
        while not said and time.monotonic() < wait_for:
            spare.look()
            time.sleep(0.05)
        assert "there is no spare process" in said[0] and "status 5" in said[0]
        assert spare.start([str(tmp_path / "rank.py")], dict(os.environ), (0, 1, 2)) is None
    finally:
        spare.close()
