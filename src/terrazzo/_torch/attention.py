"""PyTorch's fused attention kernels with the logarithm of the softmax's denominator, as forward and backward.

All operands have four dims (batch, heads, rows, features), and as many heads. `bias` is added to the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terrazzo._torch.declared import attribute

_aten: Any = torch.ops.aten
_RING = "attention of a sequence that is sharded over ranks adds the results with blocks of keys"
for _device in ("_for_cpu", ""):
    for _pass in ("", "_backward"):
        attribute(f"torch.ops.aten._scaled_dot_product_flash_attention{_device}{_pass}", _RING)


class Kernel(NamedTuple):
    """Attention of some queries with some keys."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(query, key, value, is_causal, bias, scale) to the result and its `log_sum`."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(gradient, query, key, value, result, log_sum, is_causal, bias, scale); the result and `log_sum` of all keys."""
    fused: bool = True
    """Whether it makes no matrix of scores."""


def kernel_for(query: Tensor, value: Tensor, masked: bool) -> Kernel:
    """The kernel for operands like these."""
    if query.shape[-1] == value.shape[-1]:
        if query.is_cpu:
            return _CPU
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and not masked and query.shape[-1] % 8 == 0:
            return _CUDA
    return _PRODUCTS


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Any, scale: float) -> tuple[Tensor, Tensor]:
    out, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, log_sum


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, causal: bool, bias: Any, scale: float
) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, log_sum.contiguous(), 0.0, causal, attn_mask=bias, scale=scale
    )


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Any, scale: float) -> tuple[Tensor, Tensor]:
    if causal or bias is None:
        out, log_sum, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, log_sum
    return _products_forward(q, k, v, causal, bias, scale)


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, causal: bool, bias: Any, scale: float
) -> Any:
    if not (causal or bias is None):
        return _products_backward(grad, q, k, v, out, log_sum, causal, bias, scale)
    unused = torch.zeros((), dtype=torch.uint64, device=q.device)  # the state of dropout
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, log_sum.contiguous(), None, None, q.shape[-2], k.shape[-2], 0.0, causal, unused, unused,
        scale=scale,
    )  # fmt: skip


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    return scores if bias is None else scores + bias


def _products_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Any, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = _wide(q), _wide(k), _wide(v)
    scores = _scores(q, k, bias, scale)
    log_sum = torch.logsumexp(scores, -1)
    base = log_sum.masked_fill(log_sum == float("-inf"), 0.0)
    return (scores - base.unsqueeze(-1)).exp_() @ v, log_sum


def _products_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, causal: bool, bias: Any, scale: float
) -> Any:
    grad, q, k, v = _wide(grad), _wide(q), _wide(k), _wide(v)
    p = (_scores(q, k, bias, scale) - log_sum.unsqueeze(-1)).exp_()
    # The sum in the gradient of a softmax, which is subtracted from the gradient of each score of the row.
    pull = (grad * out).sum(-1, keepdim=True)
    ds = (grad @ v.mT - pull).mul_(p).mul_(scale)
    return ds @ k, ds.mT @ q, p.mT @ grad


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


_CPU = Kernel(_cpu_forward, _cpu_backward)
_CUDA = Kernel(_cuda_forward, _cuda_backward)
_PRODUCTS = Kernel(_products_forward, _products_backward, fused=False)
