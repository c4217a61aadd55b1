"""What `fully_shard` will do in a step, before it does it."""

from __future__ import annotations

from torch import nn

from terrazzo.errors import FSDPError
from terrazzo.fsdp.group import group_of
from terrazzo.fsdp.plan.step import Plan, plan_steps
from terrazzo.fsdp.run.root import root_of


def explain(model: nn.Module) -> Plan:
    """The operations of a step of a sharded model: one forward of all its modules in their order, one backward, a step.

    Printed, it is a line per operation, with the stream on which it runs, the bytes that a rank sends, and what it
    waits for; `operations` are the same as data. It follows from sizes and settings alone, so nothing is run.

    Args:
        model: The root module.
    """
    group = group_of(model)
    if group is None:
        raise FSDPError(
            f"{type(model).__name__} was not sharded: explain takes a module that fully_shard was called on"
        )
    return plan_steps(root_of(group).spec())
