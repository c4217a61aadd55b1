"""From a rank's death to the first step after it: `terrazzo train` with its engine and manager, beside plain torchrun
with `fully_shard` and `torch.distributed.checkpoint`.

Each run is a job of two or four ranks, of which one is killed (`recovery_run`). Cases of as many ranks look at the
same runs, so the phases of one run add up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from benchmarks.cases import Implementations, Setting, case

LIMIT = 300  # seconds for a job
POINTS = ("fault", "began", "loading", "planned", "read", "stepped")
ROOT = Path(__file__).resolve().parent.parent
RUN = """
script = "{script}"
arguments = ["terrazzo", "{folder}", "{width}"]
checkpoints = {{ folder = "{folder}/checkpoints", save = 1 }}
[ranks]
per_host = {ranks}
[engine]
train_batch_size = 16
optimizer = {{ type = "AdamW", params = {{ lr = 1e-3 }} }}
zero_optimization = {{ stage = 3 }}
"""


def job_of(whose: str, folder: Path, width: int, ranks: int) -> list[str]:
    """The command that runs a job."""
    script = ROOT / "benchmarks" / "recovery_run.py"
    run = folder / "run.toml"
    run.write_text(RUN.format(script=script, folder=folder, width=width, ranks=ranks))
    if whose == "terrazzo":
        return [sys.executable, "-m", "terrazzo", "train", str(run)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, "--max-restarts=3", str(script), str(run), "torch", str(folder), str(width)]


def recover(whose: str, folder: Path, width: int, ranks: int) -> dict[str, float]:
    """Run a job; when its first rank reached which point of going on, in seconds after the fault."""
    folder.mkdir(parents=True)
    # Without the second setting PyTorch 2.13 gives ranks that are started again the addresses of those that died.
    settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        job_of(whose, folder, width, ranks), env=os.environ | settings, capture_output=True, text=True, timeout=LIMIT
    )
    if done.returncode:
        raise RuntimeError(f"{whose}: the job ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    at: dict[str, float] = {}
    for line in (folder / "points").read_text().splitlines():
        said = json.loads(line)
        if said["what"] == "fault" or (said["start"] == 1 and said["rank"] == 0):
            at.setdefault(said["what"], said["at"])
    return {point: at[point] - at["fault"] for point in POINTS}


_run = cache(recover)


def _phase(setting: Setting, first: str, last: str, ranks: int = 2) -> Implementations:
    width = 128 if setting.quick else 1024

    def measured(whose: str) -> Callable[[], float]:
        numbers = iter(range(1_000_000))

        def seconds() -> float:
            points = _run(whose, setting.folder.parent / f"recovery-{whose}-{ranks}-{next(numbers)}", width, ranks)
            return points[last] - points[first]

        return seconds

    return {"terrazzo": measured("terrazzo"), "torch": measured("torch")}


@case(unit="seconds", repetitions=3)
def to_first_step(setting: Setting) -> Implementations:
    """All of it: 8 million parameters with AdamW on 2 ranks."""
    return _phase(setting, "fault", "stepped")


@case(unit="seconds", repetitions=3)
def to_first_step_of_4(setting: Setting) -> Implementations:
    """The same on 4 ranks."""
    return _phase(setting, "fault", "stepped", ranks=4)


@case(unit="seconds", repetitions=3)
def detect(setting: Setting) -> Implementations:
    """From the fault until the new processes begin: both are torchrun's."""
    return _phase(setting, "fault", "began")


@case(unit="seconds", repetitions=3)
def start(setting: Setting) -> Implementations:
    """Libraries, connections, the model."""
    return _phase(setting, "began", "loading")


@case(unit="seconds", repetitions=3)
def plan(setting: Setting) -> Implementations:
    """Until it is known what to read."""
    return _phase(setting, "loading", "planned")


@case(unit="seconds", repetitions=3)
def read(setting: Setting) -> Implementations:
    """Until model and optimizer have their state."""
    return _phase(setting, "planned", "read")


@case(unit="seconds", repetitions=3)
def first_step(setting: Setting) -> Implementations:
    """The first step after it."""
    return _phase(setting, "read", "stepped")
