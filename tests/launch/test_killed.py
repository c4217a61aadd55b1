"""Ranks that are killed at any moment, again and again: the run ends in the state of one that nobody disturbed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.test_train import EXAMPLES, may_make_networks
from terrazzo.checkpoint import Checkpoint
from terrazzo.checkpoint.tools.compare import compare
from terrazzo.launch.history import read_history

HERE = Path(__file__).resolve().parent
STEPS, KILLS = 60, 8
RUN = """
entry = "killed:main"
arguments = ["{steps}"]
checkpoints = {{ folder = "checkpoints", save = 1, keep = 3{more} }}
[ranks]
per_host = {world}
restarts = 100
[engine]
train_batch_size = 8
seed = 3
zero_optimization = {{ stage = 3 }}
optimizer = {{ type = "AdamW", params = {{ lr = 0.01 }} }}
"""


def begun(folder: Path, world: int, more: str = "") -> subprocess.Popen[bytes]:
    (folder / "ranks").mkdir(parents=True)
    shutil.copy(HERE / "killed.py", folder)
    (folder / "run.toml").write_text(RUN.format(steps=STEPS, world=world, more=more))
    with open(folder / "errors", "w") as errors:  # a pipe that nobody reads would hold up the run
        return subprocess.Popen([sys.executable, "-m", "terrazzo", "train", str(folder / "run.toml")], stderr=errors)


def alive(folder: Path) -> list[tuple[int, int]]:
    """The ranks that run: process, and how often they have been restarted."""
    found = [tuple(map(int, path.name.split("-"))) for path in (folder / "ranks").iterdir()]
    return [(pid, start) for pid, _, start in found if Path(f"/proc/{pid}").exists()]


def saved(folder: Path) -> int:
    """The last step that has been saved."""
    names = (path.name.removeprefix("global_step") for path in (folder / "checkpoints").glob("global_step*"))
    return max((int(name) for name in names if name.isdigit()), default=0)


@pytest.mark.long
@pytest.mark.parametrize("more", ["", ', local = "local"'], ids=["root", "local"])
def test_kills_at_random_moments(tmp_path: Path, more: str) -> None:
    with begun(tmp_path / "alone", 2) as alone:
        assert alone.wait(400) == 0, (tmp_path / "alone" / "errors").read_text()
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance, killed, last = random.Random(seed), 0, -1
    folder = tmp_path / "killed"
    with begun(folder, 2, more) as run:
        until = time.monotonic() + 400
        while run.poll() is None and time.monotonic() < until and killed < KILLS:
            ranks = alive(folder)
            newest = max((start for _, start in ranks), default=-1)
            if newest > last:
                if chance.random() < 0.7:  # else perhaps before the first step
                    begun_at, patience = saved(folder), time.monotonic() + 60
                    while saved(folder) <= begun_at and run.poll() is None and time.monotonic() < patience:
                        time.sleep(0.01)
                time.sleep(chance.random() / 2)
                pid, _ = chance.choice(ranks)
                try:
                    os.kill(pid, signal.SIGKILL)
                    killed, last = killed + 1, newest
                except ProcessLookupError:
                    pass
            time.sleep(0.01)
        status = run.wait(400)
        errors = (folder / "errors").read_text()
        assert status == 0, errors
    assert killed >= 3, "the run was over too soon"
    one, other = (Checkpoint(path / "checkpoints" / f"global_step{STEPS}") for path in (tmp_path / "alone", folder))
    assert {each.name for each in compare(one, other)} <= {"checkpoint_manager"}, errors
    assert saved(folder) == STEPS
    went_on = [each for each in read_history(folder / "checkpoints") if each.what == "went on"]
    assert went_on and "there is no spare process" not in errors


@pytest.mark.long
def test_a_run_goes_on_without_a_host_that_is_lost(tmp_path: Path) -> None:
    if not may_make_networks():
        pytest.skip("network namespaces need root, iproute2 and a kernel that allows them")
    folder, errors = tmp_path / "run", tmp_path / "run" / "errors"
    (folder / "ranks").mkdir(parents=True)
    shutil.copy(HERE / "killed.py", folder)
    hosts = 'per_host = 1\nhosts = 2\nmin_hosts = 1\nendpoint = "10.77.0.1:29478"'
    text = RUN.format(steps=STEPS, world=1, more="").replace("per_host = 1", hosts)
    (folder / "run.toml").write_text(text)
    with open(errors, "w") as file:
        environment = {**os.environ, "TERRAZZO": f"{sys.executable} -m terrazzo"}
        command = [str(EXAMPLES / "two_hosts.sh"), str(folder / "run.toml")]
        run = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    until = time.monotonic() + 120
    while saved(folder) < 5:
        assert run.poll() is None and time.monotonic() < until, errors.read_text()
        time.sleep(0.05)
    listed = subprocess.run(["ip", "netns", "pids", f"tz{run.pid}b"], capture_output=True, text=True)
    for pid in listed.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    run.wait(240)
    assert f"done; the latest checkpoint is global_step{STEPS}" in errors.read_text(), errors.read_text()
    assert Checkpoint(folder / "checkpoints" / f"global_step{STEPS}")["dp_world_size"] == 1
    assert sum(each.what == "went on" for each in read_history(folder / "checkpoints")) == 1
