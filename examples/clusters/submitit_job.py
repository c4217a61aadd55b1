"""A job for Slurm by submitit: queued again, and gone on with, when its time is up or it is preempted.

python examples/clusters/submitit_job.py FOLDER --nodes 2 --tasks-per-node 8    # FOLDER is seen by all hosts
python examples/clusters/submitit_job.py FOLDER --cluster local                 # the same, on this machine
"""

from __future__ import annotations

import argparse
from pathlib import Path

import submitit
import torch.distributed as dist
from regression import make_engine, step

from terrazzo.integrations.slurm import Training
from terrazzo.launch import StopSignal


def train(folder: str, steps: int) -> list[tuple[int, float]]:
    """What each rank does; the steps since the job was last queued, with their losses."""
    dist.init_process_group()
    engine = make_engine()
    engine.load_checkpoint(folder)
    losses = []
    with StopSignal() as stop:
        for batch in engine.training_dataloader:
            if engine.global_steps == steps:
                break
            losses.append((engine.global_steps + 1, step(engine, batch)))
            if dist.get_rank() == 0:
                print(f"step {engine.global_steps}: loss {losses[-1][1]:.6f}", flush=True)
            if stop.agreed():
                engine.save_checkpoint(folder)
                stop.leave()
    engine.save_checkpoint(folder)
    dist.destroy_process_group()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cluster", default="slurm")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tasks-per-node", type=int, default=2)
    options = parser.parse_args()
    executor = submitit.AutoExecutor(options.folder / "logs", cluster=options.cluster)
    executor.update_parameters(nodes=options.nodes, tasks_per_node=options.tasks_per_node, timeout_min=60)
    job = executor.submit(Training(train, str(options.folder / "checkpoints"), steps=200))
    print(f"job {job.job_id}: {job.results()[0][-1]}")


if __name__ == "__main__":
    main()
