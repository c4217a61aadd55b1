"""Embeddings with sparse gradients: replicated, and only the rows that some rank has used are communicated.

Such a weight is left out of `fully_shard`. Before each optimizer step the ranks gather all ranks' rows, and the
gradient becomes dense, so that any optimizer can use it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from terrazzo.comm import Axis, collectives


class SparseEmbeddings:
    """The embeddings of a model whose gradients are sparse.

    Attributes:
        names: the names of their modules.
        weights: their parameters.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        found = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
        }
        self.names = list(found)
        self.weights: set[nn.Parameter] = {cast(nn.Parameter, module.weight) for module in found.values()}
        if dtype is not torch.float32:
            for module in found.values():
                # The weight stays in float32, because fully_shard does not cast it.
                module.register_forward_hook(lambda module, args, output: output.to(dtype))

    @torch.no_grad()
    def reduce(self, data: Axis) -> None:
        """Average the gradients over the ranks."""
        for weight in self.weights:
            weight.grad = _averaged(weight, data)


def _averaged(weight: nn.Parameter, data: Axis) -> Tensor:
    grad = weight.grad
    if grad is None:  # this rank used no row of it
        rows = torch.empty(0, dtype=torch.int64, device=weight.device)
        values = weight.new_empty((0, weight.shape[1]))
    elif grad.is_sparse:
        merged = grad.coalesce()
        rows, values = merged.indices()[0], merged.values()
    else:  # accumulated over several micro-batches, dense and sparse
        rows = grad.abs().sum(1).nonzero()[:, 0]
        values = grad[rows]
    counted = torch.tensor([len(rows)], device=weight.device)
    counts: list[int] = collectives.all_gather(counted, data, 0, [1] * data.size).tolist()
    rows = collectives.all_gather(rows, data, 0, counts)
    values = collectives.all_gather(values, data, 0, counts)
    return torch.zeros_like(weight).index_add_(0, rows, values).div_(data.size)
