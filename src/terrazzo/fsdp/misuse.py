"""Mistakes that would not fail by themselves, but train nothing or waste memory: found and named."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from terrazzo.errors import FSDPError
from terrazzo.fsdp.parameter import replaced_name

if TYPE_CHECKING:
    from terrazzo.fsdp.unit import Unit

_WORTH_A_REMARK = 16 << 20  # bytes of whole parameters; below, one group for everything is as good

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
            f"{type(optimizer).__name__} was built before fully_shard: it holds {len(replaced)} parameters ({shown}) "
            "that the model no longer uses. Build the optimizer after sharding, from model.parameters()"
        )


def remark_on_single_group(root: nn.Module, units: list[Unit]) -> None:
    """A large model of repeated blocks in a single group is gathered whole: that saves nothing while it computes."""
    groups = [unit.group for unit in units if unit.group is not None]
    if len(groups) != 1 or groups[0].settings.mesh.size == 1:
        return
    whole = sum(bucket.whole_bytes for bucket in groups[0].buckets)
    if whole < _WORTH_A_REMARK:
        return
    for name, module in root.named_modules():
        kinds = {type(child) for child in module.children()}
        repeated = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and len(kinds) == 1
        if repeated and any(True for _ in module.parameters()):
            warnings.warn(
                f"fully_shard was called only on the root: all {whole >> 20} MiB of parameters are gathered at once, "
                f"and no communication overlaps with computation. Call it on each module of {name!r} first, then on "
                "the root",
                stacklevel=2,
            )
            return
