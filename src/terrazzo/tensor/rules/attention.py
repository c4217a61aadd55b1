"""Scaled dot-product attention: batch and heads are loops of their own, sequence and features are whole."""

from __future__ import annotations

from typing import Any

from terrazzo.tensor.rules.registry import rule
from terrazzo.tensor.spec import Call, Dims, Operand, Spec


@rule("scaled_dot_product_attention")
def sdpa(
    call: Call, query: Operand, key: Operand, value: Operand, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: Any = None, enable_gqa: bool = False,
) -> Spec | None:
    parts = (query, key, value)
    if dropout_p or not all(isinstance(o, Operand) and o.ndim == query.ndim for o in parts) or query.ndim < 3:
        return None
    lead = query.ndim - 2
    if enable_gqa or any(tuple(o.shape[:lead]) != tuple(query.shape[:lead]) for o in parts):
        return None
    loops = tuple(range(lead))
    by_operand: dict[int, Dims] = {id(o): (*loops, None, None) for o in parts}
    if isinstance(attn_mask, Operand):
        shift = query.ndim - attn_mask.ndim
        if shift < 0:
            return None
        by_operand[id(attn_mask)] = tuple(
            d + shift if d + shift < lead and n == query.shape[d + shift] else None for d, n in enumerate(attn_mask.shape)
        )
    elif attn_mask is not None:
        return None
    shape = (*query.shape[:-1], value.shape[-1])
    return Spec([by_operand[id(o)] for o in call.operands], [(*loops, None, None)], [shape])
