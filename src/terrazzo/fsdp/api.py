"""`fully_shard`: makes a group of parameters, and changes the module's class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.autograd import accumulation_hooks, gradient_hooks
from terrazzo._torch.modules import buffers_of, register_as_fully_sharded
from terrazzo._torch.tensors import same_kind_of_storage
from terrazzo.errors import FSDPTypeError, FSDPValueError
from terrazzo.fsdp.group import ATTRIBUTE, Group, group_of
from terrazzo.fsdp.meshes import DataMesh, DataParallelMeshDims
from terrazzo.fsdp.misuse import remark_on_hooks, watch_optimizers
from terrazzo.fsdp.module import FSDPModule, keep_state_dicts_sharded, make_fsdp_module
from terrazzo.fsdp.parameter import (
    IGNORED,
    REPLACED,
    ShardedParameter,
    ShardPlacementFn,
    collect,
    mark,
    placed,
    share_scalars,
)
from terrazzo.fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from terrazzo.fsdp.run.forming import join
from terrazzo.fsdp.run.unit import Unit
from terrazzo.fsdp.settings import Settings


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (immutable)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of a module over the data-parallel ranks, in place.

    All parameters of `module` that no earlier call took become one group: they are gathered together before forward and
    before backward, and their gradients are reduced together after backward. So call it on the inner modules first and
    on the whole model last, then construct the optimizer: parameters are then DTensors, of which each rank has a shard.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> for block in (model[0], model[2]):
    ...     _ = fully_shard(block)
    >>> _ = fully_shard(model)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> model[0].weight.placements, model[0].weight.grad.placements
    ((Shard(dim=0),), (Shard(dim=0),))

    Args:
        module: A module, or a list of modules whose parameters form one group.
        mesh: 1-D: the parameters are sharded over its ranks. 2-D: they are replicated along the first dim and sharded
            along the second (HSDP). None: they are sharded over all ranks.
        reshard_after_forward: True frees the unsharded parameters after forward and gathers them again in backward;
            False keeps them. A number N keeps shards over N neighbouring ranks after forward, so that backward gathers
            only among these. None means True, but False for the root module, whose backward follows at once;
            and the memory of the group that ran last stays until backward begins with it.
        shard_placement_fn: Called with a parameter; returns a `Shard` with the dim along which to shard it, or None
            for dim 0. The size need not divide evenly. A `ShardPlacementResult` also gives this parameter a mesh of
            its own.
        mp_policy: The dtypes in which to compute and to reduce.
        offload_policy: Whether sharded parameters, gradients and optimizer state are kept on the CPU.
        ignored_params: Parameters that are not sharded and not moved, and whose gradients are not reduced.
        dp_mesh_dims: Which dims of `mesh` are data-parallel, if the parameters are DTensors on all of `mesh`,
            replicated on these dims. In forward they are then DTensors on `mesh`.

    Returns:
        `module`, whose class is now also a subclass of `FSDPModule`.
    """
    modules: list[nn.Module] = [module] if isinstance(module, nn.Module) else list(module)
    _check_arguments(modules, reshard_after_forward)
    _check_policies(mp_policy, offload_policy)
    if not isinstance(offload_policy, OffloadPolicy) and hasattr(offload_policy, "pin_memory"):  # PyTorch's class
        offload_policy = CPUOffloadPolicy(offload_policy.pin_memory)
    data = DataMesh.of(mesh, dp_mesh_dims)
    settings = Settings(data, mp_policy, offload_policy)
    ignored = set() if ignored_params is None else set(ignored_params)
    for parameter in ignored:
        mark(parameter, IGNORED, "")
    found = collect(modules, lambda m: group_of(m) is not None, ignored)
    params: list[ShardedParameter] = []
    meshes: dict[DeviceMesh, DataMesh] = {data.mesh: data}
    for name, parameter, slots in found:
        dim, own = placed(name, parameter, shard_placement_fn, data)
        if own is not None and own not in meshes:
            meshes[own] = DataMesh.of(own)
        on = data if own is None else meshes[own]
        params.append(ShardedParameter(name, parameter, slots, dim, on if parameter.ndim else on.of_scalars))
    share_scalars(params)
    group = Group(modules, params, settings, reshard_after_forward)
    Unit([group])
    for each in modules:  # only now, because what failed may be called again with other arguments
        each.__dict__[ATTRIBUTE] = group
    for name, parameter, _ in found:
        mark(parameter, REPLACED, name)
    remark_on_hooks(
        [name for name, parameter, _ in found if gradient_hooks(parameter) or accumulation_hooks(parameter)]
    )
    _move_buffers(modules, data.device)
    keep_state_dicts_sharded(group)
    for each in modules:
        make_fsdp_module(each)
        register_as_fully_sharded(each)
    join(group)
    watch_optimizers()
    return module


def _check_arguments(modules: list[nn.Module], reshard_after_forward: Any) -> None:
    if not modules:
        raise FSDPValueError("fully_shard got an empty list of modules: pass at least one")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise FSDPValueError(f"fully_shard expected an nn.Module or a list of them, not {type(module).__name__}")
        if isinstance(module, FSDPModule):
            raise FSDPValueError(
                f"fully_shard was called twice on the same {type(module).__name__}. Each distinct composable "
                "distributed API can only be applied to a module once: leave out one of the calls"
            )
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise FSDPValueError(
                f"fully_shard does not support containers that do not implement forward, before which parameters are "
                f"gathered: {type(module).__name__}; call it on the modules in this one, or on a list of them to make "
                "them one group"
            )
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool | int)):
        raise FSDPValueError(
            f"reshard_after_forward must be True, False, None or a number of ranks, not {reshard_after_forward!r}"
        )


def _check_policies(mp_policy: Any, offload_policy: Any) -> None:
    """PyTorch's classes will do."""
    if not hasattr(mp_policy, "param_dtype"):
        dtype = mp_policy if isinstance(mp_policy, torch.dtype) else torch.bfloat16
        raise FSDPTypeError(
            f"fully_shard's mp_policy is a MixedPrecisionPolicy, not {mp_policy!r}: write "
            f"MixedPrecisionPolicy(param_dtype={dtype})"
        )
    if not isinstance(offload_policy, OffloadPolicy) and type(offload_policy).__name__ not in _OFFLOADS:
        raise FSDPTypeError(
            f"fully_shard's offload_policy is an OffloadPolicy, not {offload_policy!r}: write CPUOffloadPolicy() to "
            "keep parameters on the CPU, or leave it out"
        )


_OFFLOADS = ("OffloadPolicy", "CPUOffloadPolicy")


def _move_buffers(modules: list[nn.Module], device: torch.device) -> None:
    """Move buffers to the device where the module computes. They are not sharded."""
    if device.type == "cpu":
        return
    for module in modules:
        for inner in module.modules():
            buffers = buffers_of(inner)
            for name, buffer in buffers.items():
                if buffer is None or buffer.device == device or buffer.device.type == "meta":
                    continue
                moved = buffer.to(device)
                if type(buffer) is not torch.Tensor:
                    buffers[name] = moved
                elif same_kind_of_storage(buffer, moved):
                    buffer.data = moved  # other modules may have the same tensor
                else:
                    torch.utils.swap_tensors(buffer, moved)
