"""`terrazzo.install()`: libraries that import PyTorch's names get terrazzo's.

In PyTorch's modules for distributed tensors, `fully_shard` and checkpoints, public names are replaced by terrazzo's
objects of the same name, until `uninstall()`. Names that have another meaning in terrazzo or are missing there stay
PyTorch's, and `install` returns a list of them. Private functions that libraries import are PyTorch's, but get
PyTorch's objects in place of terrazzo's, or raise: see `translating`. Code that imported a name before keeps what it
imported, and a warning says where.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from terrazzo._torch.replaced import Replacement, replace, restore
from terrazzo.fsdp.pipelining import STAGE_METHODS
from terrazzo.integrations.compiling import compiling
from terrazzo.integrations.translating import is_helper, refusing, translated, without_our_placements
from terrazzo.layout.drawing import Shown
from terrazzo.tensor.attributes import NoRawAccess

# PyTorch's modules, below torch.distributed, and terrazzo's modules with the same names.
MODULES: Final[Mapping[str, str]] = {
    "tensor": "terrazzo.tensor",
    "tensor.debug": "terrazzo.tensor.debug",
    "tensor.experimental": "terrazzo.tensor.experimental",
    "tensor.parallel": "terrazzo.tensor.parallel",
    "tensor.parallel.api": "terrazzo.tensor.parallel",
    "tensor.parallel.input_reshard": "terrazzo.tensor.parallel.input_reshard",
    "tensor.parallel.loss": "terrazzo.tensor.parallel",
    "tensor.parallel.style": "terrazzo.tensor.parallel",
    "tensor.placement_types": "terrazzo.tensor.placement_types",
    "tensor._dtensor_spec": "terrazzo.tensor.libraries",
    "tensor._ops.single_dim_strategy": "terrazzo.tensor.experimental.register_sharding",
    "tensor._redistribute": "terrazzo.tensor.libraries",
    "tensor._utils": "terrazzo.tensor.libraries",
    "fsdp": "terrazzo.fsdp",
    "checkpoint": "terrazzo.checkpoint",
    "checkpoint.api": "terrazzo.checkpoint.api",
    "checkpoint.default_planner": "terrazzo.checkpoint.default_planner",
    "checkpoint.filesystem": "terrazzo.checkpoint.filesystem",
    "checkpoint.format_utils": "terrazzo.checkpoint.format_utils",
    "checkpoint.hf_storage": "terrazzo.checkpoint.hf_storage",
    "checkpoint.metadata": "terrazzo.checkpoint.metadata",
    "checkpoint.optimizer": "terrazzo.checkpoint.optimizer",
    "checkpoint.planner": "terrazzo.checkpoint.planner",
    "checkpoint.planner_helpers": "terrazzo.checkpoint.planner_helpers",
    "checkpoint.protocol": "terrazzo.checkpoint.protocol",
    "checkpoint.quantized_hf_storage": "terrazzo.checkpoint.quantized_hf_storage",
    "checkpoint.staging": "terrazzo.checkpoint.staging",
    "checkpoint.state_dict": "terrazzo.checkpoint.state_dict",
    "checkpoint.state_dict_loader": "terrazzo.checkpoint.state_dict_loader",
    "checkpoint.state_dict_saver": "terrazzo.checkpoint.state_dict_saver",
    "checkpoint.stateful": "terrazzo.checkpoint.stateful",
    "checkpoint.storage": "terrazzo.checkpoint.storage",
    "checkpoint.utils": "terrazzo.checkpoint.utils",
    # Older or private modules with the same names, from which libraries import them.
    "_composable.fsdp": "terrazzo.fsdp",
    "_composable.fsdp.fully_shard": "terrazzo.fsdp",
    "_tensor": "terrazzo.tensor",
    "_tensor.api": "terrazzo.tensor",
    "_tensor.experimental._attention": "terrazzo.tensor.experimental",
    "_tensor.placement_types": "terrazzo.tensor.placement_types",
    "checkpoint._consolidate_hf_safetensors": "terrazzo.checkpoint._consolidate_hf_safetensors",
    "checkpoint._fsspec_filesystem": "terrazzo.checkpoint._fsspec_filesystem",
    "fsdp._fully_shard": "terrazzo.fsdp",
    "tensor.experimental._attention": "terrazzo.tensor.experimental",
}

_PRIVATE_NAMES: Final = (
    *("_StridedShard", "_MaskPartial", "_EmptyStateDictLoadPlanner"),
    *("_load_state_dict", "_load_state_dict_from_keys"),
)
"""Private names that are replaced like public ones."""

_PYTORCHS_FILES: Final = "terrazzo.checkpoint.formats.dcp_folder"
"""Has writers that are replaced by others than terrazzo's of the same name: they write what PyTorch's write."""

# PyTorch's private modules whose functions libraries call with tensors, placements, modules or state dicts.
HELPERS: Final = (
    "_composable_state",
    "_state_dict_utils",
    "checkpoint._dedup_save_plans",
    "checkpoint._dedup_tensors",
    "checkpoint._nested_dict",
    "checkpoint._pg_transport",
    "checkpoint._sharded_tensor_utils",
    "checkpoint._state_dict_stager",
    "checkpoint._storage_utils",
    "checkpoint._traverse",
    "checkpoint.resharding",
    "fsdp._fully_shard._fsdp_api",
    "fsdp._fully_shard._fsdp_state",
    "fsdp._fully_shard._fully_shard",
    "tensor._api",
    "tensor._collective_utils",
    "tensor._dtensor_spec",
    "tensor._redistribute",
    "tensor._utils",
    "tensor.experimental._context_parallel._attention",
    "utils",
)

_CHANGES_PYTORCHS_ONLY: Final = (
    "_disable_context_parallel_dispatcher",
    "_disable_custom_loss_ops",
    "_enable_context_parallel_dispatcher",
    "_enable_custom_loss_ops",
    "ExplicitRedistributionContext",
)
"""Functions that stay PyTorch's: they take no argument of terrazzo's, and change only what PyTorch's DTensors do."""


