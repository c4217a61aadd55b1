"""Operations on a rank outside the mesh of their DTensors.

Such a rank holds no elements and does not communicate, but it runs the same program: it gets DTensors with the same
shapes and layouts as the ranks inside the mesh. Only results that depend on values cannot be given there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from terrazzo.errors import DTensorError
from terrazzo.tensor.dispatch.planner import make_plan
from terrazzo.tensor.dispatch.spec import HALF, Call
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.ops.table import apply_rule


def run_outside_mesh(call: Call, args: Sequence[Any], loc: Sequence[Any], kw: Mapping[str, Any]) -> Any:
    """The result of `call` on a rank that holds none of its operands."""
    if call.inplace:
        return args[0]
    spec = apply_rule(call)
    spec = None if spec is None else spec.for_locals(loc, kw)
    plan = None if spec is None else make_plan(call, spec)
    if plan is None:
        raise DTensorError(
            f"{call.name}: this rank is outside the mesh {call.operands[0].layout.mesh}, and the shape of the result "
            "is not known without the values; call this on ranks of the mesh only, or redistribute the tensor to a "
            "mesh of all ranks first"
        )
    dtype = _common_dtype(args)
    joins = plan.joined is not None and (not plan.joined.half_only or dtype in HALF)
    outs = plan.joined_outs if joins else plan.outs
    nothing = [torch.zeros(out.local_shape, dtype=dtype) for out in outs]
    operands = [o._local for o in _operands(args) if o._local.requires_grad]
    if operands and torch.is_grad_enabled() and (dtype.is_floating_point or dtype.is_complex):
        nothing = list(_OfNothing.apply(len(operands), *operands, *nothing))
    results = [wrap(local, out) for local, out in zip(nothing, outs, strict=True)]
    return results[0] if len(results) == 1 else tuple(results)


class _OfNothing(torch.autograd.Function):
    """Connects results to the operands in the autograd graph, so that backward runs here as on the other ranks."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.operands = [(t.shape, t.dtype, t.device) for t in tensors[:count]]
        return tuple(t.clone() for t in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.operands]
        return (None, *zeros, *(None for _ in grads))


def _operands(values: Sequence[Any]) -> list[DTensor]:
    found: list[DTensor] = []
    for v in values:
        if isinstance(v, DTensor):
            found.append(v)
        elif isinstance(v, (list, tuple)):
            found += [x for x in v if isinstance(x, DTensor)]
    return found


def _common_dtype(values: Sequence[Any]) -> torch.dtype:
    found = [o._local.dtype for o in _operands(values)]
    result = found[0] if found else torch.get_default_dtype()
    for other in found[1:]:
        result = torch.promote_types(result, other)
    return result
