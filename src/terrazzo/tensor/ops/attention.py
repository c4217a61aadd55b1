"""Scaled dot product attention: batch, heads and query positions are loops; keys and features stay whole.

PyTorch's own body of multi-head attention merges positions and samples into one dim for the last projection, which
would gather a sharded batch. Here samples keep their own dim throughout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from terrazzo.layout import Replicate
from terrazzo.tensor.dispatch.shapes import dims_within
from terrazzo.tensor.dispatch.spec import Call, Dims, Operand, Spec
from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.ops.table import decomposition, rule

SCORES_AT_ONCE = 1 << 20
"""Attention with dropout keeps its scores if they are at most so many: queries times keys."""


@rule("scaled_dot_product_attention")
def sdpa(
    call: Call, query: Operand, key: Operand, value: Operand, attn_mask: Operand | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: Any = None, enable_gqa: bool = False,
) -> Spec | None:  # fmt: skip
    parts = (query, key, value)
    if dropout_p or query.ndim < 3 or not key.ndim == value.ndim == query.ndim:
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
    if attn_mask is not None:
        of_scores = dims_within(attn_mask.shape, (*query.shape[:-1], key.shape[-2]))
        if of_scores is None:
            return None
        dims = (*loops, position, None)
        by_operand[id(attn_mask)] = tuple(None if d is None else dims[d] for d in of_scores)
    even = {}
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        even[lead - 1] = (query.shape[-3], key.shape[-3])
    shape = (*query.shape[:-1], value.shape[-1])
    ins = [by_operand[id(o)] for o in call.operands]
    # PyTorch has other kernels for nothing, which can be differentiated twice: that rank alone would go on.
    return Spec(ins, [(*loops, position, None)], [shape], even=even, never_empty=True)


@decomposition("scaled_dot_product_attention")
def attention_by_parts(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention from its parts: with dropout, whose mask must not depend on placements, and for broadcast operands.

    Of long sequences it does not keep the scores of all queries: it computes every n-th query at a time, and again in
    backward. Each rank has some of these, so that queries which are sharded stay where they are. A length that no
    suitable n divides is computed at once.
    """
    if query.ndim < 2 or not query.is_floating_point() or (is_causal and attn_mask is not None):
        return NotImplemented
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    query = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    length = query.shape[-2]
    n = max(1, -(-length * key.shape[-2] // SCORES_AT_ONCE))
    # Not much more pieces than needed: of a prime number of queries each would be one.
    n = next((count for count in range(n, min(4 * n, length) + 1) if length % count == 0), 1)
    if n == 1:
        return _attend_rows(query, key, value, attn_mask, dropout_p, is_causal)
    queries = query.unflatten(-2, (length // n, n))
    by_row = attn_mask is not None and attn_mask.ndim > 1 and attn_mask.shape[-2] == length
    masks = attn_mask.unflatten(-2, (length // n, n)) if by_row else attn_mask
    results = []
    for i in range(n):
        mask = masks[..., i, :] if by_row else masks
        if is_causal:
            rows = torch.arange(i, length, n, device=query.device)
            keys = torch.arange(key.shape[-2], device=query.device)
            mesh = next(x.device_mesh for x in (query, key, value) if isinstance(x, DTensor))
            mask = DTensor.from_local(rows[:, None] >= keys, mesh, [Replicate()] * mesh.ndim)
        results.append(checkpoint(_attend_rows, queries[..., i, :], key, value, mask, dropout_p, use_reentrant=False))
    return torch.stack(results, -2).flatten(-3, -2)


def _attend_rows(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool = False) -> Any:
    scores = query @ key.transpose(-2, -1)
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


# ------------------------------------------------------------------ as modules call it


F = torch.nn.functional


@decomposition("multi_head_attention_forward")
def multi_head_attention(
    query: Any, key: Any, value: Any, embed_dim_to_check: int, num_heads: int, in_proj_weight: Any, in_proj_bias: Any,
    bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float, out_proj_weight: Any, out_proj_bias: Any,
    training: bool = True, key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Any = None, k_proj_weight: Any = None, v_proj_weight: Any =
    None, static_k: Any = None, static_v: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> Any:  # fmt: skip
    rare = [bias_k, bias_v, static_k, static_v]
    if query.ndim != 3 or add_zero_attn or any(v is not None for v in rare) or (is_causal and attn_mask is None):
        return NotImplemented
    length, samples, width = query.shape
    if width != embed_dim_to_check or width % num_heads or key.shape[:2] != value.shape[:2] or key.shape[1] != samples:
        return NotImplemented
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)

    def heads(x: Any, weight: Any, bias: Any) -> Any:
        projected = F.linear(x, weight, bias)  # (positions, samples, features) -> (samples, heads, positions, features)
        return projected.view(*projected.shape[:2], num_heads, -1).permute(1, 2, 0, 3)

    q, k, v = (heads(*each) for each in zip((query, key, value), weights, biases, strict=True))
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _joined_mask(attn_mask, key_padding_mask, samples, num_heads, query.dtype)
    dropped = dropout_p if training else 0.0
    shares = None
    if need_weights:
        scores = (q * math.sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)
        shares = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropped)
        mixed = shares @ v
        shares = shares.mean(1) if average_attn_weights else shares
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropped, causal)
    output = F.linear(mixed.permute(2, 0, 1, 3).reshape(length, samples, width), out_proj_weight, out_proj_bias)
    return output, shares


def _joined_mask(attn_mask: Any, key_padding_mask: Any, samples: int, heads: int, dtype: torch.dtype) -> Any:
    """Both masks as one that is added to the scores, of shape (samples or 1, heads or 1, queries or 1, keys)."""
    joined = None
    if attn_mask is not None:
        joined = _added(attn_mask, dtype)
        joined = joined.view(samples, heads, *joined.shape[1:]) if joined.ndim == 3 else joined
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, dtype).unsqueeze(1).unsqueeze(1)
        joined = padding if joined is None else joined + padding
    return joined


def _added(mask: Any, dtype: torch.dtype) -> Any:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
