"""Detect mistakes that raise no error by themselves, but do not train the model or waste memory."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from terrazzo.errors import FSDPError
from terrazzo.fsdp.parameter import replaced_name
from terrazzo.tensor.dtensor import WRITTEN

_WORTH_A_REMARK = 16 << 20  # bytes of unsharded parameters; smaller models may well be one group

_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_watching = False


def watch_optimizers() -> None:
    """Check every optimizer before its first step, and note its steps."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_check_parameters)
        register_optimizer_step_post_hook(_note_step)


def _check_parameters(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Raise if the optimizer was constructed before `fully_shard`: the model does not use its parameters."""
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
            f"{type(optimizer).__name__} was built before fully_shard: it holds {len(replaced)} parameters ({shown}) "
            "that the model no longer uses. Build the optimizer after sharding, from model.parameters()"
        )


def _note_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Count the write, as version counters may not: optimizers write through `.data` or with their own kernels."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            written = parameter.__dict__.get(WRITTEN)
            if written is not None:
                written()


def remark_on_one_rank() -> None:
    """Warn about reshard_after_forward=1, which looks like True."""
    warnings.warn(
        "reshard_after_forward=1 keeps the parameters sharded over 1 rank, that is whole, as False does. Pass True to "
        "free them after forward",
        stacklevel=4,
    )


def remark_on_single_group(root: nn.Module, nbytes: int) -> None:
    """Warn about a large model of repeated blocks in one group: it is gathered at once, which saves no memory."""
    if nbytes < _WORTH_A_REMARK:
        return
    for name, module in root.named_modules():
        kinds = {type(child) for child in module.children()}
        repeated = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and len(kinds) == 1
        if repeated and any(True for _ in module.parameters()):
            warnings.warn(
                f"fully_shard was called only on the root: all {nbytes >> 20} MiB of parameters are gathered at once, "
                f"and no communication overlaps with computation. Call it on each module of {name!r} first, then on "
                "the root",
                stacklevel=2,
            )
            return
