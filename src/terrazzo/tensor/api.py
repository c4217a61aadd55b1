"""Distributing what already exists: tensors and modules.

Distributing a module makes a new parameter in each place that has one, so two places that shared a plain parameter
would be trained separately. `SharedParameters` remembers the places, and makes them share the new parameter. A place
that an earlier call distributed is found through the plain parameter, which the remaining places still have.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from terrazzo._torch.modules import buffers_of, parameters_of
from terrazzo._torch.tensors import mark_as_parameter
from terrazzo.comm.axis import axis_of
from terrazzo.comm.collectives import broadcast, scatter, scatter_cut
from terrazzo.comm.wrapped import copied, cut, is_wrapper
from terrazzo.errors import DTensorArgumentError, DTensorError, ParallelPlanError
from terrazzo.layout import Layout, Placement, Replicate, Shard
from terrazzo.tensor.convert import current_mesh, placements_on
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.foreign import check_plain, refuse_packed, refuse_subclass
from terrazzo.tensor.redistribute import redistribute_local


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Make a DTensor of a global tensor that every rank passes.

    The values are those of the rank at position `src_data_rank` of each mesh dimension; with None every rank uses
    its own values and nothing is sent. The result is a leaf: use `DTensor.from_local` inside a differentiated
    computation.

    >>> from terrazzo.tensor import Shard, init_device_mesh
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    >>> x.shape, x.placements, x.to_local().shape
    (torch.Size([4, 2]), (Shard(dim=0),), torch.Size([4, 2]))

    Args:
        tensor: The global tensor. Its values matter on the source rank only, its shape and dtype on every rank.
        device_mesh: The mesh, or None for that of the enclosing `with mesh:`.
        placements: One per mesh dimension; None replicates. Partial makes terms that reduce to the tensor's values.
        src_data_rank: The position on each mesh dimension of the rank whose values are used, or None.
    """
    mesh = current_mesh(device_mesh)
    placed = placements_on(mesh, placements)
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise DTensorArgumentError(
                f"distribute_tensor cannot move a DTensor on {tensor.device_mesh} to a different device mesh, {mesh}: "
                "use tensor.redistribute(mesh, placements)"
            )
        if tensor._layout is not Layout.of(mesh, placed, tensor.shape):
            raise DTensorArgumentError(
                f"distribute_tensor cannot move a DTensor placed {list(tensor.placements)} to a different placements "
                f"list, {list(placed)}: use tensor.redistribute(placements=...)"
            )
        return tensor
    check_plain("distribute_tensor", tensor)
    if not tensor.is_leaf:
        raise DTensorError(
            "distribute_tensor can only distribute leaf tensors, but this one has a grad_fn: use "
            "DTensor.from_local(...).redistribute(...), which is differentiable"
        )
    refuse_packed("distribute_tensor", tensor)
    wanted = Layout.of(mesh, placed, tuple(tensor.shape))
    # Partial, and a dim that is cut in pieces, are made from replicas, below.
    layout = wanted.with_placements((Replicate(),) * mesh.ndim) if wanted.packed else wanted.dual
    local = tensor.detach()
    if local.device.type != mesh.device_type and local.device.type != "meta":
        local = local.to(mesh.device_type)
    if layout.coord is None:
        local = local.new_zeros(layout.local_shape)
    elif is_wrapper(local):
        local = _part_of_wrapper(local, layout, src_data_rank)
    elif src_data_rank is None or local.device.type == "meta":
        local = local[layout.box().slices()]
    else:
        refuse_subclass("distribute_tensor", local)
        local = _from_source(local, layout, src_data_rank)
    if local.device.type != "meta" and not is_wrapper(local):
        # A contiguous copy: the caller's tensor may change later, and a shard must not keep the whole tensor alive.
        local = local.clone(memory_format=torch.contiguous_format)
    result = wrap(redistribute_local(local, layout, wanted), wanted).requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        mark_as_parameter(result)
    return result


def _from_source(local: torch.Tensor, layout: Layout, source: int) -> torch.Tensor:
    """Mesh dim by mesh dim, in the order of the cuts: the source rank sends each rank its chunk or a copy."""
    for m in layout.order:
        axis = axis_of(layout.mesh, m)
        if axis.size == 1:
            continue
        if not 0 <= source < axis.size:
            raise DTensorArgumentError(f"src_data_rank {source} is outside mesh dimension {m} of size {axis.size}")
        placement = layout.placements[m]
        if isinstance(placement, Shard):
            sizes = layout.part_sizes((m,), placement.dim, local.shape[placement.dim])
            shape = list(local.shape)
            shape[placement.dim] = sizes[axis.index]
            parts = [p.contiguous() for p in local.split(sizes, placement.dim)] if axis.index == source else None
            local = scatter(parts, axis, source, tuple(shape), local)
        else:
            local = broadcast(local.contiguous(), axis, source)
    return local


