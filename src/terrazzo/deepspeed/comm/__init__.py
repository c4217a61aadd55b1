"""DeepSpeed's `comm`: the functions of `torch.distributed`, and those that DeepSpeed adds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terrazzo.comm.alone import backends, initialise_alone, is_launched
from terrazzo.deepspeed.accelerator import get_accelerator
from terrazzo.deepspeed.engines import comms_reports
from terrazzo.errors import EngineError


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not hasattr(dist, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(dist, name)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise `torch.distributed`, unless it is initialised; without a launcher this process trains alone.

    >>> init_distributed()
    >>> dist.is_initialized()
    True

    Args:
        dist_backend: The backend; None: the accelerator's. Beside an accelerator's own backend, such as nccl, gloo is
            started for tensors on the CPU.
        auto_mpi_discovery: Take rank and world size from the environment that mpirun sets.
        distributed_port: The port at which ranks meet, if the environment does not say.
        verbose: Has no effect.
        timeout: The time limit of the default group.
        init_method: As in `torch.distributed.init_process_group`.
        dist_init_required: True: initialise; False: it must be initialised; None: initialise if it has not been.
        config: Has no effect.
        rank: For `init_method`.
        world_size: For `init_method`.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise EngineError("dist_init_required=False, but torch.distributed is not initialised: initialise it first")
    backend = backends(dist_backend)
    if auto_mpi_discovery:
        _take_over_mpi()
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if init_method is not None:
        options |= {"init_method": init_method, "rank": rank, "world_size": world_size}
    elif not is_launched():
        initialise_alone(backend, **options)
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    get_accelerator().set_device(get_local_rank())
    dist.init_process_group(backend, **options)


def _take_over_mpi() -> None:
    """Set torch's environment variables from those of Open MPI."""
    if "RANK" in os.environ or "OMPI_COMM_WORLD_RANK" not in os.environ:
        return
    os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
    os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
    os.environ["LOCAL_RANK"] = os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]


def get_local_rank() -> int:
    """This rank's number among those of its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks of a group."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def inference_all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None) -> Any:
    """The same as `all_reduce`."""
    return dist.all_reduce(tensor, op, group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """A mesh of data-parallel and sequence-parallel ranks."""
    return init_device_mesh(get_accelerator().device_name(), tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print, or return, the communication of engines with `comms_logger.enabled`; called on every rank."""
    reports = [report for report in comms_reports() if report is not None]
    if return_dict:
        return reports[-1].as_dict() if reports else {}
    if dist.get_rank() == 0:
        for report in reports:
            print(report)
    return None
