"""`deepspeed.moe.utils`: which parameters are experts', and param groups of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from terrazzo.deepspeed.moe.layer import MoE


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has layers of experts, and the number of experts of the first one."""
    found = [module.num_experts for module in m.modules() if isinstance(module, MoE)]
    return bool(found), found[0] if found else 0


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter is of experts."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a param group has experts' parameters."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: list[nn.Parameter]) -> tuple[list[Any], list[Any]]:
    """The parameters that are not experts', and those that are."""
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The param groups without experts' parameters, and groups of those after them, with the same options.

    `max_group_size` has no effect: the engine's optimizers do not need small groups.
    """
    given = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    apart = []
    for group in given:
        group["params"], experts = split_params_into_shared_and_expert_params(list(group["params"]))
        for name in dict.fromkeys(p.group_name for p in experts):
            own = [p for p in experts if p.group_name == name]
            apart.append({**group, "name": name, "moe": True, "params": own})
    return given + apart


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Param groups of a list of parameters or of param groups; those with experts' are apart."""
    if isinstance(model_parameters[0], dict):
        if any("moe" in group for group in model_parameters):
            return model_parameters
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})
