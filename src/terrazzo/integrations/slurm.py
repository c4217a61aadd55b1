"""submitit, which runs Python functions in Slurm jobs: a training job is queued again when Slurm needs its machines.

An `sbatch` script with `terrazzo train` needs none of this (docs/clusters.md).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from terrazzo.comm.waits import barrier
from terrazzo.launch.stopping import Stopped
from terrazzo.layout.drawing import ShownAsCall


class Training(ShownAsCall):
    """A function that submitit runs once for each rank, with what `init_process_group` needs in the environment.

        executor = submitit.AutoExecutor("logs")
        executor.update_parameters(nodes=2, tasks_per_node=8, gpus_per_node=8, timeout_min=24 * 60)
        executor.submit(Training(main, "run.toml"))

    The function checks a `terrazzo.launch.StopSignal`. When it has saved and left, submitit queues the job again, and
    the function starts anew and resumes from its checkpoint.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs

    def __call__(self) -> Any:
        """Run the function on one rank."""
        from submitit import JobEnvironment
        from submitit.helpers import TorchDistributedEnvironment

        job = JobEnvironment()
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        # Saved here, because the function's own StopSignal replaces this handler.
        queue_again = signal.getsignal(signal.Signals[f"SIG{job.USR_SIG}"])
        try:
            return self.function(*self.args, **self.kwargs)
        except Stopped as stopped:
            if callable(queue_again):
                _queue_again(queue_again, stopped)
            raise

    def checkpoint(self) -> Any:
        """What submitit queues again: the same function, because its state is in its own checkpoints."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _queue_again(handler: Callable[[int, Any], Any], stopped: Stopped) -> None:
    """Let submitit queue the job on rank 0; other ranks wait for that, because their end could end rank 0."""
    try:
        handler(stopped.signal, None)  # it ends the process of rank 0
    finally:
        if dist.is_initialized():
            barrier()
