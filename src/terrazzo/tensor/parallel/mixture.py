"""A mixture of experts for models that have none: a router, experts, and experts that all tokens share."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.errors import DTensorArgumentError
from terrazzo.tensor.parallel.experts import grouped_mm, mixed


class GroupedExperts(nn.Module):
    """Feed-forward layers with a gate (SwiGLU), one per expert: `w2 @ (silu(w1 @ x) * (w3 @ x))`.

    Called with rows that are sorted by expert, and with the number of rows of each expert.

    Args:
        dim: The number of features of a row.
        hidden: The number of hidden features of each expert.
        num_experts: The number of experts.
        device: As in PyTorch's modules.
    """

    def __init__(self, dim: int, hidden: int, num_experts: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, dim, device=device))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden, device=device))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden, dim, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as `nn.Linear` does, each expert its own."""
        for weight in self.parameters():
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The results of the rows, in their order."""
        gate = grouped_mm(rows, self.w1.transpose(1, 2), counts)
        up = grouped_mm(rows, self.w3.transpose(1, 2), counts)
        return grouped_mm(F.silu(gate) * up, self.w2.transpose(1, 2), counts)


class MixtureOfExperts(nn.Module):
    """A feed-forward layer in which each token is computed by `top_k` of the experts, which a router chooses.

        layer = MixtureOfExperts(256, 512, num_experts=8, top_k=2)
        y, balance = layer(x)
        loss = task_loss(y) + 0.01 * balance

    It returns the results and the load-balance loss, which is 1 if the router spreads this rank's tokens evenly, and
    more if it does not. All of a rank's tokens are computed, unless there is a capacity.

    Args:
        dim: The number of features of a token.
        hidden: The number of hidden features of each expert.
        num_experts: The number of experts.
        top_k: How many experts each token gets.
        score: The scores of the experts, which are the weights of their results: softmax or sigmoid of the router's
            logits.
        normalize: Divide the weights of each token by their sum.
        capacity_factor: If given, an expert computes at most this times the mean number of tokens per expert, of each
            rank: those with the highest scores. The others get nothing from it. None: no token is dropped.
        shared: The number of hidden features of an expert that computes all tokens; 0 for none.
        experts: The experts, if not `GroupedExperts`: a module that is called with sorted rows and counts.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int = 2,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        capacity_factor: float | None = None,
        shared: int = 0,
        experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise DTensorArgumentError(f"top_k must be from 1 to the number of experts, {num_experts}, not {top_k}")
        if score not in ("softmax", "sigmoid"):
            raise DTensorArgumentError(f"score must be 'softmax' or 'sigmoid', not {score!r}")
        self.num_experts, self.top_k = num_experts, top_k
        self.score, self.normalize, self.capacity_factor = score, normalize, capacity_factor
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = GroupedExperts(dim, hidden, num_experts) if experts is None else experts
        self.shared = _FeedForward(dim, shared) if shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The results, of the shape of `x`, and the load-balance loss."""
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):  # half types are too coarse to compare scores
            logits = F.linear(tokens.float(), self.router.weight.float())
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        weights, ids = scores.topk(self.top_k, dim=-1)
        shares = scores / scores.sum(-1, keepdim=True)
        chosen = torch.zeros_like(shares).scatter(1, ids, 1.0)
        # Of ranks without tokens the means are of nothing.
        number = max(len(tokens), 1)
        balance = (shares.sum(0) / number * chosen.sum(0) / number).sum() * self.num_experts / self.top_k
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.capacity_factor is not None:
            capacity = math.ceil(len(tokens) * self.top_k / self.num_experts * self.capacity_factor)
            ids = within_capacity(ids, scores, capacity)
        y = mixed(self.experts, tokens, ids, weights, self.num_experts)
        if self.shared is not None:
            y = y + self.shared(tokens)
        return y.view(x.shape), balance

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, score={self.score!r}, capacity_factor={self.capacity_factor}"


class _FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def within_capacity(ids: Tensor, scores: Tensor, capacity: int) -> Tensor:
    """The experts of each token, with -1 in place of those that have `capacity` tokens with higher scores.

    >>> within_capacity(torch.tensor([[0], [0], [1]]), torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.2, 0.8]]), 1).tolist()
    [[-1], [0], [1]]
    """
    chosen = torch.full_like(scores, -1.0).scatter(1, ids, scores.detach().gather(1, ids))
    place = chosen.argsort(dim=0, descending=True, stable=True).argsort(dim=0)
    return torch.where(place.gather(1, ids) < capacity, ids, -1)


__all__ = ["GroupedExperts", "MixtureOfExperts"]
