"""`parallelize_module`: finds the modules that a plan names, applies its styles, and keeps tied parameters tied."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.modules import parameters_of
from terrazzo.errors import DTensorError, ParallelPlanError
from terrazzo.tensor.convert import current_mesh
from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.parallel.style import ParallelStyle

ParallelPlan: TypeAlias = "ParallelStyle | Mapping[str, ParallelPlan]"
_Owner: TypeAlias = tuple[str, nn.Module, str]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelPlan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelize `module`, or the submodules that a plan names, in place; the module is returned.

        parallelize_module(model, mesh["tp"], {
            "blocks.*.attention.[qkv]": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(),
        })

    Parameters that modules of the plan share stay shared. A key that names no module is warned about.

    Args:
        module: The module; it is changed.
        device_mesh: A mesh of one dimension, such as `mesh["tp"]`; None for that of the enclosing `with mesh:`.
        parallelize_plan: One style for the module itself, or styles by submodule name. Each part of a dotted name is a
            pattern (`*`, `?`, `[...]`) for the children at its level; the empty name is the module itself.
        src_data_rank: The rank of the mesh whose values the parameters take; None: every rank has its part of the
            values already, and nothing is sent.
    """
    mesh = current_mesh(device_mesh)
    if mesh.ndim != 1:
        raise DTensorError(
            f"parallelize_module works along one mesh dimension, this mesh has {mesh.ndim}: pass one of them, such as "
            'mesh["tp"]'
        )
    if parallelize_plan is None:
        warnings.warn("parallelize_module without a parallelize_plan does nothing", stacklevel=2)
        return module
    tied = _tied_parameters(module)
    found, unmatched = _resolve(module, parallelize_plan)
    for key, where in unmatched.items():
        warnings.warn(f"parallelize_plan: {key!r} names no submodule of {where}; skipped there", stacklevel=2)
    for target, style in found:
        style.src_data_rank = src_data_rank
        result = style._apply(target, mesh)
        if target is module:
            module = result
    _tie_again(tied)
    return module


def _resolve(module: nn.Module, plan: ParallelPlan) -> tuple[list[tuple[nn.Module, ParallelStyle]], dict[str, str]]:
    """The modules that the plan names, each with its style, in the plan's order; and the names that found none, with
    where."""
    found: list[tuple[nn.Module, ParallelStyle]] = []
    unmatched: dict[str, list[str]] = {}

    def walk(at: nn.Module, path: str, plan: ParallelPlan, key: str) -> None:
        if isinstance(plan, ParallelStyle):
            found.append((at, plan))
            return
        if not isinstance(plan, Mapping):
            raise ParallelPlanError(
                f"parallelize_plan{f'[{key!r}]' if key else ''} must be a ParallelStyle or a dict of them by submodule "
                f"name, got {type(plan).__name__}"
            )
        for name, inner in plan.items():
            descend(at, path, name.split(".") if name else [], inner, f"{key}.{name}" if key else name)

    def descend(at: nn.Module, path: str, patterns: list[str], plan: ParallelPlan, key: str) -> None:
        if not patterns:
            walk(at, path, plan, key)
            return
        children = [(name, child) for name, child in at.named_children() if fnmatchcase(name, patterns[0])]
        if not children:
            unmatched.setdefault(key, []).append(path or type(module).__name__)
        for name, child in children:
            descend(child, f"{path}.{name}" if path else name, patterns[1:], plan, key)

    walk(module, "", plan, "")
    return found, {key: ", ".join(places) for key, places in unmatched.items()}


def _tied_parameters(module: nn.Module) -> list[list[_Owner]]:
    """The owners of each parameter that has several: modules with their names, and the parameter's name there."""
    owners: dict[int, list[_Owner]] = {}
    for path, submodule in module.named_modules():
        for name, parameter in parameters_of(submodule).items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((f"{path}.{name}".lstrip("."), submodule, name))
    return [group for group in owners.values() if len(group) > 1]


def _tie_again(tied: list[list[_Owner]]) -> None:
    """Each style made a DTensor of its own; owners of one parameter share the first again."""
    for group in tied:
        parameters: dict[str, Any] = {path: parameters_of(owner)[name] for path, owner, name in group}
        first: Any = next((p for p in parameters.values() if isinstance(p, DTensor)), None)
        if first is None:
            continue
        apart = [
            f"{path} is {p.placements if isinstance(p, DTensor) else 'a plain tensor'}"
            for path, p in parameters.items()
            if not isinstance(p, DTensor) or p._layout is not first._layout
        ]
        if apart:
            raise ParallelPlanError(
                f"{' and '.join(parameters)} are one parameter, which the plan would part: one is {first.placements}, "
                f"{', '.join(apart)}. Give their modules styles that place it alike, in one plan (an nn.Embedding cut "
                "by rows and an nn.Linear cut by columns do)"
            )
        for _, owner, name in group:
            if parameters_of(owner)[name] is not first:
                owner.register_parameter(name, first)
