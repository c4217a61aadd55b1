"""Detect mistakes that raise no error by themselves, but do not train the model or waste memory."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from terrazzo.errors import FSDPError
from terrazzo.fsdp.parameter import IGNORED, KEPT, REPLACED, SHARDED, marked
from terrazzo.tensor import DTensor

_WORTH_A_REMARK = 16 << 20  # bytes of unsharded parameters; smaller models may well be one group


class _Known(NamedTuple):
    """An optimizer's parameters when they were last checked."""

    groups: list[list[int]]  # their ids, by group
    ids: frozenset[int]


_checked: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
_watching = False


def watch_optimizers() -> None:
    """Check every optimizer before its first step, and note its steps."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_note_step)


def check_optimizers_again() -> None:
    """Check every optimizer before its next step, because parameters were replaced."""
    _checked.clear()


def _before_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    ids = _check_parameters(optimizer)
    for root in _roots():
        root.before_step(ids)


def _check_parameters(optimizer: Optimizer) -> frozenset[int]:
    """Raise if the optimizer has parameters that the model does not use: it was constructed before `fully_shard`, or
    before parameters were replaced. Returns the ids of its parameters."""
    groups = [[*map(id, group["params"])] for group in optimizer.param_groups]
    known = _checked.get(optimizer)
    if known is not None and known.groups == groups:
        return known.ids
    ids = frozenset(one for group in groups for one in group)
    _checked[optimizer] = _Known(groups, ids)
    found = [
        (name, marked(parameter, SHARDED) is not None)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (name := marked(parameter, REPLACED)) is not None
    ]
    replaced = [name for name, _ in found]
    _refuse_unsharded(optimizer)
    _remark_on_added(optimizer)
    if replaced:
        del _checked[optimizer]
        if all(sharded for _, sharded in found):
            raise FSDPError(
                f"{type(optimizer).__name__} was built before parameters of the model were replaced, as "
                f"load_state_dict(assign=True) and assignments do: it holds {len(replaced)} parameters "
                f"({shown(replaced)}) that the model no longer uses. Build the optimizer from model.parameters() "
                "afterwards"
            )
        raise FSDPError(
            f"{type(optimizer).__name__} was built before fully_shard: it holds {len(replaced)} parameters "
            f"({shown(replaced)}) "
            "that the model no longer uses. Build the optimizer after sharding, from model.parameters()"
        )
    return ids


_models: weakref.WeakSet[Any] = weakref.WeakSet()  # the roots
_models_change = Lock()  # threads may train models of their own


def note_model(root: Any) -> None:
    """This model is sharded, and about to run."""
    with _models_change:
        _models.add(root)


def _roots() -> list[Any]:
    with _models_change:
        return list(_models)


def _names_in(optimizer: Optimizer, names: dict[int, str]) -> list[str]:
    """The names, by id, of those of its parameters that have one."""
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]


def shown(names: Sequence[str]) -> str:
    """The first names, for a message."""
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def _refuse_unsharded(optimizer: Optimizer) -> None:
    """Raise for an optimizer that was given a module's parameters while it was unsharded: these get no gradients."""
    params = [param for root in _roots() for group in root.groups for param in group.params]
    found = _names_in(optimizer, {id(p.unsharded): p.name for p in params if p.unsharded is not None})
    kept = [marked(param, KEPT) for group in optimizer.param_groups for param in group["params"]]
    found += [name for name in kept if name is not None]
    if found:
        del _checked[optimizer]
        raise FSDPError(
            f"{type(optimizer).__name__} was built while {len(found)} of its parameters ({shown(found)}) were "
            "unsharded, as those of the root are after an evaluation, or kept by reshard_after_forward=n: it would not "
            "train them. Call reshard() on the modules that hold them, or build the optimizer before the first forward"
        )


def _remark_on_added(optimizer: Optimizer) -> None:
    """Parameters that came into a sharded model later differ between ranks once they are trained."""
    modules = [module for root in _roots() for top in root.tops for module in top.modules]
    plain = {
        id(p): name
        for module in modules
        for name, p in module.named_parameters()
        if p.requires_grad and not isinstance(p, DTensor) and marked(p, IGNORED) is None
    }
    names = _names_in(optimizer, plain)
    if names:
        warnings.warn(
            f"parameters that came into the model after fully_shard ({shown(names)}) are not sharded, and no rank "
            "averages their gradients: each rank trains its own. Add modules before fully_shard; if you average the "
            "gradients yourself, name the parameters in ignored_params",
            stacklevel=3,
        )


def _note_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Count the write, as version counters may not: optimizers write through `.data` or with their own kernels."""
    known = _checked.get(optimizer)
    ids = frozenset() if known is None else known.ids
    for root in _roots():
        root.after_step(ids)


def remark_on_writes(written: list[str], known: set[str]) -> set[str]:
    """Warn about parameters that were written to while their module ran, unless they are `known`; returns the others.

    The ranks do not compare what they wrote, which would take a message in every step.
    """
    new = [name for name in written if name not in known]
    if new:
        warnings.warn(
            f"parameters ({shown(new)}) were written to while their module ran, or before its backward ended: each "
            "rank keeps of that what it wrote to its own rows. This is as on one device if all ranks write the same, "
            "and not if it depends on the batch, as in nn.Embedding(max_norm=...)",
            stacklevel=2,
        )
    return set(new)


def remark_on_unsharded_gradients(names: list[str]) -> None:
    """Warn about gradients of unsharded parameters that the optimizer does not have."""
    if names:
        warnings.warn(
            f".grad of parameters ({shown(names)}) was set while they were unsharded, as those of the root are after "
            "an evaluation, or by a backward after that of the model: the optimizer does not see it. Call reshard() on "
            "the model before .grad is set, and add what is computed from parameters to the loss",
            stacklevel=5,
        )


def remark_on_hooks(names: list[str]) -> None:
    """Warn about hooks that are never called, because the sharded parameter is another tensor."""
    if names:
        warnings.warn(
            f"hooks were registered on parameters ({shown(names)}) before fully_shard, which replaces the parameters: "
            "they will not be called. Register them after sharding",
            stacklevel=3,
        )


def remark_on_one_rank() -> None:
    """Warn about reshard_after_forward=1, which looks like True."""
    warnings.warn(
        "reshard_after_forward=1 keeps the parameters sharded over 1 rank, that is whole, as False does. Pass True to "
        "free them after forward",
        stacklevel=4,
    )


def remark_on_graph() -> None:
    """Warn, because the program may want to differentiate `.grad` of parameters."""
    warnings.warn(
        "backward(create_graph=True): gradients of sharded parameters have no graph, because reducing them has no "
        "derivative. Gradients of inputs have one: torch.autograd.grad(loss, inputs, create_graph=True)",
        stacklevel=2,
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
