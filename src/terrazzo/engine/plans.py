"""`tensor_parallel.autotp_size`: a model of Hugging Face, cut by the plan that it carries.

Transformers applies the plan, as in its own `from_pretrained(tp_plan="auto")`, to a model that has its weights already.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terrazzo.comm import axis_of
from terrazzo.comm.alone import initialise
from terrazzo.engine.placing import device_type, same_everywhere
from terrazzo.errors import EngineConfigError
from terrazzo.tensor import DTensor

_KEY = "config: tensor_parallel.autotp_size"
_DIM = "tp"


def cut_by_plan(model: nn.Module, size: int, mesh: DeviceMesh | None, data_dim: str) -> DeviceMesh:
    """Cut the model among `size` neighbouring ranks, in place; returns the mesh of all ranks."""
    initialise()
    mesh = _mesh(size, mesh, data_dim)
    named: Any = model
    plan = getattr(named, "tp_plan", None)
    if not plan or not hasattr(named, "_expand_parallel_plan"):
        raise EngineConfigError(
            f"{_KEY}: a {type(model).__name__} carries no `tp_plan` of Transformers: cut the model with "
            "terrazzo.tensor.parallel.parallelize_module, and pass initialize(mesh=...)"
        )
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise EngineConfigError(f"{_KEY}: the model is cut already: pass initialize(mesh=...) and leave the key out")
    applied: Any = sys.modules.get("transformers.distributed.tensor_parallel")
    if applied is None or applied.DTensor is not DTensor:
        raise EngineConfigError(
            f"{_KEY}: Transformers has PyTorch's DTensors: call terrazzo.install() before transformers is imported, or "
            "start the program with `terrazzo run`"
        )
    mine = mesh[_DIM]
    if not any(p.is_meta for p in model.parameters()):
        same_everywhere((*model.parameters(), *model.buffers()), axis_of(mine, 0))  # each rank cuts its own
    # A tied weight is cut under its first name, and tied again.
    names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    each = {name: style for name, style in named._expand_parallel_plan(plan).items() if name in names}
    applied.apply_tensor_parallelism(model, mine, each)
    named.tie_weights()
    return mesh


def _mesh(size: int, mesh: DeviceMesh | None, data_dim: str) -> DeviceMesh:
    if mesh is not None:
        if _DIM not in (mesh.mesh_dim_names or ()) or mesh[_DIM].size() != size:
            raise EngineConfigError(f"{_KEY} is {size}, but {mesh} has no dim {_DIM!r} of that size")
        return mesh
    world = dist.get_world_size()
    if world % size:
        raise EngineConfigError(f"{_KEY} {size} does not divide the {world} ranks")
    return init_device_mesh(device_type(), (world // size, size), mesh_dim_names=(data_dim, _DIM))
