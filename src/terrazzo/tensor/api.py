"""Distributing what already exists: tensors and modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.modules import buffers_of, parameters_of
from terrazzo._torch.tensors import mark_as_parameter
from terrazzo.comm.axis import axis_of
from terrazzo.comm.collectives import broadcast, scatter
from terrazzo.errors import DTensorError
from terrazzo.layout import Layout, Placement, Replicate, Shard
from terrazzo.tensor.convert import current_mesh
from terrazzo.tensor.dtensor import DTensor, wrap


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Make a DTensor of a global tensor that every rank has, or could have.

    The values are those of the rank at position `src_data_rank` of each mesh dimension; with None every rank uses
    its own values and nothing is sent. The result is a leaf: use `DTensor.from_local` inside a differentiated
    computation.

    Args:
        tensor: The global tensor. Its values matter on the source rank only, its shape and dtype everywhere.
        device_mesh: The mesh, or None for that of the enclosing `with mesh:`.
        placements: One per mesh dimension; None replicates.
        src_data_rank: Where the values come from.
    """
    mesh = current_mesh(device_mesh)
    placed = (Replicate(),) * mesh.ndim if placements is None else tuple(placements)
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise DTensorError(
                "distribute_tensor got a DTensor on another mesh: use tensor.redistribute(mesh, placements)"
            )
        if tensor._layout is not Layout.of(mesh, placed, tensor.shape):
            raise DTensorError(
                f"distribute_tensor got a DTensor placed {list(tensor.placements)}: use "
                "tensor.redistribute(placements=...) to "
                f"place it as {list(placed)}"
            )
        return tensor
    if not tensor.is_leaf:
        raise DTensorError(
            "distribute_tensor takes a leaf tensor, this one has a graph: use DTensor.from_local(...).redistribute(...)"
        )
    if any(p.is_partial() for p in placed):
        raise DTensorError("distribute_tensor makes Shard and Replicate; terms (Partial) come from DTensor.from_local")
    layout = Layout.of(mesh, placed, tuple(tensor.shape))
    local = tensor.detach()
    if local.device.type != mesh.device_type and local.device.type != "meta":
        local = local.to(mesh.device_type)
    if layout.coord is None:
        local = local.new_empty((0,))
    elif src_data_rank is None or local.device.type == "meta":
        local = local[layout.box().slices()]
    else:
        local = _from_source(local, layout, src_data_rank)
    if local.device.type != "meta":
        # An own, dense copy: the caller's tensor may change later, and shards must not keep the whole alive.
        local = local.clone(memory_format=torch.contiguous_format)
    result = wrap(local, layout).requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        mark_as_parameter(result)
    return result


def _from_source(local: torch.Tensor, layout: Layout, source: int) -> torch.Tensor:
    """Mesh dim by mesh dim, in the order of the cuts: the source rank gives each rank its chunk or a copy."""
    for m in layout.order:
        axis = axis_of(layout.mesh, m)
        if axis.size == 1:
            continue
        if not 0 <= source < axis.size:
            raise DTensorError(f"src_data_rank {source} is outside mesh dimension {m} of size {axis.size}")
        placement = layout.placements[m]
        if isinstance(placement, Shard):
            sizes = layout.part_sizes((m,), placement.dim, local.shape[placement.dim])
            shape = list(local.shape)
            shape[placement.dim] = sizes[axis.index]
            parts = [p.contiguous() for p in local.split(sizes, placement.dim)] if axis.index == source else None
            local = scatter(parts, axis, source, tuple(shape), local.dtype, local.device)
        else:
            local = broadcast(local.contiguous(), axis, source)
    return local


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Make every parameter and buffer of `module` a DTensor, in place, and say how inputs and outputs are converted.

    Args:
        module: The module; it is changed and returned.
        device_mesh: The mesh, or None for that of the enclosing `with mesh:`.
        partition_fn: Called as `partition_fn(name, submodule, mesh)` for each submodule, to distribute parameters;
        what it
            leaves plain is replicated.
        input_fn: Called as `input_fn(module, inputs, mesh)` before forward; returns the new inputs.
        output_fn: Called as `output_fn(module, outputs, mesh)` after forward; returns the new outputs.
    """
    mesh = current_mesh(device_mesh)
    done: dict[int, nn.Parameter] = {}

    def replicate_rest(submodule: nn.Module) -> None:
        for name, parameter in parameters_of(submodule).items():
            if parameter is not None and not isinstance(parameter, DTensor):
                known = done.get(id(parameter))
                if known is None:
                    known = nn.Parameter(distribute_tensor(parameter.detach(), mesh), parameter.requires_grad)
                    done[id(parameter)] = known
                    done[id(known)] = known
                submodule.register_parameter(name, known)
        buffers = buffers_of(submodule)
        for name, buffer in buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                buffers[name] = distribute_tensor(buffer, mesh)

    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        replicate_rest(submodule)
    if input_fn is not None:
        before = input_fn
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs, mesh))
    if output_fn is not None:
        after = output_fn
        module.register_forward_hook(lambda mod, inputs, outputs: after(mod, outputs, mesh))
    return module
