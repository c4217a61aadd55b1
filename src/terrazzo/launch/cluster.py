"""Reads a run on several hosts from the environment: Slurm's steps, Kubeflow's TrainJobs, indexed jobs of Kubernetes.

The same command runs on each host; the environment says how many hosts there are, which one this is, and where they
meet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from terrazzo.errors import LaunchError


@dataclass(frozen=True)
class Cluster:
    """The hosts of a job, and this host among them.

    Attributes:
        scheduler: the system that started the job.
        hosts: the number of hosts; `MIN:MAX` if it may change.
        index: the number of this host.
        endpoint: `host:port` of the first host.
        job: a name that no other job has.
        per_host: the number of ranks on each host, if the scheduler says so.
    """

    scheduler: str
    hosts: str
    index: int
    endpoint: str
    job: str
    per_host: int | None = None


def cluster_of(environment: Mapping[str, str]) -> Cluster | None:
    """The job and this host's place in it, from environment variables; None if there are none of a known scheduler.

    >>> cluster_of({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0", "PET_MASTER_PORT": "29500"})
    Cluster(scheduler='Kubernetes', hosts='2', index=1, endpoint='job-0:29500', job='job-0', per_host=None)
    """
    # Only inside a step (srun): the batch script itself runs on the first host only.
    if "SLURM_STEP_ID" in environment and "SLURM_STEP_NODELIST" in environment:
        return _slurm(environment)
    if "PET_NNODES" in environment and "PET_MASTER_ADDR" in environment:
        return _kubernetes(environment)
    return None


def _slurm(environment: Mapping[str, str]) -> Cluster:
    hosts, tasks = environment.get("SLURM_STEP_NUM_NODES", "1"), environment.get("SLURM_STEP_NUM_TASKS", "1")
    if hosts != tasks:
        raise LaunchError(
            f"Slurm started {tasks} tasks on {hosts} hosts, but terrazzo train starts the ranks of a host itself: "
            "start one task per host with srun --ntasks-per-node=1"
        )
    job = environment["SLURM_JOB_ID"]
    # Jobs may share a host, so the port depends on the job; it is below the ports that systems give to clients.
    port = 20000 + int(job) % 10000
    index = int(environment.get("SLURM_NODEID", "0"))
    return Cluster("Slurm", hosts, index, f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}", f"slurm-{job}")


def _kubernetes(environment: Mapping[str, str]) -> Cluster:
    index = environment.get("PET_NODE_RANK") or environment.get("JOB_COMPLETION_INDEX")
    if index is None or not index.isdigit():
        raise LaunchError(
            "PET_NNODES and PET_MASTER_ADDR are set, but no variable says which host this is: set PET_NODE_RANK, or "
            "run it as an indexed job, which sets JOB_COMPLETION_INDEX"
        )
    address, port = environment["PET_MASTER_ADDR"], environment.get("PET_MASTER_PORT", "29400")
    ranks = environment.get("PET_NPROC_PER_NODE", "")
    return Cluster(
        "Kubernetes",
        environment["PET_NNODES"],
        int(index),
        f"{address}:{port}",
        environment.get("PET_RDZV_ID", address),
        int(ranks) if ranks.isdigit() else None,
    )


def first_host(hosts: str) -> str:
    """The first host of a list in Slurm's notation.

    >>> first_host("gpu[003-007,9],login1"), first_host("rack2node[4,6]-ib"), first_host("alone")
    ('gpu003', 'rack2node4-ib', 'alone')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if first is None:
        raise LaunchError(f"cannot read Slurm's list of hosts: {hosts!r}")
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first.group())
