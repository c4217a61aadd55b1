"""`terrazzo train` finds the hosts of a job in what each kind of cluster sets."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from terrazzo.errors import LaunchError
from terrazzo.launch import network, read_run
from terrazzo.launch.cluster import cluster_of, first_host
from terrazzo.launch.torchrun import torchrun_arguments

CLUSTERS = Path(__file__).resolve().parents[2] / "examples" / "clusters"
# As `srun --ntasks-per-node=1` sets it on the second of three hosts.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "localhost,node[01-02]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
}
# As Kubeflow's Trainer sets it in the pods of a TrainJob.
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "0",
    "PET_MASTER_ADDR": "localhost",
    "PET_MASTER_PORT": "29500",
}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.toml").write_text('script = "train.py"')
    return read_run(tmp_path / "run.toml")


def test_a_step_of_slurm(run):
    arguments = torchrun_arguments(run, SLURM)
    assert arguments[:2] == ["--nnodes=3", "--nproc-per-node=auto"]
    assert {"--rdzv-endpoint=localhost:24711", "--rdzv-id=slurm-4711", "--rdzv-conf=is_host=0"} < set(arguments)
    first = torchrun_arguments(run, SLURM | {"SLURM_NODEID": "0"})
    assert "--rdzv-conf=is_host=1" in first and "--local-addr=127.0.0.1" in first
    # The batch script itself, outside of srun, is no host of a job.
    assert "--standalone" in torchrun_arguments(run, {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "3"})
    with pytest.raises(LaunchError, match="24 tasks on 3 hosts.*ntasks-per-node=1"):
        cluster_of(SLURM | {"SLURM_STEP_NUM_TASKS": "24"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("node-a.b,c", "node-a.b"),
        ("n[1-3]", "n1"),
        ("n[007,9-12],m", "n007"),
        ("r[2-3]n[04,5]x", "r2n04x"),
    ],
)
def test_the_first_of_slurms_hosts(hosts, first):
    assert first_host(hosts) == first


def test_pods_of_kubernetes(run):
    arguments = torchrun_arguments(run, TRAINJOB)
    assert arguments[:2] == ["--nnodes=2", "--nproc-per-node=4"]
    assert {"--rdzv-endpoint=localhost:29500", "--rdzv-conf=is_host=1"} < set(arguments)
    # A JobSet is made of indexed jobs, and may be elastic.
    pod = {**TRAINJOB, "PET_NODE_RANK": "", "JOB_COMPLETION_INDEX": "1", "PET_NNODES": "1:3"}
    arguments = torchrun_arguments(run, pod)
    assert "--nnodes=1:3" in arguments and any(each.startswith("--rdzv-conf=is_host=0,") for each in arguments)
    assert "--standalone" in torchrun_arguments(run, TRAINJOB | {"PET_NNODES": "1"})
    with pytest.raises(LaunchError, match="JOB_COMPLETION_INDEX"):
        cluster_of({**TRAINJOB, "PET_NODE_RANK": ""})


def test_the_file_comes_first(tmp_path, run):
    run.path.write_text('script = "train.py"\n[ranks]\nhosts = 2\nper_host = 3\nendpoint = "127.0.0.1:29400"')
    for environment in (SLURM, TRAINJOB):
        arguments = torchrun_arguments(read_run(run.path), environment)
        assert arguments[:2] == ["--nnodes=2", "--nproc-per-node=3"]
        assert "--rdzv-endpoint=127.0.0.1:29400" in arguments


def test_a_name_that_comes_late(monkeypatch):
    """A pod's name is known once its service has seen it."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def late(host, *args, **kwargs):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(-2, "Name or service not known")
        return real("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(network.socket, "getaddrinfo", late)
    assert network.address_towards("job-0.job:29400", patience=300) == "127.0.0.1"
    assert len(asked) == 3
    asked.clear()
    with pytest.raises(LaunchError, match="job-0"):
        network.address_towards("job-0.job:29400")


def test_the_recipe_for_a_jobset_says_what_is_read():
    yaml = pytest.importorskip("yaml")
    jobset = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())
    [hosts] = jobset["spec"]["replicatedJobs"]
    job = hosts["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
    pods = [
        {entry["name"]: entry["value"] for entry in container["env"]} | {"JOB_COMPLETION_INDEX": str(index)}
        for index in range(job["completions"])
    ]
    # A pod's name: JobSet, replicated job, its replica, the pod's index; then the service, which is the JobSet's.
    name = jobset["metadata"]["name"]
    found = [cluster_of(pod) for pod in pods]
    assert [cluster.index for cluster in found] == [0, 1]
    assert {cluster.endpoint for cluster in found} == {f"{name}-{hosts['name']}-0-0.{name}:29400"}
    assert {(cluster.hosts, cluster.per_host) for cluster in found} == {(str(job["completions"]), 8)}


@pytest.mark.parametrize(("status", "queued"), [(0, False), (1, False), (128 + 15, False), (128 + 12, True)])
def test_the_recipe_for_slurm_queues_what_was_told_to_end(tmp_path, status, queued):
    """With a `srun` that runs its command here, and a `terrazzo` that ends like this."""
    commands = {
        "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
        "terrazzo": f'echo "$*" >> {tmp_path}/said; exit {status}',
        "scontrol": f'echo "$*" >> {tmp_path}/said',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    done = subprocess.run([CLUSTERS / "job.sbatch", "run.toml", "--restarts", "1"], env=environment, timeout=100)
    assert done.returncode == status
    said = (tmp_path / "said").read_text().splitlines()
    assert said == ["train run.toml --restarts 1", *(["requeue 4711"] if queued else [])]
