"""PyTorch's private helpers under `terrazzo.install()`: they get PyTorch's objects in place of terrazzo's.

PyTorch's private functions know PyTorch's classes only, and take all others for what they are not: a placement of
terrazzo's for a replica, a DTensor for a plain tensor. So each is called with PyTorch's DTensors and placements, which
share memory with terrazzo's, and its results are converted back. What cannot be converted raises an error.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import types
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final

from torch import nn

from terrazzo._torch.replaced import HOMES, originals
from terrazzo.checkpoint.formats import torch_storage
from terrazzo.errors import PrivateHelperError
from terrazzo.fsdp import FSDPModule
from terrazzo.layout import Placement
from terrazzo.layout.placement import _StridedShard
from terrazzo.tensor import DTensor, interop
from terrazzo.tensor.foreign import is_torch_dtensor

_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper)
_FROM: Final = (*HOMES, "torch.distributed.utils", "torch._C")
_CALLBACKS: Final = (types.FunctionType, types.MethodType, functools.partial)

# What to use instead, by the beginning of the helper's full name.
_INSTEAD: Final[Mapping[str, str]] = {
    "torch.distributed.checkpoint.state_dict.": "the public functions of terrazzo.checkpoint.state_dict",
    "torch.distributed.checkpoint": "terrazzo.checkpoint, its planners, readers and writers",
    "torch.distributed._state_dict_utils": "the public functions of terrazzo.checkpoint.state_dict",
    "torch.distributed._composable_state": "isinstance(module, terrazzo.fsdp.FSDPModule) and the methods of FSDPModule",
    "torch.distributed.fsdp": "isinstance(module, terrazzo.fsdp.FSDPModule) and the methods of FSDPModule",
    "torch.distributed.tensor.experimental": "terrazzo.tensor.experimental.context_parallel",
    "torch.distributed.tensor.parallel": "terrazzo.tensor.parallel.loss_parallel",
    "torch.distributed.tensor._utils.Explicit": 'terrazzo.tensor.debug.communication_policy("error")',
    "torch.distributed": "the methods of terrazzo.tensor.DTensor (to_local, redistribute, __create_chunk_list__)",
}


def is_helper(value: Any) -> bool:
    """Whether this is a function of PyTorch's that `translated` is for."""
    return isinstance(value, _FUNCTIONS) and (getattr(value, "__module__", None) or "").startswith(_FROM)


