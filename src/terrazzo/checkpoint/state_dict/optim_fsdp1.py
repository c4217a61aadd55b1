"""Optimizers of FSDP1 models, whose flat parameters only FSDP1 itself can split and join."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from terrazzo.checkpoint.state_dict import interop
from terrazzo.checkpoint.state_dict.broadcast import broadcast_state
from terrazzo.checkpoint.state_dict.flat_optim import GROUPS, PARAMS, STATE, unflatten
from terrazzo.checkpoint.state_dict.lazy_state import complete_state
from terrazzo.checkpoint.state_dict.names import Names
from terrazzo.checkpoint.state_dict.options import StateDictOptions


def get_with_fsdp1(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    by_index: dict[str, Any],
    names: Names,
    options: StateDictOptions,
) -> dict[str, Any]:
    named = interop.fsdp1_optim_state(model, optimizer, by_index, options)
    return {
        STATE: {names.canonical(key): entries for key, entries in named.get(STATE, {}).items()},
        GROUPS: [{**group, PARAMS: [names.canonical(key) for key in group[PARAMS]]} for group in named.get(GROUPS, ())],
    }


def set_with_fsdp1(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    given: Mapping[str, Any],
    names: Names,
    options: StateDictOptions,
) -> None:
    """Set the state with FSDP1's own functions, which take nested dicts with shown keys."""
    if options.broadcast_from_rank0:
        full = dict(given)
        given = broadcast_state(lambda: full, lambda _, whole: whole)
    for optimizer in optimizers:
        nested = given if STATE in given and GROUPS in given else _nested(model, optimizer, given, names)
        shown = {
            STATE: {names.shown(name): dict(entries) for name, entries in nested[STATE].items()},
            GROUPS: [{**group, PARAMS: [names.shown(name) for name in group[PARAMS]]} for group in nested[GROUPS]],
        }
        optimizer.load_state_dict(interop.fsdp1_optim_to_load(model, optimizer, shown, options))


def _nested(
    model: nn.Module, optimizer: torch.optim.Optimizer, flat: Mapping[str, Any], names: Names
) -> dict[str, Any]:
    """The nested form, with the optimizer's present groups."""
    live = get_with_fsdp1(model, optimizer, complete_state(optimizer), names, StateDictOptions())
    nested = unflatten(flat, [name for group in live[GROUPS] for name in group[PARAMS]], live[STATE])
    saved = {group[PARAMS][0]: group for group in nested[GROUPS]}
    groups = [
        {**group, **(saved[group[PARAMS][0]] if group[PARAMS] else {}), PARAMS: group[PARAMS]} for group in live[GROUPS]
    ]
    return {STATE: nested[STATE], GROUPS: groups}