@dataclass(frozen=True, repr=False)
class Installed(Shown):
    """What `install` has done.

    Attributes:
        replaced: for each of PyTorch's modules, the names that are terrazzo's now.
        kept: for each of PyTorch's modules, the public names that are still PyTorch's.
        translated: for each of PyTorch's modules, the functions, most of them private, that are PyTorch's and accept
            terrazzo's DTensors and placements, or raise an error.
    """

    replaced: Mapping[str, tuple[str, ...]]
    kept: Mapping[str, tuple[str, ...]]
    translated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = (("replaced", self.replaced), ("kept", self.kept), ("translated", self.translated))
        count = [f"{sum(map(len, names.values()))} {what} in {len(names)} modules" for what, names in parts]
        return f"names of PyTorch: {', '.join(count)}"


class InstallWarning(UserWarning):
    """A name was imported before `install`, so that code still has PyTorch's object."""


_lock = threading.RLock()
_installed: Installed | None = None


def install() -> Installed:
    """Replace PyTorch's names by terrazzo's, for libraries that import them. A second call does nothing.

    >>> import torch.distributed.fsdp, terrazzo
    >>> done = terrazzo.install()
    >>> torch.distributed.fsdp.fully_shard is terrazzo.fsdp.fully_shard
    True
    >>> "FullyShardedDataParallel" in done.kept["torch.distributed.fsdp"]
    True
    >>> terrazzo.uninstall()
    >>> torch.distributed.fsdp.fully_shard is terrazzo.fsdp.fully_shard
    False
    """
    global _installed
    with _lock:
        if _installed is not None:
            return _installed
        before: list[Replacement] = []
        pairs = [(theirs, ours) for theirs, ours in map(_both, MODULES.items()) if theirs is not None]
        public = {theirs: _public(theirs) for theirs, _ in pairs}
        writers = vars(importlib.import_module(_PYTORCHS_FILES))
        for theirs, ours in pairs:
            private = [name for name in _PRIVATE_NAMES if hasattr(theirs, name) and hasattr(ours, name)]
            found = [name for name in public[theirs] if ours is not None and _is_ours(getattr(ours, name, None))]
            for name in private + found:
                new = writers[name] if name in writers["__all__"] else getattr(ours, name)
                before.append(Replacement(theirs, name, getattr(theirs, name), new))
        helpers = _helpers(list(public), before)
        _warn_of_holders(before + helpers)
        replace([*before, *helpers, Replacement(torch, "compile", torch.compile, compiling(torch.compile))])
        replaced: dict[str, tuple[str, ...]] = {}
        translated: dict[str, tuple[str, ...]] = {}
        ours_now = {id(entry.new) for entry in before}
        for entry in before + helpers:
            if isinstance(entry.home, types.ModuleType):
                names = replaced if id(entry.new) in ours_now else translated
                names[entry.home.__name__] = (*names.get(entry.home.__name__, ()), entry.name)
        kept = {
            t.__name__: tuple(n for n in names if n not in replaced.get(t.__name__, ())) for t, names in public.items()
        }
        _installed = Installed(replaced, {name: names for name, names in kept.items() if names}, translated)
        return _installed


