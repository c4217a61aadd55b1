"""Users' operations: a sharding rule, the loops, or a decomposition, for an operator or a whole function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from terrazzo._torch.dispatching import OpOverload, OpOverloadPacket, writes_arguments
from terrazzo.errors import DTensorError
from terrazzo.layout import Partial, Placement, Replicate
from terrazzo.layout.placement import _StridedShard
from terrazzo.tensor.dispatch.candidates import cut_of
from terrazzo.tensor.dispatch.keys import any_number, forget
from terrazzo.tensor.dispatch.overrides import OVERRIDES, Decomposed, run_on_meta
from terrazzo.tensor.dispatch.spec import Acceptable, Call, Spec
from terrazzo.tensor.dispatch.structure import map_tensors
from terrazzo.tensor.libraries import TensorMeta
from terrazzo.tensor.ops.loops import loops

Pairs: TypeAlias = Sequence[tuple[Sequence[Placement | None], Sequence[Placement | None]]]
Strategy: TypeAlias = Callable[..., Pairs]
_F = TypeVar("_F", bound=Strategy)
_S = TypeVar("_S", bound=Callable[..., Sequence[Sequence[Any]]])
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
        _register(ops, _rule_of(strategy))
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

    >>> register_loops(torch.ops.aten.dist.default, "...f, ...f -> ", whole="f")
    >>> unregister_sharding(torch.ops.aten.dist.default)

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


def register_single_dim_strategy(
    op: OpOverload | Sequence[OpOverload],
    schema_info: Any = None,
    allow_unbacked_sharding: bool | None = None,
    allow_uneven_sharding: bool = False,
    full_mesh_strategy_filter: Any = None,
    different_mesh_args: Sequence[int] | None = None,
) -> Callable[[_S], _S]:
    """Decorate a function that lists how an operator may be sharded along one mesh dim; it replaces our own rule.

    This is PyTorch's, from `torch.distributed.tensor._ops.single_dim_strategy`, so that such functions can be taken as
    they are. The function gets the operator and its arguments, with a `TensorMeta` (shape, stride, dtype) for each
    tensor; what it returns may depend on the dtype of the first call only. It returns lists of placements: those of the
    results, then those of the tensors among the arguments. A `_ShardingPlaceholder(dim)`, or any object with a `dim`
    that is no placement, is every kind of sharding that the operands have. Replicating all is always allowed.

    >>> from terrazzo.tensor import Shard
    >>> @register_single_dim_strategy(torch.ops.aten.addcmul.default)
    ... def addcmul(op, args, kwargs):
    ...     return [[Shard(0)] * 4]  # of the result, and of three operands
    >>> unregister_sharding(torch.ops.aten.addcmul.default)

    Args:
        op: An operator, or several with the same arguments.
        schema_info: Not needed here, and so are the next two: plans are kept for exact arguments, and shards may be
            uneven or empty.
        allow_unbacked_sharding: See above.
        allow_uneven_sharding: See above.
        full_mesh_strategy_filter: Must be None, because each mesh dim is planned by itself.
        different_mesh_args: Must be None, because all operands are on one mesh.
    """
    if full_mesh_strategy_filter is not None or different_mesh_args is not None:
        raise DTensorError(
            "register_single_dim_strategy takes no full_mesh_strategy_filter and no different_mesh_args: each mesh dim "
            "is planned by itself, for operands on one mesh"
        )

    def register(function: _S) -> _S:
        def rule(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Spec:
            metas = map_tensors(list(args), _meta_of), map_tensors(dict(kwargs), _meta_of)
            listed = function(call.func, tuple(metas[0]), metas[1])
            shapes = _output_shapes(call.func, args, kwargs)
            count = len(shapes) + len(call.operands)
            packed = {p.split_factor for o in call.operands for p in o.placements if isinstance(p, _StridedShard)}
            ways: list[list[Placement | None]] = [[Replicate()] * count]
            for way in listed:
                for pieces in (1, *sorted(packed)) if any(map(_is_any_shard, way)) else (1,):
                    ways.append([_placed(p, pieces) for p in way])
            return _spec_of(call, [(way[: len(shapes)], way[len(shapes) :]) for way in ways], shapes)

        _register(op, rule)
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
        if isinstance(each, (OpOverloadPacket, torch.library.CustomOpDef)) or not callable(each):
            overloads = each.overloads() if isinstance(each, OpOverloadPacket) else ["default"]
            raise DTensorError(
                f"register_sharding takes operators such as torch.ops.aten.relu.default, not {each!r}"
                + (f": pass an overload, one of {overloads}" if callable(each) else "")
            )
        if isinstance(each, OpOverload) and writes_arguments(each):
            raise DTensorError(f"register_sharding: {each} writes its arguments; register its functional form instead")
    return ops


def _meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tuple(tensor.stride()), tensor.dtype)


def _is_any_shard(placement: Any) -> bool:
    return placement is not None and not isinstance(placement, Placement) and not hasattr(placement, "is_partial")


def _placed(placement: Any, pieces: int) -> Placement | None:
    """Our placement for PyTorch's, for ours, and for a placeholder, which then cuts so many pieces."""
    if placement is None or isinstance(placement, Placement):
        return placement
    if _is_any_shard(placement):
        return cut_of(placement.dim, pieces)
    if placement.is_partial():
        return Partial(placement.reduce_op)
    return Replicate() if placement.is_replicate() else cut_of(placement.dim, getattr(placement, "split_factor", 1))


def _rule_of(strategy: Strategy) -> Callable[..., Spec]:
    def rule(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Spec:
        shapes = _output_shapes(call.func, args, kwargs)
        pairs = strategy(*call.args, **call.kwargs)
        if not pairs or not all(map(_is_pair, pairs)):
            raise DTensorError(
                f"the sharding function registered for {call.func} must return pairs of lists, the placements of the "
                f"outputs and those of the arguments; for operands {list(call.operands)} it returned {pairs}"
            )
        return _spec_of(call, pairs, shapes)

    return rule


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and [isinstance(side, (list, tuple)) for side in value] == [True, True]


def _spec_of(call: Call, pairs: Pairs, shapes: Sequence[tuple[int, ...]]) -> Spec:
    acceptable = tuple(_acceptable(call, outs, ins, len(shapes)) for outs, ins in pairs)
    dims = [tuple(range(o.ndim)) for o in call.operands]
    return Spec(dims, [tuple(range(len(s))) for s in shapes], shapes, acceptable=acceptable)


def _acceptable(
    call: Call, outs: Sequence[Placement | None], ins: Sequence[Placement | None], outputs: int
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
            f"the sharding function registered for {call.func} gave placements for {len(placed_ins)} inputs and "
            f"{len(placed_outs)} outputs: {(list(outs), list(ins))}; this call has {len(call.operands)} DTensors and "
            f"{outputs} outputs"
        )
    return Acceptable(placed_ins, placed_outs)


def _paths(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    if isinstance(value, (list, tuple)):
        return [p for i, v in enumerate(value) for p in _paths(v, (*path, i))]
    return [path]


def _output_shapes(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    try:
        result = run_on_meta(op, args, kwargs)
    except NotImplementedError as error:
        raise DTensorError(
            f"{op} cannot compute the shape of its results: register a fake implementation with "
            "torch.library.register_fake"
        ) from error
    shapes: list[tuple[int, ...]] = []
    map_tensors(result, lambda t: shapes.append(tuple(t.shape)))
    return shapes
