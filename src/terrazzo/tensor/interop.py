"""Conversions to and from PyTorch's DTensor: the same local tensor under the other class, no copy, differentiable.

    import terrazzo.tensor.interop as interop

    theirs = interop.to_torch_dtensor(ours)
    ours = interop.from_torch_dtensor(theirs)

The order in which mesh dims cut one tensor dim is explicit in our layouts; PyTorch expresses an unusual order with
`_StridedShard`. The two agree where the dim divides evenly; a conversion that would change what a rank holds raises an
error. This is the only module of `terrazzo.tensor` that imports `torch.distributed.tensor`, and from it the classes
themselves, whose names `terrazzo.install()` replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from terrazzo.errors import DTensorError, PlacementsError
from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.layout.order import full_order, with_order, without_order
from terrazzo.layout.placement import _StridedShard as OurStridedShard
from terrazzo.tensor.convert import current_mesh
from terrazzo.tensor.dtensor import DTensor, wrap

# ------------------------------------------------------------------ placements


def to_torch_placements(
    placements: Sequence[Placement], mesh_shape: Sequence[int], order: Sequence[int] | None = None
) -> tuple[Any, ...]:
    """PyTorch's placements for ours; `order` says which mesh dims cut first, as `Layout.order` does.

    >>> to_torch_placements([Shard(0), Partial("max")], (2, 2))
    (Shard(dim=0), Partial(max))
    >>> to_torch_placements([Shard(0), Shard(0)], (2, 4), order=(1, 0))
    (_StridedShard(dim=0, sf=4), Shard(dim=0))
    """
    order = tuple(range(len(placements))) if order is None else tuple(order)
    result: list[Any] = []
    for p in with_order(placements, mesh_shape, order):
        if isinstance(p, Shard):
            result.append(TorchShard(p.dim))
        elif isinstance(p, OurStridedShard):
            result.append(_StridedShard(p.dim, split_factor=p.split_factor))
        elif isinstance(p, Partial):
            result.append(TorchPartial(p.reduce_op))
        else:
            result.append(TorchReplicate())
    return tuple(result)


def from_torch_placements(
    placements: Sequence[Any], mesh_shape: Sequence[int]
) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
    """Our placements and order for PyTorch's.

    >>> from_torch_placements([_StridedShard(0, split_factor=4), TorchShard(0)], (2, 4))
    ((Shard(dim=0), Shard(dim=0)), (1, 0))
    """
    try:
        return without_order([from_torch_placement(p) for p in placements], mesh_shape)
    except PlacementsError as error:
        raise DTensorError(str(error)) from None


def is_torch_placement(value: Any) -> bool:
    """Whether this is a placement of PyTorch's."""
    return isinstance(value, TorchPlacement)


def from_torch_placement(p: Any) -> Placement:
    """Our placement for one of PyTorch's; a `_StridedShard` stays one.

    >>> from_torch_placement(TorchShard(1))
    Shard(dim=1)
    """
    if isinstance(p, _StridedShard):
        return OurStridedShard(p.dim, split_factor=int(p.split_factor))
    if isinstance(p, TorchShard):
        return Shard(p.dim)
    if isinstance(p, TorchReplicate):
        return Replicate()
    if type(p) is TorchPartial:
        return Partial(p.reduce_op)
    raise DTensorError(f"{p!r} has no terrazzo counterpart: redistribute to Shard, Replicate or Partial first")


def _layout_of(spec: DTensorSpec, shape: Sequence[int]) -> Layout:
    mesh = current_mesh(spec.mesh)
    placements: tuple[Placement, ...] = tuple(from_torch_placement(p) for p in spec.placements)
    order: tuple[int, ...] | None = None
    explicit = getattr(spec, "shard_order", None)  # newer versions of torch store the order, too
    if explicit and not any(isinstance(p, _StridedShard) for p in spec.placements):
        order = full_order([entry.mesh_dims for entry in explicit], mesh.ndim)
    try:
        layout = Layout.of(mesh, placements, tuple(shape), order)
    except PlacementsError as error:
        raise DTensorError(str(error)) from None
    _check_order(layout)
    return layout


def _check_order(layout: Layout) -> None:
    if layout.order == tuple(range(len(layout.order))):
        return
    for dim, length in enumerate(layout.shape):
        cuts = layout.shard_order(dim)
        if list(cuts) != sorted(cuts) and length % prod(layout.mesh_shape[m] for m in cuts):
            raise DTensorError(
                f"mesh dims {list(cuts)} cut dim {dim} of length {length} unevenly in this order, for which PyTorch's "
                "_StridedShard and terrazzo's layouts give ranks different parts: redistribute the tensor to ordinary "
                "placements first"
            )


