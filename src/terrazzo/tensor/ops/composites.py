"""Composites that C++ takes apart into operations that have rules, and some whose parts are better named here."""

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
    ]
)


@decomposition("glu")
def glu(input: Any, dim: int = -1) -> Any:
    if not input.ndim or input.shape[norm_dim(dim, input.ndim)] % 2:
        return NotImplemented
    kept, gate = input.chunk(2, dim)
    return kept * torch.sigmoid(gate)


@decomposition("tensor_split")
def tensor_split(input: Any, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    """Where the places of the cuts are a tensor, its values are needed on every rank."""
    cuts = named.get("indices", named.get("sections", named.get("tensor_indices_or_sections", indices_or_sections)))
    if isinstance(cuts, torch.Tensor):
        cuts = cuts.tolist()
    if not input.ndim or not isinstance(cuts, (int, list, tuple)):
        return NotImplemented
    d = norm_dim(dim, input.ndim)
    n = input.shape[d]
    if isinstance(cuts, int):
        if cuts <= 0:
            return NotImplemented
        small, longer = divmod(n, cuts)
        return torch.split(input, [small + (i < longer) for i in range(cuts)], d)
    bounds = [slice(None, c).indices(n)[1] for c in cuts]
    starts, ends = [0, *bounds], [*bounds, n]
    return tuple(input.narrow(d, min(a, n), max(b - a, 0)) for a, b in zip(starts, ends, strict=True))


@decomposition("trace")
def trace(input: Any) -> Any:
    return torch.diagonal(input).sum() if input.ndim == 2 else NotImplemented


@decomposition("sum_to_size")
def sum_to_size(input: Any, *size: Any) -> Any:
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    lead = input.ndim - len(shape)
    if lead < 0:
        return NotImplemented
    dims = [*range(lead), *(d + lead for d, n in enumerate(shape) if n == 1 and input.shape[d + lead] != 1)]
    return input.sum(dims, keepdim=True).reshape(shape) if dims else input.view(shape)
