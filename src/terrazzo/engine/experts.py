"""Experts that are divided among the data-parallel ranks, which all have different tokens.

The data-parallel ranks become a mesh of two dims. Along the inner one, neighbouring ranks have different experts; along
the outer one they have the same, which ZeRO shards or replicates. A gradient of an expert is the sum over the tokens of
the inner ranks already. It is summed over the outer ones, and divided by the number of all of them, as every gradient.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.groups import flattened, is_alive, root_of, split
from terrazzo.comm.mesh import ranks_of, when_groups_end
from terrazzo.errors import EngineConfigError
from terrazzo.tensor.parallel import ExpertParallel, parallelize_module
from terrazzo.tensor.parallel.experts import expert_mesh


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules whose experts are divided among ranks, or are to be: their `expert_parallel_size` is more than 1."""
    return [module for module in model.modules() if expert_mesh(module) is not None or _wanted(module) > 1]


def _wanted(module: nn.Module) -> int:
    return int(vars(module).get("expert_parallel_size", 1))


def divide_experts(module: nn.Module, data: DeviceMesh) -> DeviceMesh:
    """Divide the experts of a module among the data-parallel ranks, if they are not yet; the 1-D mesh of the ranks
    that have the same experts as this one."""
    mesh = expert_mesh(module)
    if mesh is None:
        same, different = expert_meshes(data, _wanted(module))
        # All ranks have the same values, or none yet.
        parallelize_module(module, different, ExpertParallel(), src_data_rank=None)
        return same
    root = root_of(mesh)
    names, own = root.mesh_dim_names or (), mesh.mesh_dim_names or ()
    others = tuple(name for name in names if name not in own)
    # Along a second dim, ranks with the same tokens have parts of each expert.
    apart = tuple(name for name in names if name not in own[1:])
    if not others or set(ranks_of(root[apart])) != set(ranks_of(data)):
        size = mesh.size(0)
        raise EngineConfigError(
            f"the experts of {type(module).__name__} are on {mesh}, a part of {root}: they must be divided along one "
            f"dim of a mesh with named dims of the {data.size()} data-parallel ranks, as in init_device_mesh('cpu', "
            f"({max(data.size() // size, 1)}, {size}), mesh_dim_names=('expert_data', 'ep')); a dim for tensor "
            "parallelism inside experts is beside these, in this mesh and in initialize(mesh=...)"
        )
    together = root[others]
    return together if together.ndim == 1 else flattened(together, "_".join(others))


def expert_meshes(data: DeviceMesh, size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Two 1-D meshes of the data-parallel ranks: of those with the same experts, and of `size` with different ones."""
    if (data, size) not in _made:
        if data.size() % size:
            raise EngineConfigError(
                f"experts cannot be divided among {size} ranks: that does not divide the {data.size()} data-parallel "
                "ranks"
            )
        shape = (data.size() // size, size)
        if data.mesh_dim_names is None:
            names = ("expert_data", "ep")
            both = DeviceMesh(data.device_type, data.mesh.reshape(shape), mesh_dim_names=names)
        else:
            # Names of their own: an equal mesh that is part of another one would be taken for this one.
            names = (f"{data.mesh_dim_names[0]}_same_of_{size}", f"{data.mesh_dim_names[0]}_experts_of_{size}")
            both = split(data, 0, shape, names)
        _made[data, size] = both[names[0]], both[names[1]]
    return _made[data, size]


_made: dict[tuple[DeviceMesh, int], tuple[DeviceMesh, DeviceMesh]] = {}


@when_groups_end
def _forget() -> None:
    for key, (_, mesh) in list(_made.items()):
        if not dist.is_initialized() or not is_alive(mesh.get_group()):
            del _made[key]