def _spec_of(layout: Layout, like: torch.Tensor, stride: tuple[int, ...]) -> DTensorSpec:
    _check_order(layout)
    placements = to_torch_placements(layout.placements, layout.mesh_shape, layout.order)
    return DTensorSpec(layout.mesh, placements, tensor_meta=TensorMeta(layout.shape, stride, like.dtype))


# ------------------------------------------------------------------ tensors


class _ToTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec, wanted: tuple[Any, ...]) -> TorchDTensor:
        ctx.wanted = wanted
        return _around(local.view_as(local), spec, local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad.placements != ctx.wanted:
            grad = grad.redistribute(placements=ctx.wanted)
        return grad.to_local(), None, None


def to_torch_dtensor(tensor: DTensor) -> TorchDTensor:
    """PyTorch's DTensor around the same local tensor; differentiable."""
    layout, local = tensor._layout, tensor._local
    spec = _spec_of(layout, local, tensor.stride())
    if not (local.requires_grad and torch.is_grad_enabled()):
        return _around(local.detach(), spec, False)
    dual = layout.dual
    return _ToTorch.apply(local, spec, to_torch_placements(dual.placements, dual.mesh_shape, dual.order))


def _around(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> TorchDTensor:
    """PyTorch's DTensor of a local tensor. It takes over the offset of a part of other memory as its own, by which
    `copy.deepcopy` believes that it has memory; so it is made of a tensor without one."""
    if not local.storage_offset():
        return TorchDTensor(local, spec, requires_grad=requires_grad)
    result = TorchDTensor(local.new_empty(0), spec, requires_grad=requires_grad)
    result._local_tensor = local
    return result


def from_torch_dtensor(tensor: TorchDTensor) -> DTensor:
    """Our DTensor around the local tensor of one of PyTorch's; differentiable."""
    if not isinstance(tensor, TorchDTensor):
        raise DTensorError(f"from_torch_dtensor takes a torch.distributed.tensor.DTensor, got {type(tensor).__name__}")
    layout = _layout_of(tensor._spec, tensor.shape)
    dual = layout.dual
    if tensor.requires_grad and torch.is_grad_enabled():
        wanted = to_torch_placements(dual.placements, dual.mesh_shape, dual.order)
        local = tensor.to_local(grad_placements=wanted)
    else:
        local = tensor._local_tensor.detach()
    return wrap(local.wait() if isinstance(local, AsyncCollectiveTensor) else local, layout)


# ------------------------------------------------------------------ modules


def convert_module(module: nn.Module, to: Literal["terrazzo", "torch"] = "terrazzo") -> nn.Module:
    """Convert a module's DTensor parameters and buffers to the other library's, in place; returns the module.

    Nothing is copied: the tensors of both libraries share memory. Tied parameters stay tied, gradients are converted,
    plain tensors stay as they are. Create the optimizer afterwards, because the parameters are new objects.
    """
    if to not in ("terrazzo", "torch"):
        raise ValueError(f"to must be 'terrazzo' or 'torch', not {to!r}")
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # old and new; keeping the old ones keeps their ids unique
    for submodule in module.modules():
        for registry in (submodule._parameters, submodule._buffers):
            for name, tensor in registry.items():
                if tensor is not None:
                    if id(tensor) not in known:
                        known[id(tensor)] = tensor, _converted(tensor, to)
                    registry[name] = known[id(tensor)][1]  # type: ignore[assignment]  # a parameter for a parameter
    return module


def _converted(tensor: torch.Tensor, to: str) -> torch.Tensor:
    convert: Any
    if to == "torch" and isinstance(tensor, DTensor):
        convert = to_torch_dtensor
    elif to == "terrazzo" and isinstance(tensor, TorchDTensor):
        convert = from_torch_dtensor
    else:
        return tensor
    result: torch.Tensor = convert(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        result = nn.Parameter(result, requires_grad=tensor.requires_grad)
        if tensor.grad is not None:
            result.grad = convert(tensor.grad.detach())
    return result


__all__ = [
    "convert_module",
    "from_torch_dtensor",
    "from_torch_placement",
    "from_torch_placements",
    "is_torch_placement",
    "to_torch_dtensor",
    "to_torch_placements",
]
