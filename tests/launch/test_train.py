"""`terrazzo train`: runs that lose a rank, that are told to end, that go on elsewhere, and that span two hosts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from terrazzo.checkpoint import Checkpoint, verify
from terrazzo.engine import ResumableSampler
from terrazzo.engine.config import Batch
from terrazzo.launch import read_run
from terrazzo.launch.history import read_history
from terrazzo.launch.live import read_live
from terrazzo.launch.torchrun import torchrun_line
from warm_python import warm_python

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
STEPS, CRASH_AT, BATCH = 5, 3, 4
CRASHING = f"""
entry = "crashing:main"
arguments = ["{STEPS}", "{CRASH_AT}"]
[ranks]
per_host = 2
[engine]
train_batch_size = {BATCH}
gradient_clipping = 0
seed = 3
zero_optimization = {{ stage = 2 }}
optimizer = {{ type = "SGD", params = {{ lr = 0.1 }} }}
"""


def terrazzo() -> list[str]:
    return [warm_python(), "-m", "terrazzo"]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        env={**os.environ, "PYTHON_EXEC": warm_python(), "TERRAZZO": shlex.join(terrazzo())},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


def losses_alone(steps: int = STEPS) -> list[float]:
    """The losses of tests/launch/crashing.py and stopped.py by PyTorch in one process that nobody disturbs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(32, 6), torch.randn(32, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = ResumableSampler(32, Batch(BATCH, BATCH, 1), rank=0, ranks=1, seed=3)
    losses = []
    for _, chosen in zip(range(steps), order, strict=False):
        loss = (model(x[chosen]) - y[chosen]).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


MISCONFIGURED = """
import sys
import torch
from terrazzo.engine import initialize
from terrazzo.launch import read_run

initialize(torch.nn.Linear(2, 2), config=read_run(sys.argv[1]).engine)
"""


def test_a_wrong_config_is_said_once_and_costs_no_restart(tmp_path):
    (tmp_path / "train.py").write_text(MISCONFIGURED)
    text = 'script = "train.py"\n[ranks]\nper_host = 2\n[engine]\ntrain_batch_size = 7\noptimizer = { type = "SGD" }\n'
    (tmp_path / "run.toml").write_text(text)
    ended = command(*terrazzo(), "train", str(tmp_path / "run.toml"))
    said = "train_batch_size 7 is not a multiple of 2 data-parallel ranks: use one, such as 6 or 8"
    assert ended.returncode == 1 and ended.stderr.count("Traceback") == 1, ended.stderr
    assert ended.stderr.count(f"EngineConfigError: config: {said}") == 1
    assert f"engine: {said}. Unless train.py divides the model, it fails" in ended.stderr
    assert "started again (restart" not in ended.stderr and "so the ranks were not started again" in ended.stderr
    # What fits no division of the model is an error before any rank starts.
    (tmp_path / "run.toml").write_text(text + "train_micro_batch_size_per_gpu = 2\n")
    ended = command(*terrazzo(), "train", str(tmp_path / "run.toml"))
    assert ended.returncode != 0 and "Traceback" not in ended.stderr and "not a multiple of" in ended.stderr
    (tmp_path / "train.py").write_text("import sys; from terrazzo.launch import read_run; read_run(sys.argv[1]); 1 / 0")
    (tmp_path / "run.toml").write_text(text.replace("7", "8"))
    ended = command(*terrazzo(), "train", str(tmp_path / "run.toml"), "--restarts", "1")
    # Each time by one rank or by both: the one that fails later may be ended before it has printed its error.
    assert 2 <= ended.stderr.count("ZeroDivisionError") <= 4 and "started again (restart 1 of 1)" in ended.stderr


def test_a_rank_that_dies_costs_a_restart_and_nothing_else(tmp_path):
    """On two hosts, where the other one has to hear of it; on one, where networks cannot be made."""
    shutil.copy(HERE / "crashing.py", tmp_path)
    file = tmp_path / "run.toml"
    file.write_text(CRASHING)
    if may_make_networks():
        file.write_text(CRASHING.replace("per_host = 2", 'per_host = 1\nhosts = 2\nendpoint = "10.77.0.1:29477"'))
        once = command(str(EXAMPLES / "two_hosts.sh"), str(file))
    else:
        once = command(*terrazzo(), "train", str(file))
    assert once.returncode == 0, once.stderr
    assert "no checkpoint yet" in once.stderr and f"done; the latest checkpoint is global_step{STEPS}" in once.stderr
    said: list[tuple[int, float]] = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [step for step, _ in said] == [1, 2, 3, 3, 4, 5], "step 3 had not been saved"
    number = r"(\d+\.\d)"
    (told,) = re.findall(
        rf"went on: {number} s from the fault to the first step: detect {number}, start {number}, plan {number}, "
        rf"read {number}, first step {number}",
        once.stderr,
    )
    total, *parts = map(float, told)
    assert total == pytest.approx(sum(parts), abs=0.3) and parts[1] > 0, "each is rounded"
    expected = losses_alone()
    for step, loss in said:
        assert loss == pytest.approx(expected[step - 1], rel=1e-5)
    history = read_history(tmp_path / "checkpoints")
    (went_on,) = [each for each in history if each.what == "went on"]
    assert sum(went_on.seconds.values()) == pytest.approx(total, abs=0.1)
    assert {each.what for each in history} == {"started", "noted", "went on", "ended"}
    assert "rank 1 was killed by SIGKILL; all ranks are started again (restart 1 of 3)" in once.stderr
    assert all(each.status == 0 for each in history)


def test_a_run_goes_on_without_a_rank_that_is_lost(tmp_path):
    """From then on it dies before it connects, so that the other one waits for it."""
    shutil.copy(HERE / "crashing.py", tmp_path)
    text = CRASHING.replace(f'"{CRASH_AT}"]', f'"{CRASH_AT}", "1"]')
    (tmp_path / "run.toml").write_text(text.replace("per_host = 2", "per_host = 2\nmin_per_host = 1\nrestarts = 1"))
    ended = command(*terrazzo(), "train", str(tmp_path / "run.toml"), "--json")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("rank 1 was killed by SIGKILL; all ranks are started again (restart 1 of 1)") == 1
    assert "rank 1 was killed by SIGKILL, and all restarts are used: the run goes on with 1 of 2 ranks" in ended.stderr
    said: list[tuple[int, float]] = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [step for step, _ in said] == [1, 2, 3, 3, 4, 5]
    expected = losses_alone()
    assert [loss for _, loss in said] == pytest.approx([expected[step - 1] for step, _ in said], rel=1e-5)
    assert Checkpoint(tmp_path / "checkpoints" / f"global_step{STEPS}")["dp_world_size"] == 1
    (host,) = read_live(tmp_path / "checkpoints")
    assert [(where.beat.rank, where.beat.step) for where in host.ranks] == [(0, STEPS)]
    assert len(json.loads(ended.stdout)["recoveries"]) == 1


def test_a_rank_that_always_dies_ends_the_run_with_its_status(tmp_path):
    shutil.copy(HERE / "crashing.py", tmp_path)
    (tmp_path / "run.toml").write_text(CRASHING.replace(f'"{CRASH_AT}"]', '"1"]'))
    ended = command(*terrazzo(), "train", str(tmp_path / "run.toml"), "--restarts", "0", "--per-host", "1", "--json")
    assert ended.returncode == 128 + 9, ended.stderr
    assert "rank 0 was killed by SIGKILL; the latest checkpoint is none" in ended.stderr
    assert "went on" not in ended.stderr
    assert "from step 0" in ended.stderr, "stdout is for the JSON"
    assert json.loads(ended.stdout) == {
        "status": 128 + 9,
        "why": "rank 0 was killed by SIGKILL",
        "checkpoints": str(tmp_path / "checkpoints"),
        "latest": None,
        "recoveries": [],
    }


@pytest.mark.parametrize("told_by", [signal.SIGUSR2, signal.SIGINT])
def test_a_run_that_is_told_to_end_saves_and_goes_on(tmp_path, told_by):
    shutil.copy(HERE / "stopped.py", tmp_path)
    (tmp_path / "run.toml").write_text(
        CRASHING.replace("crashing", "stopped").replace(f'["{STEPS}", "{CRASH_AT}"]', '["2"]')
    )
    line, losses = [*terrazzo(), "train", str(tmp_path / "run.toml")], tmp_path / "losses.jsonl"
    environment = {**os.environ, "PYTHON_EXEC": warm_python()}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    own = subprocess.Popen([sys.executable, *line[1:]], env=environment, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    with own as told:
        try:
            until = time.monotonic() + 300
            while told.poll() is None and time.monotonic() < until:
                if any(len(host.ranks) == 2 for host in read_live(tmp_path / "checkpoints")):
                    break
                time.sleep(0.02)
            watched = command(*terrazzo(), "top", str(tmp_path / "run.toml"), "--json")
            told.send_signal(told_by)
            _, errors = told.communicate(timeout=300)
        finally:
            told.kill()
    steps = len(losses.read_text().splitlines())
    seen = json.loads(watched.stdout)
    assert seen["state"] == "running" and seen["step"] >= 1 and [rank["rank"] for rank in seen["ranks"]] == [0, 1]
    assert seen["memory"] > 0 and seen["loss"] > 0 and seen["saves"]["count"] == 0
    assert told.returncode == 128 + told_by, errors
    assert f"it was ended by {told_by.name}; the latest checkpoint is global_step{steps}" in errors, errors
    assert "Traceback" not in errors
    resumed = command(*line)
    assert resumed.returncode == 0, resumed.stderr
    said = [json.loads(line) for line in losses.read_text().splitlines()]
    assert [step for step, _ in said] == list(range(1, steps + 3)), "every step once"
    assert [loss for _, loss in said] == pytest.approx(losses_alone(steps + 2), rel=1e-4, abs=1e-6)


def example(folder: Path, name: str, steps: int) -> Path:
    """An example's files, for so many steps, with checkpoints in the same folder."""
    shutil.copy(EXAMPLES / "train_gpt.py", folder)
    text = (EXAMPLES / name).read_text()
    for old in ("100", "60"):
        text = text.replace(f'["--steps", "{old}"]', f'["--steps", "{steps}"]')
    text = text.replace("save = 20", "save = 2")
    assert f'"--steps", "{steps}"' in text and "save = 2" in text
    (folder / name).write_text(text)
    return folder / name


def steps_of(output: str) -> dict[int, float]:
    lines = [line.removeprefix("step ").split(": loss ") for line in output.splitlines() if line.startswith("step ")]
    return {int(step): float(loss) for step, loss in lines}


def test_the_example_by_hand_with_torchrun(tmp_path):
    file = example(tmp_path, "train.toml", steps=4)
    file.write_text(file.read_text().replace("per_host = 4", "per_host = 2"))
    shown = torchrun_line(read_run(file))
    assert " torchrun --nnodes=1 --nproc-per-node=2 " in shown
    line = shown.replace(" torchrun ", f" {shlex.quote(warm_python())} -m torch.distributed.run ")
    trained = command("bash", "-c", line)
    assert trained.returncode == 0, trained.stderr
    assert "2 ranks, from step 0" in trained.stdout and list(steps_of(trained.stdout)) == [2, 4]
    assert verify(tmp_path / "runs/gpt/global_step4") == []


def may_make_networks() -> bool:
    """Whether two namespaces with a cable between them can be made here."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"tz{os.getpid()}t"
    try:
        if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
            return False
        link = ["ip", "link", "add", name, "netns", name, "type", "veth", "peer", "name", name + "p", "netns", name]
        return subprocess.run(link, capture_output=True).returncode == 0
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_hosts_save_together_and_one_goes_on(tmp_path):
    if not may_make_networks():
        pytest.skip("network namespaces need root, iproute2 and a kernel that allows them")
    file = example(tmp_path, "two_hosts.toml", steps=4)
    together = command(str(EXAMPLES / "two_hosts.sh"), str(file), "--per-host", "1")
    assert together.returncode == 0, together.stderr
    assert "2 ranks, from step 0" in together.stdout
    saved = tmp_path / "runs/two-hosts/global_step4"
    assert (tmp_path / "runs/two-hosts/latest").read_text() == saved.name and verify(saved) == []
    assert len(list(saved.glob("data-*.safetensors"))) == 2 and Checkpoint(saved)["dp_world_size"] == 2

    alone = tmp_path / "alone.toml"
    alone.write_text(file.read_text().replace("hosts = 2\nendpoint", "endpoint").replace('"4"', '"6"', 1))
    alone.write_text(alone.read_text().replace('endpoint = "10.77.0.1:29477"', "# one host"))
    resumed = command(*terrazzo(), "train", str(alone), "--per-host", "1")
    assert resumed.returncode == 0, resumed.stderr
    assert list(steps_of(resumed.stdout)) == [6] and list(steps_of(together.stdout)) == [2, 4]
    assert "the latest checkpoint is global_step4" in resumed.stderr and "1 ranks, from step 4" in resumed.stdout
