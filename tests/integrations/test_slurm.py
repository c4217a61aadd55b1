"""submitit: a job that is preempted saves one step on all ranks, is queued again, and goes on."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from installed import needs
from ranks import fresh_values
from warm_python import warm_python

needs("submitit")

HERE = Path(__file__).parent
CLUSTERS = HERE.parents[1] / "examples" / "clusters"


def check_job(folder: str, python: str) -> None:
    """Submit the example, and preempt it once it trains."""
    sys.path[:0] = [str(CLUSTERS), str(HERE)]
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):  # this process's own
        del os.environ[name]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    import submitit
    from regression_runs import losses_alone, train_until_told

    from terrazzo.integrations.slurm import Training

    executor = submitit.LocalExecutor(f"{folder}/logs", python=python)
    executor.update_parameters(tasks_per_node=2, timeout_min=30)
    job = executor.submit(Training(train_until_told, f"{folder}/checkpoints", further=2))
    until = time.monotonic() + 400
    while "step 2:" not in (job.stdout() or "") and not job.done() and time.monotonic() < until:
        time.sleep(0.05)
    job._process.send_signal(signal.SIGTERM)  # it hands signals to the ranks, as Slurm does
    results = job.results()

    said = job.stdout()
    assert "Requeued job" in said + job.stderr(), said[-2000:] + job.stderr()[-3000:]
    steps = re.findall(r"^step (\d+): loss (\S+)$", said, re.MULTILINE)
    saved = results[0][0][0] - 1
    assert saved >= 2 and [int(number) for number, _ in steps] == list(range(1, saved + 3)), "every step once"
    expected = losses_alone(saved + 2)
    assert [float(loss) for _, loss in steps] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert [step for step, _ in results[0]] == [saved + 1, saved + 2] and results[0] == results[1]


def test_a_job_that_is_preempted_goes_on(tmp_path):
    fresh_values(1, check_job, str(tmp_path), warm_python(), timeout=900)
