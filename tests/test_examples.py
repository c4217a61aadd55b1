"""The template: whatever the ranks, and across a restart on others, it trains as one process with plain PyTorch."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import device_type, run_ranks
from terrazzo.checkpoint import Checkpoint

STEPS, BATCH = 6, 8


def template() -> ModuleType:
    spec = importlib.util.spec_from_file_location("template", Path(__file__).parents[1] / "examples" / "template.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_runs(folder: str, *runs: str) -> list[str]:
    """What each run prints."""
    said = []
    for each in runs:
        # torch.device: as in a program, which says what is on the accelerator.
        with contextlib.redirect_stdout(io.StringIO()) as printed, torch.device("cpu"):
            template().main(["--folder", folder, "--batch", str(BATCH), "--save-every", "1", *each.split()])
        said.append(printed.getvalue().replace(f" on {device_type()},", ","))
    return said


def alone() -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the weights at the end, without terrazzo."""
    ours = template()
    torch.manual_seed(0)
    model = ours.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(1, STEPS + 1):
        batch = ours.batch_of(step, BATCH)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


@pytest.mark.on_late
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_template_trains_as_one_process_would(ranks: int, tmp_path: Path) -> None:
    exact, half = tmp_path / "exact", tmp_path / "half"
    runs = "--dtype float32 --steps 4", f"--dtype float32 --steps {STEPS} --tensor-parallel 2"
    first, *_ = run_ranks(ranks, check_runs, str(exact), *runs)
    assert first[0].startswith(f"{ranks} ranks, from step 0\n") and f"{ranks} ranks, from step 4\n" in first[1]
    losses, weights = alone()
    said = [float(loss) for loss in re.findall(r"loss (\S+)", "".join(first))]
    assert said == pytest.approx(losses, abs=1e-3)
    saved = Checkpoint(exact / f"global_step{STEPS}")
    for name, weight in weights.items():
        torch.testing.assert_close(saved[f"model.{name}"][...], weight.detach(), rtol=0, atol=2e-4)

    first, *_ = run_ranks(ranks, check_runs, str(half), f"--steps {STEPS} --accumulation 1")
    said = [float(loss) for loss in re.findall(r"loss (\S+)", first[0])]
    assert said == pytest.approx(losses, abs=0.05) and said != pytest.approx(losses, abs=1e-4)
