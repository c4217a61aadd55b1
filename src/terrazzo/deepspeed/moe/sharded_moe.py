"""`deepspeed.moe.sharded_moe`: the gate, and the layer that sends tokens to experts and weights what they return.

A gate draws its random numbers as DeepSpeed's does, so with the same seed the same tokens are dropped. A rank may have
fewer tokens than `min_capacity`, or none, where DeepSpeed raises an error, while the other ranks wait.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Gumbel, Uniform

from terrazzo.tensor.parallel.experts import mixed
from terrazzo.tensor.parallel.mixture import within_capacity


class Routes(NamedTuple):
    """What a gate decides: each token has a row in `ids` and `weights`; an expert of -1 is none."""

    l_aux: Tensor
    ids: Tensor
    weights: Tensor
    exp_counts: Tensor  # before tokens are dropped


class TopKGate(nn.Module):
    """Chooses `k` experts for each token, by a linear layer in float32. The arguments are as in `MoE`.

    Args:
        model_dim: The number of features of a token.
        ep_group: Has no effect.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k = k
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens, self.use_rts = drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(self, tokens: Tensor, used_token: Tensor | None = None) -> Routes:
        """The experts of each token, and the load-balance loss."""
        x = tokens.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            x = x * _uniform(x, 1 - 1e-2, 1 + 1e-2)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x, self.wg.weight.float())
        gates = logits.softmax(1)
        if self.k == 1:
            return self._one(logits, gates, used_token)
        return self._two(logits, gates) if self.k == 2 else self._several(gates)

    def _capacity(self, gates: Tensor) -> int:
        """The largest number of tokens that each expert computes."""
        tokens, experts = gates.shape
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        # In float32, as in DeepSpeed: the rounding decides.
        wanted = int(torch.ceil(tokens / experts * torch.tensor(factor * self.k, device="cpu")))
        return max(wanted, self.min_capacity) if self.drop_tokens else tokens

    def _one(self, logits: Tensor, gates: Tensor, used_token: Tensor | None) -> Routes:
        tokens, experts = gates.shape
        noisy = logits + _gumbel(logits) if self.noisy_gate_policy == "RSample" and self.training else gates
        ids = noisy.argmax(1)
        mask = F.one_hot(ids, experts)
        if used_token is not None:
            mask = mask * used_token.reshape(-1, 1).to(mask.dtype)
        counts = mask.sum(0)
        l_aux = (_mean(gates) * _mean(mask.float())).sum() * experts
        order = mask * _uniform(mask.float(), 0.0, 1.0) if self.use_rts else mask
        kept = order.topk(min(self._capacity(gates), tokens), dim=0)[1]
        mask = mask * torch.zeros_like(mask).scatter(0, kept, 1)
        ids = torch.where(mask.any(1), ids, -1)
        return Routes(l_aux, ids.unsqueeze(1), (gates * mask).sum(1, keepdim=True), counts)

    def _two(self, logits: Tensor, gates: Tensor) -> Routes:
        experts = gates.shape[1]
        first = gates.argmax(1)
        mask1 = F.one_hot(first, experts)
        if self.top2_2nd_expert_sampling:
            logits = logits + _gumbel(logits)
        second = logits.masked_fill(mask1.bool(), float("-inf")).argmax(1)
        mask2 = F.one_hot(second, experts)
        l_aux = (_mean(gates) * _mean(mask1.float())).mean() * experts * experts
        counts = (mask1 + mask2).sum(0)
        if self.drop_tokens:  # the last ones; all first choices come before the second ones
            capacity = self._capacity(gates)
            place1, place2 = mask1.cumsum(0) - 1, mask2.cumsum(0) - 1 + mask1.sum(0)
            mask1, mask2 = mask1 * (place1 < capacity), mask2 * (place2 < capacity)
        ids = torch.stack([torch.where(mask1.any(1), first, -1), torch.where(mask2.any(1), second, -1)], 1)
        return Routes(l_aux, ids, _shares(torch.stack([(gates * mask1).sum(1), (gates * mask2).sum(1)], 1)), counts)

    def _several(self, gates: Tensor) -> Routes:
        experts = gates.shape[1]
        weights, ids = gates.topk(self.k, dim=1)
        mask = torch.zeros_like(gates).scatter(1, ids, 1.0)
        l_aux = (_mean(gates) * _mean(mask)).mean() * experts * experts / self.k
        if self.drop_tokens:
            ids = within_capacity(ids, gates, self._capacity(gates))
        return Routes(l_aux, ids, _shares(weights * (ids >= 0)), mask.sum(0).long())


def _mean(rows: Tensor) -> Tensor:
    """The mean over the tokens; 0 on a rank that has none."""
    return rows.mean(0) if len(rows) else rows.sum(0)


def _shares(weights: Tensor) -> Tensor:
    """Each token's weights, divided by their sum."""
    return weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)


def _uniform(like: Tensor, low: float, high: float) -> Tensor:
    bounds = torch.tensor([low, high], device=like.device)
    drawn: Tensor = Uniform(bounds[0], bounds[1]).rsample(like.shape)
    return drawn


def _gumbel(like: Tensor) -> Tensor:
    bounds = torch.tensor([0.0, 1.0], device=like.device)
    drawn: Tensor = Gumbel(bounds[0], bounds[1]).rsample(like.shape)
    return drawn


class MOELayer(nn.Module):
    """A gate and experts; `l_aux` and `exp_counts` are those of the last forward."""

    l_aux: Tensor
    exp_counts: Tensor

    def __init__(self, gate: nn.Module, experts: nn.Module, num_experts: int) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.num_experts = num_experts

    def forward(self, x: Tensor, used_token: Tensor | None = None) -> Tensor:
        """The weighted results of the experts, of the shape of `x`."""
        tokens = x.reshape(-1, x.shape[-1])
        self.l_aux, ids, weights, self.exp_counts = self.gate(tokens, used_token)
        return mixed(self.experts, tokens, ids, weights, self.num_experts).view(x.shape)
