"""Sharding rules: for each operation, which of its loops may be cut between ranks; see `dispatch.spec`."""

from terrazzo.tensor.dispatch.spec import Call, Spec
from terrazzo.tensor.rules import (  # noqa: F401  (registering is what importing these does)
    attention,
    composites,
    conv,
    embedding,
    factories,
    indexing,
    join,
    losses,
    matmul,
    multi_head,
    norms,
    pointwise,
    recurrent,
    reductions,
    softmax,
    spatial,
    views,
)
from terrazzo.tensor.rules.pointwise import is_pointwise, pointwise_spec
from terrazzo.tensor.rules.registry import COMPOSITES, DECOMPOSITIONS, has_rule
from terrazzo.tensor.rules.registry import apply_rule as _apply_registered


def apply_rule(call: Call) -> Spec | None:
    """The answer of the operation's rule, or of the one for all elementwise operations; None when neither covers it."""
    if has_rule(call.name):
        return _apply_registered(call)
    return pointwise_spec(call) if is_pointwise(call.name) else None


def works_on_any_float(name: str) -> bool:
    """Whether what `apply_rule` says is the same for all values of float arguments: elementwise ones only look at
    shapes."""
    return not has_rule(name) and is_pointwise(name)


__all__ = ["COMPOSITES", "DECOMPOSITIONS", "apply_rule", "has_rule", "is_pointwise", "works_on_any_float"]
