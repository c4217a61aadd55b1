"""Mistakes that would not fail by themselves, but train nothing or waste memory: found and named."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from terrazzo.errors import FSDPError
from terrazzo.fsdp.parameter import replaced_name

_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_watching = False


def watch_optimizers() -> None:
    """Look at every optimizer before its first step."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_check_parameters)


def _check_parameters(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """An optimizer that was built before sharding holds parameters that nothing computes with."""
    if optimizer in _checked and _checked[optimizer] == len(optimizer.param_groups):
        return
    _checked[optimizer] = len(optimizer.param_groups)
    replaced = [
        name
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (name := replaced_name(parameter)) is not None
    ]
    if replaced:
        del _checked[optimizer]
        shown = ", ".join(repr(name) for name in replaced[:3]) + (", ..." if len(replaced) > 3 else "")
        raise FSDPError(
            f"{type(optimizer).__name__} was built before fully_shard: it holds {len(replaced)} parameters ({shown}) that the "
            "model no longer uses. Build the optimizer after sharding, from model.parameters()"
        )
