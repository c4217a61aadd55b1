"""A run on accelerators that loses a rank: the one that is forked in its place has the device, and the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = """
import json, os, signal, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from terrazzo.engine import initialize

def main(run, settles):
    folder, rank = Path(run.path).parent, int(os.environ["RANK"])
    forked = "forking.py" in Path("/proc/self/cmdline").read_text()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.1), nn.Tanh(), nn.Linear(128, 8))
    engine = initialize(model, config=run.engine)
    engine.load_checkpoint(run.checkpoints)
    assert engine.device.type != "cpu"
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank)).to(engine.device)
    while engine.global_steps < 6:
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        with (folder / f"said-{rank}").open("a") as file:
            file.write(json.dumps([engine.global_steps, loss.item(), forked]) + "\\n")
        if engine.global_steps == 4 and settles and not (folder / "died").exists():
            time.sleep(float(settles))  # `terrazzo train` has its spare process import what the ranks have
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        engine.save_checkpoint(run.checkpoints)
    dist.destroy_process_group()
"""
RUN = """
entry = "losing:main"
arguments = ["{settles}"]
[ranks]
per_host = 1
[engine]
train_batch_size = 16
seed = 3
zero_optimization = {{ stage = 3 }}
optimizer = {{ type = "AdamW", params = {{ lr = 0.01 }} }}
"""


def said_by(folder: Path, settles: str) -> list[tuple[int, float, bool]]:
    folder.mkdir()
    (folder / "losing.py").write_text(PROGRAM)
    (folder / "run.toml").write_text(RUN.format(settles=settles))
    ended = subprocess.run(
        [sys.executable, "-m", "terrazzo", "train", str(folder / "run.toml")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=200,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, ended.stderr
    return [tuple(json.loads(line)) for line in (folder / "said-0").read_text().splitlines()]


@pytest.mark.gpu
def test_a_rank_that_is_forked_again_trains_on(tmp_path: Path) -> None:
    if not torch.accelerator.is_available():
        pytest.skip("a run's programs find no accelerator here")
    whole, lost = said_by(tmp_path / "whole", ""), said_by(tmp_path / "lost", "20")
    assert [step for step, *_ in lost] == [1, 2, 3, 4, 4, 5, 6]
    assert [forked for *_, forked in lost] == [False] * 4 + [True] * 3
    expected = {step: loss for step, loss, _ in whole}
    assert [loss for _, loss, _ in lost] == pytest.approx([expected[step] for step, *_ in lost], rel=1e-6)
