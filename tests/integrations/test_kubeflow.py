"""Kubeflow's SDK: its local process backend runs a job with the engine, and when submitted again the job goes on.

This backend makes a virtual environment for each job, and pip installs PyTorch and the job's packages into it.  Here
pip has no index: it finds the PyTorch of the tests by PYTHONPATH, and brings terrazzo from a wheel of these sources.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch

from ranks import fresh_values
from terrazzo.checkpoint import verify

pytest.importorskip("kubeflow.trainer")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLUSTERS = ROOT / "examples" / "clusters"
RANKS, FURTHER = 2, 3
LIMIT = 300  # seconds for a job


def train(config: dict):
    """What a job's ranks do: so many steps more than the job before.  The SDK takes the text of this function alone."""
    import json
    import signal

    import torch.distributed as dist
    from regression import make_engine, step

    import terrazzo

    signal.alarm(config["limit"])  # the backend ends no ranks
    dist.init_process_group("gloo")
    engine = make_engine()
    engine.load_checkpoint(config["folder"])
    last = engine.global_steps + config["further"]
    for batch in engine.training_dataloader:
        loss = step(engine, batch)
        if dist.get_rank() == 0:
            print("NOTE", json.dumps([dist.get_world_size(), engine.global_steps, loss, terrazzo.__file__]), flush=True)
        if engine.global_steps == last:
            break
    engine.save_checkpoint(config["folder"])
    dist.destroy_process_group()


def terrazzo_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=LIMIT)
    (made,) = folder.glob("terrazzo-*.whl")
    return made


def torchrun_wheel(folder: Path) -> Path:
    """PyTorch's own script, which the backend calls in the job's environment: pip puts it there only with PyTorch."""
    path, info = folder / "torchrun_script-1-py3-none-any.whl", "torchrun_script-1.dist-info"
    files = {
        "METADATA": "Metadata-Version: 2.1\nName: torchrun-script\nVersion: 1\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": "[console_scripts]\ntorchrun = torch.distributed.run:main\n",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(f"{info}/{name}", text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{info}/{name},,\n" for name in [*files, "RECORD"]))
    return path


def installed_but_terrazzo(folder: Path) -> Path:
    """Links to what is installed beside PyTorch, without what the job's environment is to have itself."""
    folder.mkdir()
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith(("terrazzo", "pip", "__pycache__")) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


def submit(client, trainer) -> list[tuple[int, int, float, str]]:
    """Run the job to its end, which is to be a good one; what its first rank said."""
    name = client.train(runtime="torch-distributed", trainer=trainer)
    job = client.wait_for_job_status(name, {"Complete", "Failed"}, timeout=LIMIT + 60, polling_interval=1)
    log = list(client.get_job_logs(name))
    assert job.status == "Complete", "\n".join(log[-60:])
    client.delete_job(name)
    return [tuple(json.loads(line.removeprefix("NOTE "))) for line in log if line.startswith("NOTE ")]


def check_jobs(folder: str) -> None:
    sys.path[:0] = [str(CLUSTERS), str(HERE)]
    from kubeflow.trainer import CustomTrainer, LocalProcessBackendConfig, TrainerClient
    from regression import make_engine, step
    from regression_runs import losses_alone

    work = Path(folder)
    jobs = work / "jobs"
    jobs.mkdir()
    tempfile.tempdir = str(jobs)  # where the backend makes its environments
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # and with which Python
    wheels = {"terrazzo": terrazzo_wheel(work), "torchrun-script": torchrun_wheel(work)}
    trainer = CustomTrainer(
        func=train,
        func_args={"folder": f"{folder}/checkpoints", "further": FURTHER, "limit": LIMIT},
        packages_to_install=[f"{name} @ {wheel.as_uri()}" for name, wheel in wheels.items()],
        env={  # all that the job has
            "PATH": os.environ["PATH"],
            "HOME": folder,
            "PYTHONPATH": os.pathsep.join([str(installed_but_terrazzo(work / "installed")), str(CLUSTERS)]),
            "PIP_NO_INDEX": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "PET_NPROC_PER_NODE": str(RANKS),
            "PET_STANDALONE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
    )
    client = TrainerClient(backend_config=LocalProcessBackendConfig())
    expected = losses_alone(2 * FURTHER + 1)
    for first in (1, FURTHER + 1):
        notes = submit(client, trainer)
        last = first + FURTHER - 1
        assert [note[:2] for note in notes] == [(RANKS, step) for step in range(first, last + 1)]
        assert [loss for _, _, loss, _ in notes] == pytest.approx(expected[first - 1 : last], rel=1e-5)
        assert all(Path(origin).is_relative_to(jobs) for *_, origin in notes), "the terrazzo that pip installed"
        assert (work / "checkpoints" / "latest").read_text() == f"global_step{last}"
        assert verify(work / "checkpoints" / f"global_step{last}") == []
    assert list(jobs.iterdir()) == [], "the backend removes its environments"

    # What the jobs left goes on here, on one rank.
    engine = make_engine()
    engine.load_checkpoint(work / "checkpoints")
    assert engine.global_steps == 2 * FURTHER
    assert step(engine, next(iter(engine.training_dataloader))) == pytest.approx(expected[-1], rel=1e-5)


@pytest.mark.long
def test_a_job_that_is_submitted_again_goes_on(tmp_path):
    fresh_values(1, check_jobs, str(tmp_path), timeout=3 * LIMIT)
