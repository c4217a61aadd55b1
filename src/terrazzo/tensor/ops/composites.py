"""Composites that C++ decomposes into operations with rules, and some that are decomposed here."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.tensor.ops.table import body, decomposition
from terrazzo.tensor.ops.views import norm_dim

body(
    *[
        *("tensordot", "kron", "chain_matmul", "linalg_multi_dot", "bilinear", "inner", "cosine_similarity"),
        *("pairwise_distance", "margin_ranking_loss", "hinge_embedding_loss", "cosine_embedding_loss"),
        *("triplet_margin_loss", "kl_div", "poisson_nll_loss", "tile", "hstack", "vstack", "dstack", "column_stack"),
        *("diff", "trapezoid", "trapz", "cumulative_trapezoid", "cov", "corrcoef", "row_stack"),
        *("expand_as", "view_as", "reshape_as", "hsplit", "vsplit", "dsplit", "atleast_1d", "atleast_2d"),
        *("atleast_3d", "meshgrid", "broadcast_tensors", "nanmean", "fliplr", "flipud"),
        *("cross", "msort", "cartesian_prod", "combinations", "take_along_dim"),
        *("fft_fftshift", "fft_ifftshift"),
    ]
)


@decomposition("glu")
def glu(input: Any, dim: int = -1) -> Any:
    if not input.ndim or input.shape[norm_dim(dim, input.ndim)] % 2:
        return NotImplemented
    kept, gate = input.chunk(2, dim)
    return kept * torch.sigmoid(gate)


@decomposition("trace")
def trace(input: Any) -> Any:
    """Of bools PyTorch has none."""
    return torch.diagonal(input).sum() if input.ndim == 2 and input.dtype is not torch.bool else NotImplemented


@decomposition("sum_to_size")
def sum_to_size(input: Any, *size: Any) -> Any:
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    if not shape:
        return input.sum()  # of bools and small integers it is an int64, also for a single element
    lead = input.ndim - len(shape)
    if lead < 0:
        return NotImplemented
    dims = [*range(lead), *(d + lead for d, n in enumerate(shape) if n == 1 and input.shape[d + lead] != 1)]
    return input.sum(dims, keepdim=True).reshape(shape) if dims else input.view(shape)
