"""Get and set a model's state dict with canonical names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from terrazzo.checkpoint.state_dict import interop
from terrazzo.checkpoint.state_dict.names import Names
from terrazzo.checkpoint.state_dict.options import StateDictOptions, ValueType, checked, submodule_prefixes
from terrazzo.checkpoint.state_dict.tensors import (
    broadcast_state,
    full,
    is_distributed,
    laid_out_like,
    map_paths,
    on_cpu,
    write_full,
)
from terrazzo.errors import CheckpointMismatchError


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, ValueType]:
    """The model's state dict with canonical names, for any parallelism.

    Tensors stay distributed unless `options.full_state_dict` is set.

    >>> sorted(get_model_state_dict(torch.nn.DataParallel(torch.nn.Linear(2, 2))))
    ['bias', 'weight']
    """
    options = checked(options)
    names = Names(model, options.dsd_fqn_modifiers)
    with torch.no_grad():
        with interop.fsdp1_state(model, options):
            raw = model.state_dict()
        state = {names.canonical(key): value for key, value in raw.items()}
        if options.ignore_frozen_params:
            for name, tensor in names.aliases().items():
                if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                    state.pop(name, None)
        if submodules:
            warn_about_submodules()
            state = within_submodules(state, model, names, submodules, options.keep_submodule_prefixes)
        return finished(state, options)


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, ValueType] | Mapping[nn.Module, Mapping[str, ValueType]] | None,
    *,
    options: StateDictOptions | None = None,
) -> Any:
    """Load a state dict with canonical names into the model; returns `missing_keys` and `unexpected_keys`.

    Values may be whole or distributed, in any layout: each rank takes its part. With `options.broadcast_from_rank0`
    only rank 0's dict is used, and others may pass None. `model_state_dict` itself is not modified.

    >>> model = torch.nn.Linear(1, 1)
    >>> set_model_state_dict(model, {"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
    <All keys matched successfully>
    """
    options = checked(options)
    interop.reshard_all(model)
    names = Names(model, options.dsd_fqn_modifiers)
    state = _by_name(model, names, model_state_dict or {})
    flattened_by_fsdp1 = bool(interop.fsdp1_modules(model))
    # FSDP1 splits its flat parameters itself.
    targets = {} if flattened_by_fsdp1 else names.aliases()

    with torch.no_grad():
        if options.broadcast_from_rank0:  # misfits are found when tensors arrive, and raised on all ranks
            state = broadcast_state(
                partial(dict, state),
                lambda path, whole: _placed(path[0], whole, targets.get(path[0]), in_place=True),
            )
        else:
            _refuse_misfits(state, targets)
            state = {name: _placed(name, value, targets.get(name)) for name, value in state.items()}
        to_assign = any(tensor.is_meta for tensor in targets.values())
        if to_assign:
            _share_assigned(state, targets)
        elsewhere = StateDictOptions(full_state_dict=options.full_state_dict)
        with interop.fsdp1_state(model, elsewhere):
            return _load(model, state, names, strict=options.strict, assign=to_assign)


# ------------------------------------------------------------------ shared with optimizers


def finished(state: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """`state`, gathered and moved as the options say."""
    if not options.full_state_dict and not options.cpu_offload:
        return state
    grouped = dist.is_available() and dist.is_initialized()
    only_first = options.full_state_dict and options.cpu_offload and grouped
    keep = not only_first or dist.get_rank() == 0  # the other ranks take part in the gathering

    def moved(_: tuple[Any, ...], value: Any) -> Any:
        value = full(value) if options.full_state_dict else value
        if not keep:
            return None
        return on_cpu(value) if options.cpu_offload else value

    result: dict[str, Any] = map_paths(state, moved)
    return result if keep else {}


def within_submodules(
    state: dict[str, Any], model: nn.Module, names: Names, submodules: set[nn.Module], keep_prefixes: bool
) -> dict[str, Any]:
    """The entries of a name-keyed dict that belong to `submodules`."""
    chosen: dict[str, Any] = {}
    for path in submodule_prefixes(model, submodules):
        prefix = f"{names.canonical(path)}." if path else ""
        for name, value in state.items():
            if name.startswith(prefix):
                chosen[name if keep_prefixes else name.removeprefix(prefix)] = value
    return chosen


def warn_about_submodules() -> None:
    warnings.warn(
        "`submodules` is deprecated: filter the keys of the whole state dict instead", FutureWarning, stacklevel=4
    )


# ------------------------------------------------------------------ details


def _by_name(model: nn.Module, names: Names, state: Mapping[Any, Any]) -> dict[str, Any]:
    """A new dict by canonical names, from one that may be keyed by submodules."""
    if not any(isinstance(key, nn.Module) for key in state):
        return dict(state)
    warnings.warn("a state dict keyed by modules is deprecated: prefix its keys instead", FutureWarning, stacklevel=3)
    paths = {module: path for path, module in submodule_prefixes(model, set(state)).items()}
    result = {}
    for module, entries in state.items():
        prefix = f"{names.canonical(paths[module])}." if paths[module] else ""
        result.update({prefix + name: value for name, value in entries.items()})
    return result


def _refuse_misfits(state: Mapping[str, Any], targets: Mapping[str, torch.Tensor]) -> None:
    """Raise one error for all shapes that differ, before anything is written."""
    misfits = {
        name: f"{name}: {tuple(value.shape)} in the state dict, {tuple(targets[name].shape)} in the model"
        for name, value in state.items()
        if name in targets and isinstance(value, torch.Tensor) and value.shape != targets[name].shape
    }
    if misfits:
        raise CheckpointMismatchError(
            "shapes differ between the state dict and the model:\n  " + "\n  ".join(misfits.values()),
            mismatched=tuple(misfits),
        )


def _placed(name: str, value: Any, target: torch.Tensor | None, *, in_place: bool = False) -> Any:
    """`value` in the layout of the model's tensor, for `Module.load_state_dict`.

    With `in_place` a tensor that is not distributed is copied into the model's tensor at once, and not kept.
    """
    if target is None or not isinstance(value, torch.Tensor):
        return value
    if target.is_meta:
        return _materialised(name, value, target)
    if (in_place or is_distributed(target)) and not is_distributed(value):
        write_full(target, value, name)
        return target
    return laid_out_like(value, target, name)


def _materialised(name: str, value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A new tensor with the layout of the meta tensor `target` and the values of `value`."""
    if not is_distributed(target):
        whole = laid_out_like(value, target, name)
        return whole.to(target.dtype, copy=True)
    device = target.device_mesh.device_type  # type: ignore[attr-defined]  # duck-typed
    result = torch.empty_like(target, device=device)
    if is_distributed(value):
        result.copy_(laid_out_like(value, result, name))
    else:
        write_full(result, value, name)
    return result


def _share_assigned(state: dict[str, Any], targets: Mapping[str, torch.Tensor]) -> None:
    """Use the same new parameter for all names of a shared one, which loading by assignment would untie.

    Tensors that are not on the meta device are written in place, because an optimizer may refer to them.
    """
    assigned: dict[int, Any] = {}
    for name, target in targets.items():
        if not isinstance(state.get(name), torch.Tensor):
            continue
        if not target.is_meta:
            if state[name] is not target:
                target.copy_(state[name])
            state[name] = target
        elif isinstance(target, nn.Parameter):
            fresh = assigned.get(id(target))
            state[name] = assigned[id(target)] = (
                nn.Parameter(state[name], requires_grad=target.requires_grad) if fresh is None else fresh
            )


def _load(model: nn.Module, state: dict[str, Any], names: Names, *, strict: bool, assign: bool) -> Any:
    """`model.load_state_dict`, with canonical names in the state dict and the result."""
    shown = {names.shown(name): value for name, value in state.items()}
    report = model.load_state_dict(shown, strict=False, assign=assign)
    missing = [names.canonical(key) for key in report.missing_keys]
    unexpected = [names.canonical(key) for key in report.unexpected_keys]
    if strict and (missing or unexpected):
        raise CheckpointMismatchError(
            f"the state dict does not fit {type(model).__name__}: "
            f"missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}; "
            "StateDictOptions(strict=False) loads the keys that match",
            missing=tuple(missing),
        )
    return type(report)(missing, unexpected)