def uninstall() -> None:
    """Restore PyTorch's names; code that imported a name in between keeps terrazzo's."""
    global _installed
    with _lock:
        restore()
        _installed = None


def _helpers(public: list[types.ModuleType], before: list[Replacement]) -> list[Replacement]:
    """The functions of these and of private modules that stay PyTorch's, for arguments of terrazzo's classes."""
    ours = {id(entry.old): entry.new for entry in before}
    classes = {entry.old: entry.new for entry in before if isinstance(entry.old, type)}
    done = {(entry.home, entry.name) for entry in before}
    private = [module for path in HELPERS if (module := _module(f"torch.distributed.{path}")) is not None]
    result: list[Replacement] = []
    for module in dict.fromkeys(public + private):
        for name, value in vars(module).items():
            if (module, name) in done:
                continue
            full = f"{module.__name__}.{name}"
            new = ours.get(id(value), value)
            if name in _CHANGES_PYTORCHS_ONLY:
                new = refusing(full, value)
            elif new is value and is_helper(value):
                new = translated(full, value, classes)
            if new is not value:
                result.append(Replacement(module, name, value, new))
    spec = getattr(_module("torch.distributed.tensor._dtensor_spec"), "DTensorSpec", None)
    if spec is not None:
        set_up = spec.__post_init__
        full = "torch.distributed.tensor._dtensor_spec.DTensorSpec"
        result.append(Replacement(spec, "__post_init__", set_up, without_our_placements(full, set_up)))
    stage = getattr(_module("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    if stage is not None:
        for name, make in STAGE_METHODS.items():
            result.append(Replacement(stage, name, getattr(stage, name), make(getattr(stage, name))))
    # Libraries compare the addresses of parameters to find shared ones; PyTorch's DTensors have address 0.
    result.append(Replacement(NoRawAccess, "data_ptr", NoRawAccess.data_ptr, lambda self: 0))
    return result


def _both(pair: tuple[str, str]) -> tuple[types.ModuleType | None, types.ModuleType | None]:
    return _module(f"torch.distributed.{pair[0]}"), _module(pair[1])


def _module(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:  # not in this version of PyTorch, or not in terrazzo
        return None


def _public(module: types.ModuleType) -> list[str]:
    """The public names of one of PyTorch's modules: its `__all__`, or what it defines."""
    declared = getattr(module, "__all__", None)
    if declared is not None:
        return [name for name in dict.fromkeys(declared) if hasattr(module, name)]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (getattr(value, "__module__", None) or "").startswith("torch.distributed.")
    ]


def _is_ours(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return False
    return (getattr(value, "__module__", None) or "").startswith("terrazzo.")


def _warn_of_holders(before: list[Replacement]) -> None:
    """Warn about modules that imported some of PyTorch's names before."""
    names = {id(entry.old): entry.name for entry in before}
    holders: dict[str, list[str]] = {}
    modules = {id(module): (name, module) for name, module in reversed([*sys.modules.items()])}  # by one of its names
    for module_name, module in modules.values():
        top = module_name.partition(".")[0]
        if top in ("torch", "terrazzo", "_pytest", "pytest") or not isinstance(module, types.ModuleType):
            continue
        held = sorted({names[id(value)] for value in list(vars(module).values()) if id(value) in names})
        if held:
            holders[module_name] = held
    if holders:
        said = "; ".join(f"{module}: {', '.join(held)}" for module, held in holders.items())
        warnings.warn(
            f"terrazzo.install() came after some names of torch.distributed were imported, which stay PyTorch's "
            f"({said}): call it first, or start the program with `terrazzo run`",
            InstallWarning,
            stacklevel=3,
        )


__all__ = ["InstallWarning", "Installed", "install", "uninstall"]
