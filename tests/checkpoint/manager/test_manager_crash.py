"""Kills at the file operations of a manager's save and removals: the newest whole checkpoint is never lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import terrazzo
from checkpoint.newer import check_foreign
from terrazzo.checkpoint import CheckpointManager, verify
from warm_python import warm_python

sys.path.insert(0, str(Path(__file__).parent))
from manager_lab import KEEP, state


def run_lab(folder: Path, every: int, places: str) -> list[dict]:
    program = Path(__file__).parent / "manager_lab.py"
    source = Path(terrazzo.__file__).parents[1]
    done = subprocess.run(
        [warm_python(), str(program), str(folder), str(every), places],
        env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600 if every > 1 else 7200,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def own_steps(manager: CheckpointManager) -> list[int]:
    """Without the step that is a link to another checkpoint."""
    assert manager.steps()[-1] == 1000
    return manager.steps()[:-1]


def check(root: Path, trial: dict) -> str:
    """What is there is whole; the next run goes on from it, and leaves nothing behind.  Says what was found."""
    victim, ends = trial["victim"], trial["ends"]
    assert ends[victim] in (-signal.SIGKILL, 0), trial  # 0: it had less to do than where nobody died
    assert ends[1 - victim] in (0, 7), trial
    named = (root / "latest").read_text()
    assert (root / named / "manifest.terrazzo").exists(), f"latest names {named}, which is not whole"
    with CheckpointManager(root, keep=KEEP) as manager:
        there = own_steps(manager)
        assert there in ([1, 2], [1, 2, 3], [2, 3]), trial
        assert int(named.removeprefix("global_step")) in there[-2:]
        if 0 in ends:  # one rank was told that all is well: so the checkpoint is whole
            assert 3 in there, trial
        target = state(-1)
        newest = manager.restore("latest", target)
        expected = state(newest)
        assert newest == there[-1] == target["step"]
        assert all(target[name].equal(expected[name]) for name in "wb")
        metrics = {r.step: r.metrics["loss"] for r in manager.records()}
        assert metrics == {step: float(step) for step in there} | {1000: 1.0}
        manager.save(newest + 1, state(newest + 1))
    assert own_steps(manager) == [newest, newest + 1]
    left, there_now = set(os.listdir(root)), {f"global_step{step}" for step in (0, newest, newest + 1, 1000)}
    assert left == there_now | {"kept.json", "latest"}, (trial, left)
    check_foreign(root, root.parent / "before")
    for step in own_steps(manager):
        names = [name.partition("-")[0] for name in os.listdir(root / f"global_step{step}")]
        assert set(names) == {"data", "manifest.terrazzo"}, (trial, names)  # no lease, no lock
    return f"{there} latest {named}"


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.proof)])
def test_a_rank_is_killed(tmp_path: Path, every: int) -> None:
    trials = run_lab(tmp_path, every, "one")
    assert {trial["victim"] for trial in trials} == {0, 1}
    # Four operations are done by the rank that comes first, so the last four of either may be the other's.
    assert sum(-signal.SIGKILL in trial["ends"] for trial in trials) >= len(trials) - 8 // every
    found = {check(tmp_path / trial["name"], trial) for trial in trials}
    # Deaths before the commit, and after the removal.
    assert {"[1, 2] latest global_step2", "[2, 3] latest global_step3"} <= found, found


def check_without(path: Path, lost: int, trial: dict) -> str:
    """The same where one host is lost: all of the newest step is on the other, or it is in the root."""
    root, local = path / "root", path / f"host{1 - lost}"
    shutil.rmtree(path / f"host{lost}")
    victim, ends = trial["victim"], trial["ends"]
    assert ends[victim] in (-signal.SIGKILL, 0) and ends[1 - victim] in (0, 7), trial
    named = (root / "latest").read_text()
    assert verify(root / named) == [], f"latest names {named}, which is not whole"
    with CheckpointManager(root, keep=KEEP, local=local, keep_local=1) as manager:
        there = own_steps(manager)
        assert there in ([1, 2], [1, 2, 3], [2, 3]), trial
        if 0 in ends:
            assert 3 in there, trial
        target = state(-1)
        newest = manager.restore("latest", target)
        expected = state(newest)
        assert newest == there[-1] == target["step"], trial
        assert all(target[name].equal(expected[name]) for name in "wb")
        manager.save(newest + 1, state(newest + 1))
    assert own_steps(manager) == [newest, newest + 1], trial
    check_foreign(root, path.parent / "before" / "root")
    for folder, steps in ((root, [newest, newest + 1]), (local, [newest + 1])):
        left, there_now = set(os.listdir(folder)), {f"global_step{step}" for step in steps}
        if folder == root:
            there_now |= {"global_step0", "global_step1000"}
        assert left == there_now | {"kept.json", "latest", "run.id"}, (trial, left)
        assert (folder / "latest").read_text() == f"global_step{newest + 1}"
        for step in steps:
            names = [name.partition("-")[0] for name in os.listdir(folder / f"global_step{step}")]
            assert set(names) == {"data", "manifest.terrazzo"}, (trial, names)  # no lease, no lock
    return f"{there} latest {named}"


@pytest.mark.parametrize("every", [60, pytest.param(1, marks=pytest.mark.proof)])
def test_a_host_is_killed_with_its_disk(tmp_path: Path, every: int) -> None:
    trials = run_lab(tmp_path, every, "tiers")
    assert {trial["victim"] for trial in trials} == {0, 1}
    assert sum(-signal.SIGKILL in trial["ends"] for trial in trials) >= len(trials) * 0.9
    found = set()
    for trial in trials:
        for lost in range(2):
            path = tmp_path / f"{trial['name']}-{lost}"
            shutil.copytree(tmp_path / trial["name"], path, symlinks=True)
            found.add(check_without(path, lost, trial))
    # Deaths before the commit, between the local commit and the copy's, and after the removal.
    assert {"[1, 2] latest global_step2", "[1, 2, 3] latest global_step2", "[2, 3] latest global_step3"} <= found, found
