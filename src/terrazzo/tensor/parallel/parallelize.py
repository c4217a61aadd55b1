"""`parallelize_module`: finds the modules that a plan names, applies its styles, and keeps tied parameters tied."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._meant import meant
from terrazzo.errors import ParallelPlanError, ParallelPlanTypeError
from terrazzo.tensor.api import SharedParameters
from terrazzo.tensor.convert import current_mesh
from terrazzo.tensor.parallel.style import ParallelStyle

ParallelPlan: TypeAlias = "ParallelStyle | Mapping[str, ParallelPlan]"


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelPlan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelize `module`, or the submodules that a plan names, in place; returns the module.

    >>> from terrazzo.tensor import init_device_mesh
    >>> from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel
    >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    >>> model[0].weight.placements, model[2].weight.placements
    ((Shard(dim=0),), (Shard(dim=1),))

    Names may be patterns, as in `{"blocks.*.attention.[qkv]": ColwiseParallel()}`.

    Parameters that modules share stay shared, also with modules that the plan does not name, and with modules that
    another call parallelizes. A key that matches no module gives a warning.

    Args:
        module: The module; it is changed.
        device_mesh: A mesh of one dimension, such as `mesh["tp"]`; None for that of the enclosing `with mesh:`.
        parallelize_plan: One style for the module itself, or styles by submodule name. Each part of a dotted name is a
            pattern (`*`, `?`, `[...]`) for the children at its level; the empty name is the module itself.
        src_data_rank: The rank of the mesh whose parameter values are used; None: every rank uses its own values, and
            nothing is sent.
    """
    mesh = current_mesh(device_mesh)
    if parallelize_plan is None:
        warnings.warn("parallelize_module without a parallelize_plan does nothing", stacklevel=2)
        return module
    shared = SharedParameters(module)
    found, unmatched = _resolve(module, parallelize_plan)
    for _, style in found:
        needed = getattr(style, "mesh_dims", 1)  # styles of other libraries have none
        if mesh.ndim != needed:
            raise ParallelPlanError(
                f"parallelize_module needs a mesh of {'one dimension' if needed == 1 else 'two dimensions'} for "
                f'{style!r}, this one has {mesh.ndim}: pass them alone, as in mesh["tp"] or mesh["ep", "tp"]'
            )
    for key, where in unmatched.items():
        warnings.warn(f"parallelize_plan: {key!r} matches no submodule of {where}; ignored there", stacklevel=2)
    for target, style in found:
        style.src_data_rank = src_data_rank
        result = style._apply(target, mesh)
        if target is module:
            module = result
    shared.share_again()
    return module


def _resolve(module: nn.Module, plan: ParallelPlan) -> tuple[list[tuple[nn.Module, ParallelStyle]], dict[str, str]]:
    """The modules that the plan names, each with its style, in the plan's order; and the keys that matched nothing,
    with where."""
    found: list[tuple[nn.Module, ParallelStyle]] = []
    unmatched: dict[str, list[str]] = {}

    def walk(at: nn.Module, path: str, plan: ParallelPlan, key: str) -> None:
        if isinstance(plan, ParallelStyle):
            found.append((at, plan))
            return
        if not isinstance(plan, Mapping):
            raise ParallelPlanTypeError(
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
            known = [name for name, _ in at.named_children()]
            there = meant(
                patterns[0], known, f", which has {', '.join(known[:8]) or 'none'}{', ...' if known[8:] else ''}"
            )
            unmatched.setdefault(key, []).append(f"{path or type(module).__name__}{there}")
        for name, child in children:
            descend(child, f"{path}.{name}" if path else name, patterns[1:], plan, key)

    walk(module, "", plan, "")
    return found, {key: ", ".join(places) for key, places in unmatched.items()}
