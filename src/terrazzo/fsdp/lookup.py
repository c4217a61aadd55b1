"""Find the root of a model that a user passes to `explain`, `report`, `timeline` or `trace`."""

from __future__ import annotations

from torch import nn

from terrazzo.errors import FSDPError
from terrazzo.fsdp.group import Group, group_of
from terrazzo.fsdp.run.root import Root, root_of


def sharded(model: nn.Module, function: str) -> tuple[Group, Root]:
    """The group and the root of a module that `fully_shard` was called on; raises for any other module."""
    group = group_of(model)
    if group is None:
        raise FSDPError(
            f"{type(model).__name__} is not sharded: {function} expects a module that fully_shard was called on"
        )
    root = root_of(group)
    root.form_units()
    return group, root
