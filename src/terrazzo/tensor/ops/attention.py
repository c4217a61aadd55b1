"""Scaled dot product attention: batch, heads and query positions are loops; keys and features stay whole."""

from __future__ import annotations

import math
from typing import Any

import torch

from terrazzo.tensor.dispatch.spec import Call, Dims, Operand, Spec
from terrazzo.tensor.ops.table import decomposition, rule


@rule("scaled_dot_product_attention")
def sdpa(
    call: Call, query: Operand, key: Operand, value: Operand, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: Any = None, enable_gqa: bool = False,
) -> Spec | None:  # fmt: skip
    parts = (query, key, value)
    if dropout_p or not all(isinstance(o, Operand) and o.ndim == query.ndim for o in parts) or query.ndim < 3:
        return None
    lead = query.ndim - 2
    heads = lead - 1 if enable_gqa else lead  # with grouped queries the sizes of the heads' loop may differ
    if any(tuple(o.shape[:heads]) != tuple(query.shape[:heads]) for o in parts) or key.shape[:-1] != value.shape[:-1]:
        return None
    loops = tuple(range(lead))
    # Which keys a causal mask hides depends on the query's position, so the queries stay whole.
    position = None if is_causal else lead
    by_operand: dict[int, Dims] = {id(o): (*loops, None, None) for o in (key, value)}
    by_operand[id(query)] = (*loops, position, None)
    if isinstance(attn_mask, Operand):
        shift = query.ndim - attn_mask.ndim
        if shift < 0:
            return None
        sizes = (*query.shape[:-1], key.shape[-2])
        if any(n not in (1, sizes[d + shift]) for d, n in enumerate(attn_mask.shape)):
            return None
        dims = (*loops, position, None)
        by_operand[id(attn_mask)] = tuple(
            dims[d + shift] if n == sizes[d + shift] else None for d, n in enumerate(attn_mask.shape)
        )
    elif attn_mask is not None:
        return None
    even = {}
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        even[lead - 1] = (query.shape[-3], key.shape[-3])
    shape = (*query.shape[:-1], value.shape[-1])
    return Spec([by_operand[id(o)] for o in call.operands], [(*loops, position, None)], [shape], even=even)


@decomposition("scaled_dot_product_attention")
def attention_by_parts(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention from its parts: with dropout, whose mask must not depend on placements, and for broadcast operands."""
    if query.ndim < 2 or not query.is_floating_point() or (is_causal and attn_mask is not None):
        return NotImplemented
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = torch.softmax(scores, -1)
    if attn_mask is not None:
        # A query whose keys are all hidden gets zeros.
        hidden = (scores == -math.inf).all(-1, keepdim=True)
        weights = weights.masked_fill(hidden, 0.0)
    return torch.dropout(weights, dropout_p, True) @ value
