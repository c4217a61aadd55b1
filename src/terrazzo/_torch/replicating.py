"""DistributedDataParallel: it flattens parameters in C++, where a tensor subclass has no storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from terrazzo._torch.declared import attribute, like, private, replace

_INIT = "torch.nn.parallel.DistributedDataParallel.__init__"
_plain: Any = private(_INIT, "DistributedDataParallel of DTensors ends the process", patched=True)
attribute(
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "parameters that DistributedDataParallel is to ignore may be DTensors",
)


def install(is_ours: type, refuse: Callable[[nn.Module, str], None]) -> None:
    """Call `refuse(module, name)` if a tensor that it would replicate is of class `is_ours`."""

    def __init__(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        if isinstance(module, nn.Module):
            for found in (module.named_parameters(), module.named_buffers()):
                for name, tensor in found:
                    if isinstance(tensor, is_ours) and name not in ignored:
                        refuse(module, name)
        _plain(self, module, *args, **kwargs)

    replace(_INIT, like(__init__, _plain))
