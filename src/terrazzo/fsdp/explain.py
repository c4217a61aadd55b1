"""`explain`: the plan of the next step of a sharded model; and how all functions that explain a model find its root."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from terrazzo._torch.modules import children_of
from terrazzo.errors import FSDPError
from terrazzo.fsdp.group import Group, group_of
from terrazzo.fsdp.plan.step import Plan, Run, expected, plan_step
from terrazzo.fsdp.run.root import Root, root_of


def explain(model: nn.Module) -> Plan:
    """The operations of the next step of a sharded model: a forward, its backward and the optimizer's step.

    `print` shows a line for each operation: the stream on which it runs, the bytes that a rank sends, and what it waits
    for; `operations` has them as data. They follow from sizes, settings, and the order in which modules ran in the last
    step. Before the first step, modules are expected to run in the order in which they are registered. Nothing is
    computed or communicated.

    Args:
        model: The root module.
    """
    group, root = sharded(model, "explain")
    spec = root.spec()
    outermost = (group if group in root.tops else root.tops[0]).modules[0]
    known = root.passes.get(root.positions[outermost])
    return plan_step(spec, known or expected(spec, _run_of(outermost, root.positions)))


def _run_of(module: nn.Module, positions: Mapping[nn.Module, int]) -> Run:
    return positions[module], tuple([_run_of(each, positions) for each in _sharded_in(module, positions)])


def _sharded_in(module: nn.Module, positions: Mapping[nn.Module, int]) -> list[nn.Module]:
    """The outermost sharded modules in `module`, each as often as it is registered."""
    found = []
    for child in children_of(module).values():
        if child is not None:
            found += [child] if child in positions else _sharded_in(child, positions)
    return found


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
