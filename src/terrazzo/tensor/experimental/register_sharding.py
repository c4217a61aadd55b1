"""Users' operations: a sharding rule, the loops, or a decomposition, for an operator or a whole function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from terrazzo._torch.dispatching import OpOverload, OpOverloadPacket, writes_arguments
from terrazzo.errors import DTensorError
from terrazzo.layout import Placement
from terrazzo.tensor.dispatch.keys import any_number, forget
from terrazzo.tensor.dispatch.overrides import OVERRIDES, Decomposed, on_meta
from terrazzo.tensor.dispatch.spec import Acceptable, Call, Spec
from terrazzo.tensor.dispatch.structure import map_tensors
from terrazzo.tensor.ops.loops import loops

Strategy: TypeAlias = Callable[..., Sequence[tuple[Sequence[Placement | None], Sequence[Placement | None]]]]
_F = TypeVar("_F", bound=Strategy)
_D = TypeVar("_D", bound=Callable[..., Any])
Function: TypeAlias = Callable[..., Any]


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


def register_loops(
    op: Function | Sequence[Function],
    text: str,
    *,
    sums: str = "",
    reduce: Mapping[str, str] | None = None,
    whole: str = "",
    linear: str | Sequence[Sequence[int]] = (),
) -> None:
    """Say by its loops how an operation may be sharded; this replaces our own rule.

    `"mk, kn -> mn"` has a term for each tensor among the arguments, in their order, and for each result. Each letter is
    a loop that may be sharded. `...` at the beginning of a term are batch dims, which broadcast; `_` is a dim that
    stays whole. Sharding a loop shards every dim with its letter. Calls whose tensors do not fit are replicated.

    The operation must be able to compute the shape of its results without data: custom operators need
    `torch.library.register_fake`. `terrazzo.testing.check_rule` finds wrong and missing loops.

        register_loops(torch.ops.mine.gated.default, "...f, ...f -> ...f")

    Args:
        op: An operator (`torch.ops.mine.gated.default`) or a function of PyTorch's (`torch.softmax`), or several.
        text: The loops.
        sums: The loops that are in no result because they are summed.
        reduce: Other loops that are in no result, with their reductions: `{"k": "max"}`.
        whole: Loops that are not sharded.
        linear: Where partial operands may give a partial result: in `"each"` operand by itself, as in a product, in all
            `"together"`, as in a sum, or in groups of operands by their numbers.
    """
    parsed = loops(text, sums=sums, reduce=reduce, whole=whole, linear=linear)

    def rule(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Spec | None:
        shapes = _output_shapes(call.func, args, kwargs)
        if len(shapes) != len(parsed.outs):
            raise DTensorError(
                f'{call.name} returns {len(shapes)} tensors, but "{text}" has {len(parsed.outs)} results'
            )
        return parsed.spec(call.operands, shapes)

    _register(op, rule)


def register_decomposition(op: Function | Sequence[Function]) -> Callable[[_D], _D]:
    """Decorate a function of DTensors that computes an operation from others; it replaces our own rule.

    >>> @register_decomposition(torch.ops.aten.addcmul.default)
    ... def addcmul(x, a, b, *, value=1):
    ...     return x + value * a * b
    >>> unregister_sharding(torch.ops.aten.addcmul.default)
    """

    def register(function: _D) -> _D:
        _register(op, Decomposed(function))
        return function

    return register


def unregister_sharding(op: Function | Sequence[Function]) -> None:
    """Undo `register_sharding`, `register_loops` and `register_decomposition`: our own rules, if any, apply again."""
    for each in _as_ops(op):
        OVERRIDES.pop(each, None)
    forget()


def _register(op: Function | Sequence[Function], rule: Any) -> None:
    for each in _as_ops(op):
        OVERRIDES[each] = rule
        any_number.discard(each)
    forget()


def _as_ops(op: Any) -> tuple[Any, ...]:
    ops = (op,) if callable(op) else tuple(op)
    for each in ops:
        if isinstance(each, OpOverloadPacket) or not callable(each):
            raise DTensorError(
                f"register_sharding takes operators such as torch.ops.aten.relu.default, not {each!r}"
                + (f": pass an overload, one of {each.overloads()}" if isinstance(each, OpOverloadPacket) else "")
            )
        if isinstance(each, OpOverload) and writes_arguments(each):
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
