"""Get and set optimizers' state dicts by parameter names.

An optimizer numbers its parameters in the order in which it got them, which may differ with another parallelism. Here
the state of each parameter, and its membership in a group, is keyed by the parameter's canonical name. Flat parameters
of FSDP1 can be split and joined by FSDP1 itself only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from terrazzo._torch.modules import keys_found
from terrazzo.checkpoint.state_dict import interop
from terrazzo.checkpoint.state_dict.lazy_state import complete_state
from terrazzo.checkpoint.state_dict.model import (
    finished,
    get_model_state_dict,
    set_model_state_dict,
    warn_about_submodules,
    within_submodules,
)
from terrazzo.checkpoint.state_dict.names import Names
from terrazzo.checkpoint.state_dict.optim_setting import GROUPS, PARAMS, STATE, Setter, flatten, renamed, unflatten
from terrazzo.checkpoint.state_dict.options import (
    Optimizers,
    OptimizerStateType,
    StateDictOptions,
    ValueType,
    as_tuple,
    checked,
)
from terrazzo.checkpoint.state_dict.tensors import broadcast_state
from terrazzo.errors import CheckpointError, CheckpointMismatchError


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> OptimizerStateType:
    """The merged state of the optimizers, keyed by the parameters' canonical names.

    Every trainable parameter has an entry, also before its first step, so that a checkpoint can be loaded into the
    result. The optimizers are not changed (PyTorch's function takes a step with them): call `set_optimizer_state_dict`
    with the loaded result.

    >>> model = torch.nn.Linear(1, 1)
    >>> state = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters(), lr=0.5))
    >>> state["param_groups"][0]["params"], sorted(state["state"]["weight"])
    (['weight', 'bias'], ['exp_avg', 'exp_avg_sq', 'step'])
    """
    options = checked(options)
    interop.reshard_all(model)
    names = Names(model, options.dsd_fqn_modifiers)
    known = {id(param): names.canonical(key) for key, param in model.named_parameters()}
    merged: OptimizerStateType = {STATE: {}, GROUPS: []}
    for optimizer in as_tuple(optimizers):
        if interop.fsdp1_modules(model):
            named = get_with_fsdp1(model, optimizer, names, options)
        else:
            named = _by_name(optimizer, known)
        merged[STATE].update(named[STATE])
        merged[GROUPS].extend(named[GROUPS])
    if submodules:
        warn_about_submodules()
        merged = _within_submodules(merged, model, names, submodules, options)
    return finished(flatten(merged) if options.flatten_optimizer_state_dict else merged, options)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any] | None,
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load a state dict keyed by canonical names (nested or flattened) into the optimizers.

    Tensors may be whole or distributed in any layout. The dict may have more parameters of the model than `optimizers`.
    One error lists missing state of trainable parameters and, with `strict`, names that the model does not have.
    `optim_state_dict` itself is not modified. With `options.broadcast_from_rank0` only rank 0's is used, and others may
    pass None.

    >>> model = torch.nn.Linear(1, 1)
    >>> old, new = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.25, 0.5))
    >>> set_optimizer_state_dict(model, new, get_optimizer_state_dict(model, old))
    >>> new.param_groups[0]["lr"]
    0.25
    """
    options = checked(options)
    optim_state_dict = optim_state_dict or {}
    interop.reshard_all(model)
    names = Names(model, options.dsd_fqn_modifiers)
    if interop.fsdp1_modules(model):
        set_with_fsdp1(model, as_tuple(optimizers), optim_state_dict, names, options)
        return
    with torch.no_grad():
        Setter(names, as_tuple(optimizers), options).load(optim_state_dict)


# ------------------------------------------------------------------ details of reading


def _by_name(optimizer: torch.optim.Optimizer, known: Mapping[int, str]) -> dict[str, Any]:
    by_index = complete_state(optimizer)
    ordered = [param for group in optimizer.param_groups for param in group[PARAMS]]
    strangers = [tuple(param.shape) for param in ordered if id(param) not in known]
    if strangers:
        raise CheckpointError(
            f"{type(optimizer).__name__} has parameters that are not in the model (shapes {strangers}): construct the "
            "optimizer after the model has been sharded, moved or materialised"
        )
    return renamed(by_index, lambda index: known[id(ordered[index])])


