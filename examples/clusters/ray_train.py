"""Ray Train: workers that go on after a failure, and in a later run of the same name on another number of workers.

python examples/clusters/ray_train.py FOLDER --workers 4    # FOLDER: seen by all hosts, or the URL of a bucket
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from regression import make_engine, step

from terrazzo.integrations import ray as ray_train


def train(config: dict[str, Any]) -> None:
    """What each worker does.  `notes`: a file for the losses; `dies_at`: a step in which the last worker is killed."""
    engine = make_engine()
    ray_train.resume(engine)
    for batch in engine.training_dataloader:
        if engine.global_steps == config["steps"]:
            break
        loss = step(engine, batch)
        if dist.get_rank() == 0 and "notes" in config:
            with Path(config["notes"]).open("a") as file:
                file.write(json.dumps([dist.get_world_size(), engine.global_steps, loss]) + "\n")
        if engine.global_steps == config.get("dies_at") and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ray_train.report(engine, {"loss": loss, "step": engine.global_steps})


def run(folder: str, workers: int, failures: int = 3, backend: str | None = None, **config: Any) -> Result:
    """Train, from where the last run in this folder ended."""
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="regression", storage_path=folder, failure_config=FailureConfig(failures)),
    )
    return trainer.fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    result = run(options.folder, options.workers, steps=100)
    print(result.metrics, result.checkpoint)


if __name__ == "__main__":
    main()
