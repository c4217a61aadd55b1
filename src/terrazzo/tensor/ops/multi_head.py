"""Multi-head attention as PyTorch's modules call it.

PyTorch's own body merges positions and samples into one dim for the last projection, which would gather a sharded
batch. Here samples keep their own dim throughout.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from terrazzo.tensor.ops.table import decomposition

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
