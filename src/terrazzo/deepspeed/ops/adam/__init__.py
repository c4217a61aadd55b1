"""Adam under the names of DeepSpeed's kernels; PyTorch's implementation."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.errors import EngineConfigError


class FusedAdam(torch.optim.Adam):
    """AdamW, or Adam if `adam_w_mode` is False.

    >>> FusedAdam([torch.nn.Parameter(torch.ones(1))], lr=0.1).defaults["decoupled_weight_decay"]
    True
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise EngineConfigError("bias_correction=False is not supported: leave it out")
        super().__init__(
            params,
            lr=lr,
            betas=(betas[0], betas[1]),
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode,
        )


class DeepSpeedCPUAdam(FusedAdam):
    """The same as `FusedAdam`; `zero_optimization.offload_optimizer` decides on which device it steps."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
