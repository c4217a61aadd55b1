"""The process group of a program that has not initialised one: of all ranks, or of its one process.

A process that a launcher started may be one of several, so it joins the others, or fails. One that was started by
`python` or in a notebook becomes a group of one rank, so that a program is the same on one rank and on many.
"""

from __future__ import annotations

import logging
import math
import os
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as mesh_of_all_ranks

from terrazzo.errors import CommError

LOGGER: Final = logging.getLogger("terrazzo.comm")
_OF_TORCH: Final = ("RANK", "WORLD_SIZE")  # what `init_process_group` needs; torchrun sets them
_COUNTS: Final = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # how many processes were started


def is_launched() -> bool:
    """Whether this process may be one of several: torchrun's variables are set, or srun or mpirun started several."""
    return any(name in os.environ for name in _OF_TORCH) or any(os.environ.get(name, "1") != "1" for name in _COUNTS)


def initialise() -> None:
    """Initialise the process group, if there is none: of all ranks if this process was launched, else of it alone."""
    if dist.is_initialized():
        return
    if is_launched():
        dist.init_process_group(backends())
    else:
        initialise_alone(backends())


def initialise_alone(backend: str, **options: Any) -> None:
    """Make the process group of this process alone, and log that."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    LOGGER.warning(
        "terrazzo: no launcher started this process, so it is a process group of one rank. For several ranks: "
        "torchrun --nproc-per-node N SCRIPT"
    )


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: dict[int | str, Any] | None = None,
) -> DeviceMesh:
    """PyTorch's `init_device_mesh`; in a process without a launcher and a process group, one of one rank is made.

    >>> init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")).shape
    (1, 1)

    Args:
        device_type: As "cpu" or "cuda", without an index.
        mesh_shape: How many ranks each mesh dim has.
        mesh_dim_names: A name for each mesh dim.
        backend_override: The backend of a mesh dim, or its options, or both, by its index or name.
    """
    if not isinstance(mesh_shape, tuple | list) or not all(hasattr(size, "__index__") for size in mesh_shape):
        raise CommError(
            f"a mesh's shape is a tuple of how many ranks each dim has, as (4,) or (2, 4), not {mesh_shape!r}"
        )
    named = mesh_dim_names or ()
    if mesh_dim_names is not None and len(named) != len(mesh_shape) or len(set(named)) != len(named):
        raise CommError(
            f"mesh_dim_names has a name of its own for each of the {len(mesh_shape)} dims of a mesh of shape "
            f"{tuple(mesh_shape)}, not {mesh_dim_names!r}"
        )
    try:
        torch.device(device_type, 0)  # raises also if the type has an index
    except (RuntimeError, TypeError) as error:
        found = accelerator()
        there = "'cpu', or the type of an accelerator as 'cuda'" if found is None else f"'cpu' or {found.type!r}"
        raise CommError(f"there is no type of devices {device_type!r}: write {there}") from error
    if not dist.is_initialized() and not is_launched():
        ranks = math.prod(mesh_shape)
        if ranks != 1:
            raise CommError(
                f"a mesh of shape {tuple(mesh_shape)} needs {ranks} ranks, but no launcher started this process, so "
                f"it is alone: start it with torchrun --nproc-per-node {ranks}, or make a mesh of one rank"
            )
        initialise_alone(backends())
    elif dist.is_initialized() and math.prod(mesh_shape) > dist.get_world_size():
        raise CommError(
            f"a mesh of shape {tuple(mesh_shape)} needs {math.prod(mesh_shape)} ranks, but there are "
            f"{dist.get_world_size()}: start the program with more, or make a smaller mesh"
        )
    more: dict[str, Any] = {} if backend_override is None else {"backend_override": backend_override}
    return mesh_of_all_ranks(device_type, mesh_shape, mesh_dim_names=mesh_dim_names, **more)


def backends(wanted: str | None = None) -> str:
    """The backends for a process group: `wanted`, and gloo for the CPU beside an accelerator's own backend.

    What is offloaded to the CPU is reduced there, too: norms, the search for overflows, whole parameters.

    >>> backends("gloo")
    'gloo'
    """
    found = accelerator()
    own = "gloo" if found is None else dist.get_default_backend_for_device(found)
    if found is None or wanted not in (None, own):
        return wanted or own
    return f"cpu:gloo,{found.type}:{own}"


def accelerator() -> torch.device | None:
    """The accelerator of this machine, if `fully_shard` runs on it: that needs streams, which MPS does not have."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and hasattr(torch.get_device_module(found.type), "Stream") else None
