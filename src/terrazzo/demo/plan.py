"""What the demo is going to do, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terrazzo.demo.model import Sizes


@dataclass(frozen=True)
class Leg:
    """A part of the run: so many ranks, arranged like this."""

    title: str
    ranks: int
    zero_stage: int
    tensor_parallel: int = 1

    @property
    def data_parallel(self) -> int:
        return self.ranks // self.tensor_parallel


FIRST = Leg("4 ranks, ZeRO-3", 4, 3)
SECOND = Leg("2 ranks, tensor parallel", 2, 1, tensor_parallel=2)


@dataclass(frozen=True)
class Plan:
    """The whole demo. The first leg is killed in a save at or after step `kill_from`."""

    folder: Path
    steps: int = 120
    save_every: int = 20
    kill_from: int = 60
    batch: int = 16
    seed: int = 7
    sizes: Sizes = field(default_factory=Sizes)
    # A large eps: where a gradient is zero but for rounding, Adam would make steps of the rounding.
    optimizer: dict[str, Any] = field(default_factory=lambda: {"lr": 2e-3, "eps": 1e-5, "weight_decay": 0.01})
    clipping: float = 1.0

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Where the engine saves this step."""
        return self.checkpoints / f"global_step{step}"

    def engine_config(self, leg: Leg) -> dict[str, Any]:
        """The config of the engine."""
        return {
            "train_batch_size": self.batch,
            "gradient_clipping": self.clipping,
            "zero_optimization": {"stage": leg.zero_stage},
            "optimizer": {"type": "AdamW", "params": self.optimizer},
            "seed": self.seed,
        }


def plan_of(folder: Path, steps: int) -> Plan:
    """A demo of so many steps: it saves six times, and the third save is its last.

    >>> plan_of(Path("x"), 30).save_every, plan_of(Path("x"), 30).kill_from
    (5, 15)
    """
    every = max(steps // 6, 1)
    return Plan(folder, steps=steps, save_every=every, kill_from=3 * every)
