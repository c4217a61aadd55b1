"""Replicate-and-run: the fallback for every operation.

The operands are gathered on every rank, the caller's function runs there on the whole tensors, and the results are
replicated DTensors. This is right for any deterministic function and costs the bytes of the gathers; a warning says so
once per operation.
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
from terrazzo.layout import Layout, moved_bytes
from terrazzo.tensor.copied_view import (
    CopiedView,
    check_autograd_allows,
    check_writable,
    mark_alias,
    mark_copied,
    pass_on,
)
from terrazzo.tensor.dispatch.plain import replicated
from terrazzo.tensor.dispatch.structure import map_tensors
from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.redistribute import redistribute_local, replicas_of
from terrazzo.tensor.strides import check_no_overlap

_warned: set[str] = set()

_LIBRARIES = (str(Path(__file__).parents[2]) + os.sep, str(Path(torch.__file__).parent) + os.sep, contextlib.__file__)
"""Packages whose lines a warning must not point at, because the user did not write them."""


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
        check_autograd_allows(target)  # in the order of C++'s checks
        check_no_overlap(target._local, target._layout.shape)  # a value is written back to each element
    gathered = _Gathered(name)
    full_target = gathered.walk(target)
    if full_target is target._local or full_target.is_leaf:
        full_target = full_target.clone()
    full_args = [full_target, *(gathered.walk(a) for a in args[1:])]
    full_kwargs = {k: gathered.walk(v) for k, v in kwargs.items()}
    gathered.warn()
    func(*full_args, **full_kwargs)
    layout = target._layout
    whole = replicas_of(layout)
    target._local.copy_(redistribute_local(full_target, whole, layout))
    pass_on(target)
    return target


class _Gathered:
    """The operands of one call, replicated, and how many bytes that took."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = 0
        self.layout: Layout | None = None
        self.copies: set[int] = set()
        self.given: list[tuple[torch.Tensor, DTensor]] = []

    def walk(self, value: Any) -> Any:
        return map_tensors(value, lambda t: self._replicate(t) if isinstance(t, DTensor) else t)

    def _replicate(self, value: DTensor) -> torch.Tensor:
        layout = value._layout
        if self.layout is None:
            self.layout = layout
        if layout.is_replicated:
            self.given.append((value._local, value))
            return value._local
        target = replicas_of(layout)
        self.bytes += moved_bytes(layout, target, value._local.element_size())
        # With the memory format that the same tensor would have on one device: some functions depend on it, and
        # functions that draw random numbers draw in that order.
        full = redistribute_local(value._local, layout, target).contiguous()
        self.copies.add(_storage(full))
        self.given.append((full, value))
        return full

    def warn(self) -> None:
        if self.bytes and self.name not in _warned:
            _warned.add(self.name)
            warnings.warn(
                f"{self.name} has no sharding rule, so its operands were replicated: each rank received {self.bytes} "
                "bytes in this call. This warning comes once per operation; terrazzo.tensor.debug.CommDebugMode counts "
                "all communication",
                ReplicationWarning,
                stacklevel=_level_of_user(),
            )

    def wrap(self, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return map_tensors(value, lambda local: self._wrap_one(local, args, kwargs))

    def _wrap_one(self, local: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
        assert self.layout is not None
        for full, source in self.given:
            if local is full:
                return source  # the operation had nothing to do and returned its argument
        result = replicated(local, self.layout)
        # Compared by storage: autograd does not know a view with another dtype as a view.
        storage = _storage(local)
        if storage in self.copies:
            mark_copied(result, self.name, args, kwargs)
        for full, source in self.given:
            if type(source) is CopiedView and source._layout.is_replicated and _storage(full) == storage:
                mark_alias(result, source)
        return result


def _level_of_user() -> int:
    """The stack level, for `warnings.warn` in the caller, of the first line outside terrazzo and PyTorch.

    It depends on how the operation was called: as a method, a Python function, or a composite in C++.
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
        return id(t)  # sparse and other layouts have no storage and share no memory
