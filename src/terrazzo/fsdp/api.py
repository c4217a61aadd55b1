"""`fully_shard` itself: which parameters make a group, and what the module becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.modules import buffers_of, register_as_fully_sharded
from terrazzo.errors import FSDPValueError
from terrazzo.fsdp.group import Group, group_of
from terrazzo.fsdp.meshes import DataMesh, DataParallelMeshDims
from terrazzo.fsdp.misuse import watch_optimizers
from terrazzo.fsdp.module import FSDPModule, keep_state_dicts_sharded, make_fsdp_module
from terrazzo.fsdp.parameter import ShardedParameter, ShardPlacementFn, collect, mark_ignored, mark_replaced, placed
from terrazzo.fsdp.policies import MixedPrecisionPolicy, OffloadPolicy
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
    """Shard the parameters of a module over the ranks that train it on different data, in place.

    All parameters of `module` that no earlier call took become one group: gathered together before forward and before
    backward, their gradients reduced together after backward. So call it on the inner modules first and on the whole
    model last. Between steps parameters are DTensors, each rank holding its part; build the optimizer afterwards.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())

    Args:
        module: A module, or several to be treated as one group, of which each then behaves as if it had been given.
        mesh: 1-D: its ranks shard. 2-D: ranks along its first dim replicate, those along its second shard (HSDP).
            None: all ranks shard.
        reshard_after_forward: True frees the parameters after forward and gathers them again in backward; False keeps
            them; a number keeps each rank's part over that many neighbouring ranks, so that backward gathers among
            these only. None is True, but False for the root, whose backward follows at once.
        shard_placement_fn: Given a parameter, returns along which dim it is cut, as a `Shard`, or None for dim 0. Dims
            need not divide evenly. A `ShardPlacementResult` names a mesh besides, for this parameter alone.
        mp_policy: In which precision to compute and to reduce.
        offload_policy: Where sharded state rests.
        ignored_params: Parameters to leave alone: they are neither sharded nor moved, and their gradients not reduced.
        dp_mesh_dims: For parameters that are DTensors on all of `mesh`, replicated on its data-parallel dims: which of
            its dims these are. Forward then sees DTensors on `mesh`.

    Returns:
        `module`, whose class now is an `FSDPModule` as well.
    """
    modules: list[nn.Module] = [module] if isinstance(module, nn.Module) else list(module)
    _check_arguments(modules, reshard_after_forward)
    data = DataMesh.of(mesh, dp_mesh_dims)
    settings = Settings(data, mp_policy, offload_policy)
    ignored = set() if ignored_params is None else set(ignored_params)
    for parameter in ignored:
        mark_ignored(parameter)
    found = collect(modules, lambda m: group_of(m) is not None, ignored)
    params: list[ShardedParameter] = []
    meshes: dict[DeviceMesh, DataMesh] = {data.mesh: data}
    for name, parameter, slots in found:
        dim, own = placed(name, parameter, shard_placement_fn, data)
        if own is not None and own not in meshes:
            meshes[own] = DataMesh.of(own)
        params.append(ShardedParameter(name, parameter, slots, dim, data if own is None else meshes[own]))
    group = Group(modules, params, settings, reshard_after_forward)
    Unit([group])
    for name, parameter, _ in found:
        mark_replaced(parameter, name)
    _move_buffers(modules, data.device)
    keep_state_dicts_sharded(group)
    for each in modules:
        make_fsdp_module(each)
        register_as_fully_sharded(each)
    watch_optimizers()
    return module


def _check_arguments(modules: list[nn.Module], reshard_after_forward: Any) -> None:
    if not modules:
        raise FSDPValueError("fully_shard got an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise FSDPValueError(f"fully_shard takes modules, got {type(module).__name__}")
        if isinstance(module, FSDPModule):
            raise FSDPValueError(f"fully_shard was called twice on the same {type(module).__name__}")
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise FSDPValueError(
                f"{type(module).__name__} has no forward, so nothing would gather its parameters: call fully_shard on "
                "the modules in it, or on a list of them to make them one group"
            )
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool | int)):
        raise FSDPValueError(
            f"reshard_after_forward is True, False, None or a number of ranks, got {reshard_after_forward!r}"
        )


def _move_buffers(modules: list[nn.Module], device: torch.device) -> None:
    """Buffers are not sharded, but have to be where the module computes."""
    if device.type == "cpu":
        return
    for module in modules:
        for inner in module.modules():
            buffers = buffers_of(inner)
            for name, buffer in buffers.items():
                if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                    buffers[name] = buffer.to(device)