def translated(name: str, function: Callable[..., Any], replaced: Mapping[type[Any], type[Any]]) -> Callable[..., Any]:
    """`function`, PyTorch's helper of this full name, for arguments of terrazzo's classes.

    `replaced` has terrazzo's classes for PyTorch's, which must not come out of the function.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        translation = _Translation(name, replaced)
        with originals():  # PyTorch looks some of its classes up when it first needs them
            there, named = translation.to_torch(args), translation.to_torch(kwargs)
            if translation.found:
                if name in _CHECKS:
                    _CHECKS[name](name, inspect.signature(function).bind(*args, **kwargs).arguments)
                result = function(*there, **named)
                translation.update_containers()
                return translation.to_ours(result)
        return _Translation(name, replaced).to_ours(function(*args, **kwargs))

    return call


def refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which changes what PyTorch's own classes do, and so does nothing for terrazzo's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        raise _error(name, "changes PyTorch's DTensors only")

    return call


def without_our_placements(name: str, set_up: Callable[[Any], None]) -> Callable[[Any], None]:
    """For `DTensorSpec.__post_init__`: PyTorch's specification would take terrazzo's placements for replicas."""

    @functools.wraps(set_up)
    def checked(self: Any) -> None:
        for placement in self.placements:
            if isinstance(placement, Placement):
                raise _error(name, f"got the placement {placement!r}, which is terrazzo's")
        set_up(self)

    return checked


class _Translation:
    """One call: which of terrazzo's objects stand for which of PyTorch's."""

    def __init__(self, name: str, replaced: Mapping[type[Any], type[Any]]) -> None:
        self.name = name
        self.found = False
        """Whether there was anything to convert."""
        self._replaced = replaced
        self._there: dict[int, Any] = {}  # by the ids of ours
        self._back: dict[int, Any] = {}  # by the ids of theirs
        self._containers: list[tuple[Any, Any]] = []
        self._kept_alive: list[Any] = []  # or another object could get an id

    def to_torch(self, value: Any) -> Any:
        """`value` with PyTorch's objects in place of terrazzo's."""
        if id(value) in self._there:
            return self._there[id(value)]
        if isinstance(value, DTensor):
            return self._note(value, interop.to_torch_dtensor(value))
        if isinstance(value, Placement):
            self.found = True
            return interop.to_torch_placements([value], (1,))[0]
        if isinstance(value, dict):
            there = self._note_container(value, copy.copy(value))
            there.update({key: self.to_torch(item) for key, item in value.items()})
            return there
        if isinstance(value, list):
            there = self._note_container(value, copy.copy(value))
            there[:] = [self.to_torch(item) for item in value]
            return there
        if isinstance(value, (tuple, set, frozenset)):
            return _rebuilt(value, [self.to_torch(item) for item in value])
        if isinstance(value, _CALLBACKS):
            return self._callback(value)
        if isinstance(value, nn.Module):
            self._refuse_sharded(value)
        elif type(value) in torch_storage.classes()[0]:  # of plans and metadata
            return self._note(value, torch_storage.to_theirs(value))
        elif _is_ours(value) and not isinstance(value, io.BytesIO):  # the data of values are bytes to everyone
            raise _error(self.name, f"got a {_name_of(value)}, which is terrazzo's")
        return value

    def to_ours(self, value: Any) -> Any:
        """A result with terrazzo's objects in place of PyTorch's."""
        if id(value) in self._back:
            return self._back[id(value)]
        if type(value) in self._replaced and not (is_torch_dtensor(type(value)) or interop.is_torch_placement(value)):
            if type(value) in torch_storage.classes()[1]:
                return torch_storage.to_ours(value)
            ours = self._replaced[type(value)]
            raise _error(self.name, f"makes a {type(value).__name__} of PyTorch, not {ours.__module__}.{ours.__name__}")
        if self.found and is_torch_dtensor(type(value)):
            return interop.from_torch_dtensor(value)
        if self.found and interop.is_torch_placement(value):
            return interop.from_torch_placement(value)
        if isinstance(value, dict):
            items = {key: self.to_ours(item) for key, item in value.items()}
            if any(items[key] is not item for key, item in value.items()):
                value = copy.copy(value)
                value.update(items)
        elif isinstance(value, list):
            items_ = [self.to_ours(item) for item in value]
            if any(a is not b for a, b in zip(items_, value, strict=True)):
                value = copy.copy(value)
                value[:] = items_
        elif isinstance(value, (tuple, set, frozenset)):
            return _rebuilt(value, [self.to_ours(item) for item in value])
        return value

    def update_containers(self) -> None:
        """Repeat on the caller's dicts and lists what was done to their copies."""
        for ours, there in self._containers:
            if isinstance(ours, list):
                items = [self.to_ours(item) for item in there]
                if len(items) != len(ours) or any(a is not b for a, b in zip(items, ours, strict=True)):
                    ours[:] = items
                continue
            for key in [key for key in ours if key not in there]:
                del ours[key]
            for key, item in there.items():
                new = self.to_ours(item)
                if key not in ours or ours[key] is not new:
                    ours[key] = new

    def _note(self, ours: Any, there: Any) -> Any:
        self.found = True
        return self._note_container(ours, there, changes=False)

    def _note_container(self, ours: Any, there: Any, *, changes: bool = True) -> Any:
        self._there[id(ours)], self._back[id(there)] = there, ours
        self._kept_alive += [ours, there]
        if changes:
            self._containers.append((ours, there))
        return there

    def _callback(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the caller, which knows terrazzo's objects."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.to_ours(args), self.to_ours(kwargs)
            with originals(False):
                result = function(*args, **kwargs)
            return self.to_torch(result)

        return call

    def _refuse_sharded(self, module: nn.Module) -> None:
        if self.name == "torch.distributed.checkpoint.state_dict._get_fqns":  # it reads names only
            return
        if isinstance(module, FSDPModule):
            raise _error(self.name, f"got a {type(module).__name__}, which terrazzo's fully_shard has sharded")
        if self.name.startswith(_OF_ONE_MODULE):
            return
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if isinstance(tensor, DTensor):
                raise _error(self.name, f"got a module in which {name!r} is a DTensor of terrazzo's")


_OF_ONE_MODULE: Final = ("torch.distributed._composable_state.", "torch.distributed.fsdp.")
"""Helpers that look at the module itself, not at its parameters."""


def _check_even(name: str, given: Mapping[str, Any]) -> None:
    """Raise for parts of different sizes whose order is not that of the mesh dims: PyTorch means others by it."""
    shape, placements = given["global_shape"], given["placements"]
    mesh_shape = tuple(given["mesh"].shape if "mesh" in given else given["mesh_shape"])
    for p in placements:
        if isinstance(p, _StridedShard):
            dim = p.dim % len(shape)
            cuts = [n for q, n in zip(placements, mesh_shape, strict=True) if getattr(q, "dim", None) in (dim, p.dim)]
            if shape[dim] % prod(cuts):
                raise _error(
                    name,
                    f"cannot say which part of dim {dim}, of length {shape[dim]}, a rank of {mesh_shape} holds under "
                    f"{list(placements)}: PyTorch means other parts by it, unless all have one size",
                )


_CHECKS: Final[Mapping[str, Callable[[str, Mapping[str, Any]], None]]] = {
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": _check_even,
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset": _check_even,
}


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """A tuple or set of the same kind with other items; itself if they are the same."""
    if all(a is b for a, b in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _is_ours(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__.startswith("terrazzo.")


def _name_of(value: Any) -> str:
    return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _error(name: str, what: str) -> PrivateHelperError:
    instead = next(text for start, text in _INSTEAD.items() if name.startswith(start))
    return PrivateHelperError(f"{name}, a private function of PyTorch, {what}. Use {instead} instead")


__all__ = ["is_helper", "refusing", "translated", "without_our_placements"]
