"""`deepspeed.utils`: whole parameters, gradients and optimizer states, and other functions that scripts use."""

from __future__ import annotations

from collections.abc import Sequence
from logging import INFO, getLogger  # `deepspeed.utils.logging` is a module of DeepSpeed's, and not Python's
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from terrazzo.deepspeed.dataloader import RepeatingLoader
from terrazzo.deepspeed.utils.leaves import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from terrazzo.deepspeed.utils.sharded import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from terrazzo.layout.drawing import ShownAsCall

logger = getLogger("terrazzo.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log on some ranks; on all if ranks is None or contains -1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if ranks is None or rank in ranks or -1 in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


class OnDevice(ShownAsCall):
    """A context in which modules are created on a device and with a dtype.

    >>> with OnDevice(dtype=torch.bfloat16, device="meta"):
    ...     layer = torch.nn.Linear(2, 2)
    >>> layer.weight.device.type, layer.weight.dtype
    ('meta', torch.bfloat16)
    """

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self._dtype, self._device = dtype, torch.device(device) if enabled else None
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self._device is not None:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._device is not None:
            self._device.__exit__(kind, error, traceback)
            torch.set_default_dtype(self._before)


__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]
