"""A model with scalar parameters, in every stage, and saved and resumed in every layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from engine import runs
from engine.runs import drawn, engine_of, train, train_plainly
from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint

STEPS, BEFORE = 5, 3


class Model(runs.Model):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.2))
        self.level = nn.Parameter(torch.tensor(0.3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain + self.level


def make_model(seed: int = 0) -> Model:
    return drawn(Model, seed)


def save_halfway(folder: str, stage: int) -> list[float]:
    engine = engine_of(stage, make_model())
    losses = train(engine, BEFORE)
    engine.save_checkpoint(f"{folder}/native")
    if stage:
        engine.save_checkpoint(f"{folder}/deepspeed", layout="deepspeed")
    return losses


def resume(folder: str, stage: int) -> list[list[float]]:
    found = []
    for kind in sorted(path.name for path in Path(folder).iterdir()):
        engine = engine_of(stage, make_model(seed=5))
        engine.load_checkpoint(f"{folder}/{kind}")
        found.append(train(engine, STEPS - BEFORE, start=BEFORE))
    return found


def test_scalars_in_every_stage_layout_and_world(tmp_path):
    expected, trained = train_plainly(STEPS, make=make_model)
    for stage, world, others in ((0, 2, (3, 1)), (1, 2, (2, 2)), (2, 1, (0, 2)), (3, 2, (1, 1))):
        folder = str(tmp_path / str(stage))
        close(run_ranks(world, save_halfway, folder, stage)[0], expected[:BEFORE])
        for after, then in ((stage, world), others):
            for losses in run_ranks(then, resume, folder, after)[0]:
                close(losses, expected[BEFORE:])
        for kind in Path(folder).iterdir():
            with Checkpoint(str(next(kind.glob("global_step*")))) as found:
                names = [name for name in found if name.endswith("gain") and "optim" not in name]
                assert names and found[names[0]].shape == (), (kind, list(found))
    assert trained.gain.item() != 1.2


def close(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
