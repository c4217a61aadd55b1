"""`deepspeed.moe.experts`: copies of a module as one module, whose parameters have the copies as their first dim."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo._torch.modules import parameters_of
from terrazzo.errors import EngineConfigError
from terrazzo.tensor.parallel.experts import changed_parameters


def _cannot_reset() -> None:
    raise EngineConfigError(
        "MoE: reset_parameters() would draw the stacked parameters of all experts from another range than one "
        "expert's. Initialise the expert before it is passed to MoE, and not on the meta device"
    )


class Experts(nn.Module):
    """All experts of a layer; the engine divides them among the ranks of the group.

    `deepspeed_experts` is one expert module whose parameters are those of all experts, stacked. So optimizers, norms
    and checkpoints have one tensor for all experts, and it is divided among any number of ranks.
    """

    def __init__(self, expert: nn.Module, num_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.num_experts = num_experts
        # The engine divides the experts among so many ranks.
        self.expert_parallel_size = int((expert_group_name or "1").removeprefix("ep_size_"))
        self.deepspeed_experts = copy.deepcopy(expert)
        stacked: dict[nn.Parameter, nn.Parameter] = {}  # parameters that modules share stay shared
        for module in self.deepspeed_experts.modules():
            if hasattr(module, "reset_parameters"):
                vars(module)["reset_parameters"] = _cannot_reset
            for name, parameter in parameters_of(module).items():
                if parameter is None:
                    continue
                if parameter not in stacked:
                    copies = torch.stack([parameter.detach()] * num_experts)
                    stacked[parameter] = nn.Parameter(copies, requires_grad=parameter.requires_grad)
                    vars(stacked[parameter]).update(allreduce=False, group_name=expert_group_name)
                module.register_parameter(name, stacked[parameter])

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each expert's results for its rows: the first `counts[0]` are of expert 0, and so on."""
        copies: dict[int, tuple[Tensor, ...]] = {}  # by `id` of the stacked tensor
        results = []
        for number, part in enumerate(rows.split(counts.tolist())):

            def own(stacked: Any, number: int = number) -> Tensor:
                if id(stacked) not in copies:
                    copies[id(stacked)] = stacked.unbind(0)
                return copies[id(stacked)][number]

            with changed_parameters(self.deepspeed_experts, own):
                result = self.deepspeed_experts(part)
            results.append(result[0] if isinstance(result, tuple) else result)  # others return a bias, too
        return torch.cat(results)
