"""Lightning's `ModelParallelStrategy` trains, saves and resumes on terrazzo as on PyTorch's own FSDP2."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed.fsdp

import terrazzo
import terrazzo.checkpoint
from ranks import run_fresh

pytest.importorskip("pytorch_lightning")

EXAMPLES = Path(__file__).parents[2] / "examples" / "libraries"


def check_lightning(folder: str) -> None:
    sys.path.insert(0, str(EXAMPLES))
    warnings.simplefilter("ignore")
    import lightning_fsdp2 as example

    def losses(path: str) -> list[list[float]]:
        return [example.train(6), example.train(3, save=path), example.train(6, resume=path)]

    expected = losses(f"{folder}-torch")
    terrazzo.install()
    assert torch.distributed.fsdp.fully_shard is terrazzo.fsdp.fully_shard
    found = losses(folder)
    terrazzo.uninstall()
    # Lightning does not go on as without a break (the second step after it differs), with PyTorch's either.
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert found[2][0] == pytest.approx(found[0][3], rel=1e-5), "resumed, not begun again"
    state = terrazzo.checkpoint.Checkpoint(folder)
    assert any("net.0.weight" in name for name in state), "it is one of terrazzo's"


def test_lightning(tmp_path):
    outcomes = run_fresh(2, check_lightning, str(tmp_path / "saved"), timeout=300)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
