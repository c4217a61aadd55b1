"""Searching values in a list that every rank has whole."""

from __future__ import annotations

from typing import Any

from terrazzo.tensor.dispatch.spec import Call, Dims, Operand, Spec
from terrazzo.tensor.ops.table import rule


@rule("searchsorted")
def searchsorted(call: Call, sorted_sequence: Operand, input: Any, *args: Any, **kwargs: Any) -> Spec | None:
    """One list for all, or one for each row."""
    if not isinstance(sorted_sequence, Operand) or not isinstance(input, Operand):
        return None
    if call.operands != [sorted_sequence, input] or not sorted_sequence.ndim or kwargs.get("sorter") is not None:
        return None
    factors: Dims = tuple(range(input.ndim))
    if sorted_sequence.ndim == 1:
        rows: Dims = (None,)
    elif sorted_sequence.shape[:-1] == input.shape[:-1]:
        rows = (*factors[:-1], None)
    else:
        return None
    return Spec([rows, factors], [factors], [input.shape])


@rule("bucketize")
def bucketize(call: Call, input: Any, boundaries: Any, *args: Any, **kwargs: Any) -> Spec | None:
    if not isinstance(input, Operand) or call.operands != [input, boundaries] or boundaries.ndim != 1:
        return None
    factors: Dims = tuple(range(input.ndim))
    return Spec([factors, (None,)], [factors], [input.shape])


@rule("isin")
def isin(call: Call, elements: Any, test_elements: Any, *args: Any, **kwargs: Any) -> Spec | None:
    if not isinstance(elements, Operand) or len(call.operands) != 1 + isinstance(test_elements, Operand):
        return None
    factors: Dims = tuple(range(elements.ndim))
    ins: list[Dims] = [factors, *[(None,) * o.ndim for o in call.operands[1:]]]
    return Spec(ins, [factors], [elements.shape])
