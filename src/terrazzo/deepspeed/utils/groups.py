"""`deepspeed.utils.groups`: the process groups of an engine's ranks, which all see different data; and of experts."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terrazzo.comm.alone import accelerator
from terrazzo.comm.mesh import when_groups_end
from terrazzo.engine.experts import expert_meshes
from terrazzo.errors import EngineConfigError


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Does nothing for one rank per expert group; an error that says where other sizes are passed."""
    if ep_size != 1 or mpu is not None:
        raise EngineConfigError(
            f"groups.initialize(ep_size={ep_size}) is not supported: pass ep_size to deepspeed.moe.layer.MoE"
        )


_meshes: dict[str, tuple[DeviceMesh, DeviceMesh]] = {}
"""For each `ep_size` in use: this rank's mesh of ranks with the same experts, and that of ranks with different ones."""


@when_groups_end
def _forget() -> None:
    if not dist.is_initialized():
        _meshes.clear()


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False, data: DeviceMesh | None = None
) -> None:
    """Make the groups for experts that are divided among so many ranks: of an engine's data-parallel mesh, or else of
    all ranks. The groups of the last engine are found by name."""
    # Which ranks have which experts changes no numbers: neighbouring ranks always have different ones.
    name = f"ep_size_{expert_parallel_size_}"
    if name not in _meshes or data is not None:
        if data is None:
            kind = accelerator()
            data = init_device_mesh("cpu" if kind is None else kind.type, (dist.get_world_size(),))
        _meshes[name] = expert_meshes(data, expert_parallel_size_)


_SAME, _DIFFERENT = 0, 1


def _mesh_of(group_name: str, dim: int) -> DeviceMesh:
    if group_name not in _meshes:
        raise EngineConfigError(
            f"there is no group {group_name!r} of experts, only {sorted(_meshes)}: deepspeed.initialize makes those of "
            "the model's MoE layers"
        )
    return _meshes[group_name][dim]


def _get_expert_parallel_group(group_name: str) -> Any:
    return _mesh_of(group_name, _DIFFERENT).get_group()


def _get_expert_data_parallel_group(group_name: str) -> Any:
    return _mesh_of(group_name, _SAME).get_group()


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return {name: _get_expert_parallel_group(name) for name in _meshes}


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    return {name: _get_expert_data_parallel_group(name) for name in _meshes}


def _get_expert_parallel_world_size(group_name: str) -> int:
    return _mesh_of(group_name, _DIFFERENT).size()


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    return _mesh_of(group_name, _SAME).size()


def _get_expert_parallel_rank(group_name: str) -> int:
    return _mesh_of(group_name, _DIFFERENT).get_local_rank()


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return _mesh_of(group_name, _SAME).get_local_rank()


def _get_max_expert_size() -> int:
    """The largest number of ranks among which experts are divided."""
    if not _meshes:
        raise EngineConfigError(
            "there are no groups of experts: deepspeed.initialize makes those of the model's MoE layers"
        )
    return max(mesh.size() for _, mesh in _meshes.values())


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_data_parallel_group() -> Any:
    return dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    return dist.get_world_size()


def _get_data_parallel_rank() -> int:
    return dist.get_rank()


def _get_model_parallel_world_size() -> int:
    return 1


_get_expert_model_parallel_world_size = _get_model_parallel_world_size
_get_sequence_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_world_size = _get_model_parallel_world_size
get_data_parallel_group, get_data_parallel_rank = _get_data_parallel_group, _get_data_parallel_rank
get_data_parallel_world_size = _get_data_parallel_world_size


def _get_model_parallel_rank() -> int:
    return 0


_get_sequence_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank = _get_model_parallel_rank

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
]
