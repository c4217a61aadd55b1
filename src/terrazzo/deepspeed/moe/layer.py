"""`deepspeed.moe.layer`: the layer that scripts use."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch import Tensor, nn

from terrazzo.deepspeed.moe.experts import Experts
from terrazzo.deepspeed.moe.sharded_moe import MOELayer, TopKGate
from terrazzo.deepspeed.utils import groups
from terrazzo.errors import EngineConfigError, EngineError
from terrazzo.tensor.parallel import ExpertParallel, parallelize_module
from terrazzo.tensor.parallel.experts import expert_mesh


class MoE(nn.Module):
    """A mixture of experts, which are copies of a module; called as `output, l_aux, exp_counts = moe(x)`.

    `deepspeed.initialize` divides the experts among `ep_size` ranks, and averages their gradients over the ranks that
    have the same ones.

    Args:
        hidden_size: The number of features of the input and the output.
        expert: The module of which each expert is a copy; initialise it before.
        num_experts: The number of experts, over all ranks.
        ep_size: How many ranks divide the experts among them.
        k: How many experts compute each token.
        capacity_factor: In training, an expert computes at most this times `k` times the mean number of tokens.
        eval_capacity_factor: The same in evaluation.
        min_capacity: The least number of tokens that an expert computes before any are dropped.
        use_residual: Add a copy of the module for all tokens; a learned layer weights the two results.
        noisy_gate_policy: None, "Jitter" or "RSample".
        drop_tokens: Drop what is beyond the capacity; False: every token is computed.
        use_rts: With `k` 1, drop random tokens.
        use_tutel: Has no effect: there is no Tutel.
        enable_expert_tensor_parallelism: Has no effect without tensor parallelism.
        top2_2nd_expert_sampling: With `k` 2, draw the second expert.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts % ep_size:
            raise EngineConfigError(f"MoE: ep_size {ep_size} does not divide the number of experts, {num_experts}")
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise EngineConfigError(
                f"MoE: noisy_gate_policy must be None, 'Jitter' or 'RSample', not {noisy_gate_policy!r}"
            )
        if use_tutel:
            warnings.warn("MoE: use_tutel has no effect: there is no Tutel here", stacklevel=2)
        self.use_residual = use_residual
        self.ep_size, self.expert_group_name = ep_size, f"ep_size_{ep_size}"
        self.num_experts, self.num_local_experts = num_experts, num_experts // ep_size
        gate = TopKGate(
            hidden_size, num_experts, k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy,
            drop_tokens, use_rts, None, top2_2nd_expert_sampling,
        )  # fmt: skip
        self.deepspeed_moe = MOELayer(gate, Experts(expert, num_experts, self.expert_group_name), num_experts)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Divide the experts among ranks, without an engine; all ranks call it together."""
        groups._create_expert_and_data_parallel(self.ep_size, use_data_before_expert_parallel_)
        experts = self.deepspeed_moe.experts
        if self.ep_size > 1 and expert_mesh(experts) is None:
            parallelize_module(experts, groups._meshes[self.expert_group_name][1], ExpertParallel())

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The output, the load-balance loss, and how many tokens each expert was chosen for.

        Args:
            hidden_states: The tokens, with the features last.
            used_token: With `k` 1, a number for each token; those with 0 are not computed.
        """
        if self.ep_size > 1 and expert_mesh(self.deepspeed_moe.experts) is None and dist.is_initialized():
            raise EngineError(
                f"MoE: the experts are to be divided among {self.ep_size} ranks, but are not: pass the model to "
                "deepspeed.initialize, or call set_deepspeed_parallelism() on all ranks"
            )
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            share = self.coefficient(hidden_states).softmax(-1)
            output = output * share[..., 0:1] + dense * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
