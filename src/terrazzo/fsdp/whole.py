"""Whole parameters between steps: what programs see that know nothing of shards.

`show_whole` gathers a model and leaves its unsharded parameters registered; its state dicts have these from then on,
unless `reshard` was called. What users write to them goes to the shards before the next forward or optimizer step.
"""

from __future__ import annotations

from weakref import WeakSet

from torch import Tensor, nn

from terrazzo.fsdp.group import Group, group_of
from terrazzo.fsdp.run.root import Root, root_of

shown_whole: WeakSet[Root] = WeakSet()
"""Of the models whose state dicts are whole."""


def show_whole(model: nn.Module) -> None:
    """Gather all parameters, and have the unsharded ones registered until the next backward or `reshard`."""
    for root in dict.fromkeys(root_of(group) for group in _groups(model)):
        shown_whole.add(root)
        root.unshard_all()


def sharded_of(model: nn.Module, parameter: Tensor) -> Tensor | None:
    """The sharded parameter of an unsharded one, with what users have written to that, or itself; None: it is not one
    of the model."""
    for group in _groups(model):
        for param in group.params:
            if parameter is param.unsharded or parameter is param.sharded:
                group.unit.save_writes()
                return param.sharded
    return None


def _groups(model: nn.Module) -> list[Group]:
    found = (group_of(module) for module in model.modules())
    return list(dict.fromkeys(group for group in found if group is not None))


__all__ = ["sharded_of", "show_whole", "shown_whole"]
