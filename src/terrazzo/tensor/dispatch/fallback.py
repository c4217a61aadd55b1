"""Replicate-and-run: what every operation can fall back on.

The operands are gathered on every rank, the caller's function runs there on the whole tensors, and the results are
replicated DTensors. It is right for any deterministic function, it costs what the gathers cost, and it says so once per
operation.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from terrazzo._torch.storages import memory_of
from terrazzo.layout import Layout, Replicate, moved_bytes
from terrazzo.tensor.copied_view import CopiedView, check_no_leaf, check_writable, mark_alias, mark_copied, pass_on
from terrazzo.tensor.dispatch.structure import map_tensors
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.redistribute import redistribute_local
from terrazzo.tensor.strides import check_no_overlap

_warned: set[str] = set()

_LIBRARIES = (str(Path(__file__).parents[2]) + os.sep, str(Path(torch.__file__).parent) + os.sep, contextlib.__file__)
"""Whose lines no warning points at: the user wrote none of them."""


class ReplicationWarning(UserWarning):
    """An operation without a sharding rule gathered its operands."""


def replicate_and_run(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `func` on the whole tensors, on every rank."""
    gathered = _Gathered(name)
    full_args = [gathered.walk(a) for a in args]
    full_kwargs = {k: gathered.walk(v) for k, v in kwargs.items()}
    gathered.warn()
    result = func(*full_args, **full_kwargs)
    return gathered.wrap(result, args, kwargs)


def replicate_and_run_in_place(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same for functions that write their first argument."""
    target = args[0]
    check_writable(target)
    if target._layout.dual is not target._layout or any(p.is_shard() for p in target._layout.placements):
        check_no_leaf(target)  # in C++'s order
        check_no_overlap(target._local, target._layout.shape)  # what is written back has a value for each element
    gathered = _Gathered(name)
    full_target = gathered.walk(target)
    if full_target is target._local or full_target.is_leaf:
        full_target = full_target.clone()
    full_args = [full_target, *(gathered.walk(a) for a in args[1:])]
    full_kwargs = {k: gathered.walk(v) for k, v in kwargs.items()}
    gathered.warn()
    func(*full_args, **full_kwargs)
    layout = target._layout
    replicated = Layout.of(layout.mesh, (Replicate(),) * len(layout.placements), layout.shape)
    target._local.copy_(redistribute_local(full_target, replicated, layout))
    pass_on(target)
    return target


class _Gathered:
    """The operands of one call, replicated, and what that moved."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = 0
        self.layout: Layout | None = None
        self.copies: set[int] = set()
        self.given: list[tuple[torch.Tensor, DTensor]] = []

    def walk(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            return self._replicate(value)
        if isinstance(value, (list, tuple)):
            items = [self.walk(v) for v in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {k: self.walk(v) for k, v in value.items()}
        return value

    def _replicate(self, value: DTensor) -> torch.Tensor:
        layout = value._layout
        if self.layout is None:
            self.layout = layout
        if layout.is_replicated:
            self.given.append((value._local, value))
            return value._local
        target = layout.with_placements((Replicate(),) * len(layout.placements))
        self.bytes += moved_bytes(layout, target, value._local.element_size())
        # In the order of memory that the same tensor would have on one device: some functions ask for it, and those
        # that draw random numbers follow it.
        full = redistribute_local(value._local, layout, target).contiguous()
        self.copies.add(_storage(full))
        self.given.append((full, value))
        return full

    def warn(self) -> None:
        if self.bytes and self.name not in _warned:
            _warned.add(self.name)
            warnings.warn(
                f"{self.name} has no sharding rule: its operands were replicated, {self.bytes} bytes received by each "
                "rank in this call. Said once per operation; terrazzo.tensor.debug.CommDebugMode shows every byte",
                ReplicationWarning,
                stacklevel=_level_of_user(),
            )

    def wrap(self, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return map_tensors(value, lambda local: self._wrap_one(local, args, kwargs))

    def _wrap_one(self, local: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
        assert self.layout is not None
        for full, source in self.given:
            if local is full:
                return source  # the operation had nothing to do, and returns what it was given
        mesh = self.layout.mesh
        result = wrap(local, Layout.of(mesh, (Replicate(),) * len(self.layout.mesh_shape), tuple(local.shape)))
        # By memory: a view with another dtype is none to autograd.
        storage = _storage(local)
        if storage in self.copies:
            mark_copied(result, self.name, args, kwargs)
        for full, source in self.given:
            if type(source) is CopiedView and source._layout.is_replicated and _storage(full) == storage:
                mark_alias(result, source)
        return result


def _level_of_user() -> int:
    """The stack level, for a warning that the caller gives, of the first line that is not terrazzo's or PyTorch's own.

    How far it is depends on the form of the call: a method, a function with a body in Python, a composite in C++.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_back is None:
            return 1
        level, frame = level + 1, frame.f_back
    return level


def _storage(t: torch.Tensor) -> int:
    try:
        return memory_of(t)
    except (RuntimeError, NotImplementedError):
        return id(t)  # sparse and other layouts without a storage alias nothing