def _within_submodules(
    merged: OptimizerStateType,
    model: nn.Module,
    names: Names,
    submodules: set[nn.Module],
    options: StateDictOptions,
) -> OptimizerStateType:
    def chosen(entries: Mapping[str, Any]) -> dict[str, Any]:
        return within_submodules(dict(entries), model, names, submodules, options.keep_submodule_prefixes)

    groups = [{**group, PARAMS: list(chosen(dict.fromkeys(group[PARAMS])))} for group in merged[GROUPS]]
    return {STATE: chosen(merged[STATE]), GROUPS: [group for group in groups if group[PARAMS]]}


# ------------------------------------------------------------------ a model and its optimizers


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers | None,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, ValueType], OptimizerStateType]:
    """The state dicts of a model and its optimizers, ready for `terrazzo.checkpoint.save` or `load`.

    Keys are the names of parameters in the unwrapped model, so a state dict of one parallelism can be loaded with
    another.

    >>> import torch
    >>> model = torch.nn.Linear(1, 1)
    >>> weights, moments = get_state_dict(model, torch.optim.AdamW(model.parameters()))
    >>> sorted(weights) == sorted(moments["state"])
    True
    """
    every = as_tuple(optimizers)
    weights = get_model_state_dict(model, submodules=submodules, options=options)
    state = get_optimizer_state_dict(model, every, submodules=submodules, options=options) if every else {}
    return weights, state


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers | None,
    *,
    model_state_dict: Mapping[str, ValueType] | Mapping[nn.Module, Mapping[str, ValueType]] | None,
    optim_state_dict: Mapping[str, Any] | None,
    options: StateDictOptions | None = None,
) -> Any:
    """Load a model's and its optimizers' state dicts; returns the model's `missing_keys` and `unexpected_keys`.

    An empty `model_state_dict` leaves the model unchanged (with `broadcast_from_rank0`, only if rank 0's is empty).

    >>> import torch
    >>> model = torch.nn.Linear(1, 1)
    >>> adam = torch.optim.AdamW(model.parameters())
    >>> weights, moments = get_state_dict(model, adam)
    >>> set_state_dict(model, adam, model_state_dict=weights, optim_state_dict=moments)
    <All keys matched successfully>
    """
    every = as_tuple(optimizers)
    from_rank0 = options is not None and options.broadcast_from_rank0
    if every:
        if not optim_state_dict and not from_rank0:
            raise CheckpointMismatchError("optimizers were passed, but optim_state_dict is empty: pass their state")
        set_optimizer_state_dict(model, every, optim_state_dict, options=options)
    if not model_state_dict and not from_rank0:
        return keys_found([], [])
    return set_model_state_dict(model, model_state_dict, options=options)


# ------------------------------------------------------------------ optimizers of FSDP1 models


def get_with_fsdp1(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: Names, options: StateDictOptions
) -> dict[str, Any]:
    none: dict[str, Any] = {STATE: {}, GROUPS: []}  # on ranks that get nothing
    named = interop.fsdp1_optim_state(model, optimizer, complete_state(optimizer), options)
    return renamed(none | named, names.canonical)


def set_with_fsdp1(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    given: Mapping[str, Any],
    names: Names,
    options: StateDictOptions,
) -> None:
    """Set the state with FSDP1's own functions, which take nested dicts with shown keys."""
    if options.broadcast_from_rank0:
        given = broadcast_state(partial(dict, given), lambda _, whole: whole)
    for optimizer in optimizers:
        nested = given if STATE in given and GROUPS in given else _nested(model, optimizer, given, names)
        shown = renamed(nested, names.shown)
        optimizer.load_state_dict(interop.fsdp1_optim_to_load(model, optimizer, shown, options))


def _nested(
    model: nn.Module, optimizer: torch.optim.Optimizer, flat: Mapping[str, Any], names: Names
) -> dict[str, Any]:
    """The nested form, with the optimizer's present groups."""
    live = get_with_fsdp1(model, optimizer, names, StateDictOptions())
    nested = unflatten(flat, [name for group in live[GROUPS] for name in group[PARAMS]], live[STATE])
    saved = {group[PARAMS][0]: group for group in nested[GROUPS]}
    groups = [
        {**group, **(saved[group[PARAMS][0]] if group[PARAMS] else {}), PARAMS: group[PARAMS]} for group in live[GROUPS]
    ]
    return {STATE: nested[STATE], GROUPS: groups}
