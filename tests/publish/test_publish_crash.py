"""Kills at the file operations of a publisher and of a receiver: what was published last stays, and both go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import terrazzo
from checkpoint.newer import add_foreign, check_foreign
from terrazzo.checkpoint import save
from terrazzo.publish import Publisher, Receiver
from warm_python import warm_python

sys.path.insert(0, str(Path(__file__).parent))
from publish_lab import SETTINGS, numbers


def begin(folder: Path) -> None:
    """Versions beside what is none: steps of a run, 0 of a later release, 2 behind a link."""
    state = numbers(0)
    with Publisher(folder, state, **SETTINGS) as publisher:
        for version in range(5):  # 0 and 3 are full
            for name, value in numbers(version).items():
                state[name].copy_(value)
            publisher.publish(version)
    save(numbers(0), checkpoint_id=folder / "global_step1")
    add_foreign(folder, folder / "global_step1", folder.parent / "shared", link=2)


def run_lab(folder: Path, every: int) -> list[dict]:
    begin(folder / "before")
    source = Path(terrazzo.__file__).parents[1]
    done = subprocess.run(
        [warm_python(), str(Path(__file__).parent / "publish_lab.py"), str(folder), str(every)],
        env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def received(root: Path, state: dict) -> int:
    receiver = Receiver(root, state)
    version = receiver.poll()
    assert version is not None
    receiver.apply()
    expected = numbers(version)
    assert all(state[name].equal(expected[name]) for name in expected), version
    return version


def check(root: Path, trial: dict) -> int:
    """What is there is whole; publishers and receivers go on, and nothing is left behind.  Says what was there."""
    victim, ends = trial["victim"], trial["ends"]
    assert ends[victim] in (-signal.SIGKILL, 0), trial  # 0: it had less to do than where nobody died
    assert ends[1 - victim] in (0, 7), trial
    there = received(root, numbers(-1))
    assert there in ((4,) if trial["role"] == "receive" else (4, 5, 6)), trial
    if 0 in ends:  # one rank was told that all is well
        assert there == (4 if trial["role"] == "receive" else 6), trial
    state = numbers(7)
    kept = numbers(there)
    receiver = Receiver(root, kept)
    receiver.poll()
    receiver.apply()
    with Publisher(root, state, **SETTINGS) as publisher:
        for version in (7, 8):
            for name, value in numbers(version).items():
                state[name].copy_(value)
            publisher.publish(version)
            publisher.wait()
            assert receiver.poll() == version
            receiver.apply()
            assert all(kept[name].equal(state[name]) for name in state)
    check_foreign(root, root.parent / "before", link=2)
    assert (root / "global_step1" / "manifest.terrazzo").exists()
    left = sorted(set(os.listdir(root)) - {f"global_step{step}" for step in range(3)})
    assert len(left) == 3 and left[2] == "published.json", (trial, left)  # 7 is full, 8 its changes
    for folder in left[:2]:
        names = {name.partition("-")[0] for name in os.listdir(root / folder)}
        assert names == {"data", "manifest.terrazzo"}, (trial, folder, names)  # no lease, no lock
    return there


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.proof)])
def test_a_rank_is_killed(tmp_path: Path, every: int) -> None:
    lines = run_lab(tmp_path, every)
    channels = [trial for trial in lines if trial["role"] == "channel"]
    assert {"SIGSTOP", "SIGKILL"} == {trial["name"].split("-")[1] for trial in channels}
    for trial in channels:  # the publisher and the other receiver go on
        assert trial["ends"] in ([0, -signal.SIGKILL, 0], [0, 0, 0]), trial  # the last: it had fewer messages this time
    assert sum(trial["ends"][1] != 0 for trial in channels) > len(channels) / 2
    trials = [trial for trial in lines if trial["role"] != "channel"]
    assert {(trial["role"], trial["victim"]) for trial in trials} == {
        (role, victim) for role in ("publish", "receive") for victim in range(2)
    }
    assert sum(-signal.SIGKILL in trial["ends"] for trial in trials) >= len(trials) - 4
    found = {check(tmp_path / trial["name"], trial) for trial in trials if trial["role"] == "publish"}
    assert {4, 5, 6} >= found >= {4, 5}, found
    for trial in trials:
        if trial["role"] == "receive":
            check(tmp_path / trial["name"], trial)