def _part_of_wrapper(whole: torch.Tensor, layout: Layout, source: int | None) -> torch.Tensor:
    """`_from_source` for a wrapper, which is cut by its own operations; without a source every rank cuts its own."""
    local = whole
    for m in layout.order:
        axis, placement = axis_of(layout.mesh, m), layout.placements[m]
        if axis.size > 1 and isinstance(placement, Shard):
            sizes = layout.part_sizes((m,), placement.dim, local.shape[placement.dim])
            if source is None:
                local = cut(local, placement.dim, sizes)[axis.index]
            else:
                local = scatter_cut(local, axis, source, placement.dim, sizes)
        elif axis.size > 1 and source is not None:
            local = broadcast(local, axis, source)
    return local if source is not None and local is not whole else copied(local)


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Make every parameter and buffer of `module` a DTensor, in place, and convert its inputs and outputs.

    >>> from terrazzo.tensor import Shard, init_device_mesh
    >>> def shard_rows(name, module, mesh):
    ...     if isinstance(module, nn.Linear):
    ...         module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))
    >>> model = distribute_module(nn.Linear(4, 2), init_device_mesh("cpu", (1,)), shard_rows)
    >>> model.weight.placements, model.bias.placements
    ((Shard(dim=0),), (Replicate(),))

    Args:
        module: The module; it is changed and returned.
        device_mesh: The mesh, or None for that of the enclosing `with mesh:`.
        partition_fn: Called as `partition_fn(name, submodule, mesh)` for each submodule, to distribute parameters;
            parameters that it leaves plain are replicated. Parameters that modules share stay shared.
        input_fn: Called as `input_fn(module, inputs, mesh)` before forward; returns the new inputs.
        output_fn: Called as `output_fn(module, outputs, mesh)` after forward; returns the new outputs.
    """
    mesh = current_mesh(device_mesh)
    before = None if input_fn is None else _of_three("input_fn", input_fn)
    after = None if output_fn is None else _of_three("output_fn", output_fn)
    shared = SharedParameters(module)
    if partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, mesh)
        shared.share_again()
    replicate_rest(module, mesh)
    shared.share_again()
    convert_calls(module, mesh, before, after)
    return module


def convert_calls(
    module: nn.Module, mesh: DeviceMesh, before: Callable[..., Any] | None, after: Callable[..., Any] | None
) -> None:
    """Pass a module's inputs through `before(module, inputs, mesh)`, and its outputs through `after` likewise."""
    if before is not None:
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs, mesh))
    if after is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: after(mod, outputs, mesh))


def replicate_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate those parameters and buffers that are still plain tensors."""
    for submodule in module.modules():
        for name, parameter in parameters_of(submodule).items():
            if parameter is not None and not isinstance(parameter, DTensor):
                whole = distribute_tensor(parameter.detach(), mesh)
                submodule.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
        buffers = buffers_of(submodule)
        for name, buffer in buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                buffers[name] = distribute_tensor(buffer, mesh)


def _of_three(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with arguments (module, values, mesh); a function of (values, mesh) is deprecated, as in PyTorch."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin, for example, has no signature
        return function
    if _takes(signature, 3):
        return function
    if not _takes(signature, 2):
        raise DTensorArgumentError(f"distribute_module: {what} takes (module, values, mesh), this one is {signature}")
    warnings.warn(
        f"Deprecating {what} of two arguments (values, mesh): let it take (module, values, mesh)",
        FutureWarning,
        stacklevel=3,
    )
    return lambda _module, values, mesh: function(values, mesh)


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


# ------------------------------------------------------------------ parameters that modules share


@dataclass(frozen=True, slots=True)
class _Place:
    """A module that has a parameter, the parameter's name there, and its full name."""

    owner: nn.Module
    name: str
    path: str

    @property
    def parameter(self) -> nn.Parameter | None:
        return parameters_of(self.owner).get(self.name)


@dataclass(frozen=True, slots=True)
class _Distributed:
    """Where a plain parameter was distributed; valid while the module is alive and still has the new parameter."""

    owner: weakref.ref[nn.Module]
    name: str
    path: str
    parameter: weakref.ref[nn.Parameter]

    def find(self) -> Any:
        owner, parameter = self.owner(), self.parameter()
        return parameter if owner is not None and parameters_of(owner).get(self.name) is parameter else None


# Keyed by the plain parameter, as long as it is alive.
_distributed: Any = WeakTensorKeyDictionary()


class SharedParameters:
    """The places of each plain parameter of a module at the time of creation."""

    def __init__(self, module: nn.Module) -> None:
        self._places: dict[int, tuple[nn.Parameter, list[_Place]]] = {}
        for path, submodule in module.named_modules():
            for name, parameter in parameters_of(submodule).items():
                if parameter is not None and not isinstance(parameter, DTensor):
                    place = _Place(submodule, name, f"{path or type(submodule).__name__}.{name}")
                    self._places.setdefault(id(parameter), (parameter, []))[1].append(place)

    def share_again(self) -> None:
        """Set in all places of a parameter the first DTensor that any of them got; all must be placed alike."""
        for plain, places in self._places.values():
            now: list[tuple[str, Any]] = [
                (place.path, p) for place in places if isinstance(p := place.parameter, DTensor)
            ]
            if not now:
                continue
            earlier = _distributed.get(plain)
            found = None if earlier is None else earlier.find()
            if found is not None and all(found is not p for _, p in now):
                now.insert(0, (earlier.path, found))
            path, shared = now[0]
            for other, parameter in now:
                if parameter._layout is not shared._layout:
                    raise ParallelPlanError(
                        f"{path} and {other} share one parameter, but the plan places it in two ways: "
                        f"{list(shared.placements)} on {shared.device_mesh} and {list(parameter.placements)} on "
                        f"{parameter.device_mesh}. Place both alike (an nn.Embedding cut by rows and an nn.Linear cut "
                        "by columns are), or give one of the modules its own copy before"
                    )
            for place in places:
                if place.parameter is not shared:
                    place.owner.register_parameter(place.name, shared)
            if found is None:
                at = places[0]
                _distributed[plain] = _Distributed(weakref.ref(at.owner), at.name, path, weakref.ref(shared))
