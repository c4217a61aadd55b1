"""Allocating a model's tensors on the meta device: those that files fill, and buffers that the model computes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import torch
from torch import nn
from torch.autograd.graph import increment_version

from terrazzo.checkpoint.plan.sharded import is_sharded
from terrazzo.checkpoint.state_dict.names import ModelState

LOGGER: Final = logging.getLogger("terrazzo.integrations")


@torch.no_grad()
def materialised(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor itself, or for one on the meta device, an allocated one of the same layout."""
    if not tensor.is_meta:
        return tensor
    kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    mesh = getattr(tensor, "device_mesh", None)
    device = torch.get_default_device() if mesh is None else torch.device(mesh.device_type)
    return torch.empty_like(tensor.detach(), dtype=kept, device=device)


@torch.no_grad()
def put_in_place(model: nn.Module, state: ModelState, filled: Mapping[str, torch.Tensor]) -> None:
    """Set the newly allocated tensors in the model, and mark the others as written."""
    assigned: dict[str, torch.Tensor] = {}
    for name, tensor in filled.items():
        old = state.tensors[name]
        if tensor is old:
            local = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]  # duck-typed
            increment_version(local)
            continue
        if isinstance(old, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
        for alias in (name, *state.aliases[name]):
            assigned[state.names.shown(alias)] = tensor
    if assigned:
        model.load_state_dict(assigned, strict=False, assign=True)


@torch.no_grad()
def initialise_buffers(model: nn.Module) -> None:
    """Make the model compute the buffers that are not in the files and not allocated, where it can."""
    left: list[str] = []
    init = getattr(model, "_init_weights", None)
    for path, module in model.named_modules():
        before = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        if not before:
            continue
        persistent = module.state_dict()
        names = [name for name in before if name not in persistent]
        # Only for modules without parameters and persistent buffers: _init_weights would overwrite what was loaded.
        if callable(init) and not persistent and not any(True for _ in module.parameters(recurse=False)):
            made = {name: torch.empty_like(before[name], device=torch.get_default_device()) for name in names}
            versions = {name: buffer._version for name, buffer in made.items()}
            for name in names:
                setattr(module, name, made[name])
            init(module)
            for name in names:
                if getattr(module, name) is made[name] and made[name]._version == versions[name]:
                    setattr(module, name, before[name])  # it was not initialised
        left += [f"{path}.{name}".lstrip(".") for name in names if getattr(module, name).is_meta]
    if left:
        LOGGER.warning(
            "%s: not in the files, and the model has no function that computes them; they stay on the meta device",
            ", ".join(left),
        )
