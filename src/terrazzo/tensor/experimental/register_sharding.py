"""`register_sharding`: a user's sharding rule for an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from terrazzo._torch.dispatching import OpOverload, OpOverloadPacket, writes_arguments
from terrazzo.errors import DTensorError
from terrazzo.layout import Placement
from terrazzo.tensor.dispatch.keys import any_number, forget
from terrazzo.tensor.dispatch.overrides import OVERRIDES, on_meta
from terrazzo.tensor.dispatch.spec import Acceptable, Call, Spec
from terrazzo.tensor.dispatch.structure import map_tensors

Strategy: TypeAlias = Callable[..., Sequence[tuple[Sequence[Placement | None], Sequence[Placement | None]]]]
_F = TypeVar("_F", bound=Strategy)


def register_sharding(op: OpOverload | Sequence[OpOverload]) -> Callable[[_F], _F]:
    """Decorate a function that says how an operator may be sharded along one mesh dim; it replaces our own rule.

    The function is called with the operator's arguments, with objects that have `shape`, `ndim` and `placements` in
    place of DTensors. It returns pairs: the placements of the outputs, and the placements of the arguments that they
    require (None for an argument that is not a tensor). For each mesh dim the cheapest pair is used. Functions that
    decompose into the operator (`torch.softmax` for `aten._softmax`) follow it, too.

    The operator must be able to compute the shape of its results: custom operators need `torch.library.register_fake`.

        @register_sharding(torch.ops.aten.relu.default)
        def relu_sharding(x):
            everywhere = ([Replicate()], [Replicate()])
            return [everywhere, *(([Shard(d)], [Shard(d)]) for d in range(x.ndim))]

    Args:
        op: An operator, or several with the same arguments.
    """
    ops = _as_ops(op)

    def register(strategy: _F) -> _F:
        for each in ops:
            OVERRIDES[each] = _rule_of(each, strategy)
            any_number.discard(each)
        forget()
        return strategy

    return register


def unregister_sharding(op: OpOverload | Sequence[OpOverload]) -> None:
    """Undo `register_sharding`: our own rules for the operators, if any, apply again."""
    for each in _as_ops(op):
        OVERRIDES.pop(each, None)
    forget()


def _as_ops(op: OpOverload | Sequence[OpOverload]) -> tuple[OpOverload, ...]:
    ops = (op,) if isinstance(op, (OpOverload, OpOverloadPacket)) else tuple(op)
    for each in ops:
        if not isinstance(each, OpOverload):
            raise DTensorError(
                f"register_sharding takes operators such as torch.ops.aten.relu.default, not {each!r}"
                + (f": pass an overload, one of {each.overloads()}" if isinstance(each, OpOverloadPacket) else "")
            )
        if writes_arguments(each):
            raise DTensorError(f"register_sharding: {each} writes its arguments; register its functional form instead")
    return ops


def _rule_of(op: OpOverload, strategy: Strategy) -> Callable[..., Spec]:
    def rule(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Spec:
        shapes = _output_shapes(op, args, kwargs)
        acceptable = tuple(
            _acceptable(op, call, outs, ins, len(shapes)) for outs, ins in strategy(*call.args, **call.kwargs)
        )
        if not acceptable:
            raise DTensorError(
                f"the sharding function registered for {op} returned no pairs for operands {list(call.operands)}"
            )
        dims = [tuple(range(o.ndim)) for o in call.operands]
        return Spec(dims, [tuple(range(len(s))) for s in shapes], shapes, acceptable=acceptable)

    return rule


def _acceptable(
    op: OpOverload, call: Call, outs: Sequence[Placement | None], ins: Sequence[Placement | None], outputs: int
) -> Acceptable:
    placed_outs = tuple(p for p in outs if p is not None)
    leaves = _paths(call.args, ())
    for name, value in call.kwargs.items():
        leaves += _paths(value, (name,))
    if len(ins) == len(leaves):
        by_path = dict(zip(leaves, ins, strict=True))
        placed_ins = tuple(p for o in call.operands if (p := by_path[o.path]) is not None)
    else:
        placed_ins = tuple(p for p in ins if p is not None)
    if len(placed_ins) != len(call.operands) or len(placed_outs) != outputs:
        raise DTensorError(
            f"the sharding function registered for {op} gave placements for {len(placed_ins)} inputs and "
            f"{len(placed_outs)} outputs: {(list(outs), list(ins))}; this call has {len(call.operands)} DTensors and "
            f"{outputs} outputs"
        )
    return Acceptable(placed_ins, placed_outs)


def _paths(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    if isinstance(value, (list, tuple)):
        return [p for i, v in enumerate(value) for p in _paths(v, (*path, i))]
    return [path]


def _output_shapes(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    meta_args, meta_kwargs = map_tensors(list(args), on_meta), map_tensors(dict(kwargs), on_meta)
    try:
        with torch.no_grad():
            result = op(*meta_args, **meta_kwargs)
    except NotImplementedError as error:
        raise DTensorError(
            f"{op} cannot compute the shape of its results: register a fake implementation with "
            "torch.library.register_fake"
        ) from error
    shapes: list[tuple[int, ...]] = []
    map_tensors(result, lambda t: shapes.append(tuple(t.shape)))
    return shapes
