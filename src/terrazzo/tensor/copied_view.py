"""Views of which a redistribution made a copy: a class of their own, so that ordinary tensors pay nothing for it.

On one device a view shows what is written to its tensor later, and what is written to it reaches its tensor.  A copy
does neither by itself.  So a copy that is used after its tensor was written raises; and what is written to a copy is
written to the tensor too where the view was made by an index, and raises elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.weak import WeakIdKeyDictionary

from terrazzo._torch.dispatching import tree_leaves
from terrazzo._torch.storages import memory_of
from terrazzo._torch.tensors import base_of, version_of
from terrazzo.errors import DTensorError
from terrazzo.layout import Layout
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.indices import region_of
from terrazzo.tensor.links import links
from terrazzo.tensor.strides import has_view, is_contiguous, no_view, repeats

_local_slot: Any = DTensor.__dict__["_local"]
# Functions that cut a tensor into parts, with the position of `dim`.
_PARTS = {"unbind": 1, "split": 2, "split_with_sizes": 2, "chunk": 2, "tensor_split": 2}
_COPYING_RESHAPES = frozenset(["reshape", "reshape_as", "flatten"])
_RESHAPES = _COPYING_RESHAPES | {"view", "unflatten"}


# By local tensor: the copies of parts of it that are in use.
_copies_of: Any = WeakIdKeyDictionary()


class Origin:
    """Where a copy comes from; the copy's own views share it."""

    __slots__ = ("__weakref__", "_base", "_copy", "_data", "_index", "_layout", "_local", "_version", "region")

    def __init__(self, base: DTensor, copy: DTensor, index: Any) -> None:
        """`index` is where in `base` the copy is from, None if that cannot be said by an index."""
        self._base = base
        self._local = base._local
        self._data: list[torch.Tensor] = []  # what `.data` has given since
        self._version = self._writes()
        self._index = index
        self.region = None if index is None else region_of(index, base.shape)
        if self.region is not None:
            _copies_of.setdefault(self._local, WeakSet()).add(self)
        self._copy: torch.Tensor = copy._local
        self._layout: Layout = copy._layout
        links.copies.add(self)

    def watch(self, data: torch.Tensor) -> None:
        """Count what is written to `data` as well, if it is of the same memory."""
        if memory_of(data) == memory_of(self._local):
            self._data.append(data)
            self._version += _version_of(data)

    def _writes(self) -> int:
        return _version_of(self._local) + sum(_version_of(data) for data in self._data)

    def check(self) -> None:
        """Raise if the tensor was written since the copy was made."""
        if not self.is_current():
            raise DTensorError(
                f"a view of a DTensor, of which a redistribution made a copy ({self._layout}), is used after the "
                "DTensor was written to, which the copy does not show. Take the view again, or clone() it where the "
                "old values are wanted"
            )
        if type(self._base) is CopiedView:
            self._base._pending.check()

    def is_current(self) -> bool:
        """Whether the tensor has not been written since."""
        return self._writes() == self._version

    def keep(self) -> None:
        """What has been written is none of what the copy shows."""
        self._version = self._writes()

    def check_writable(self, with_grad: bool) -> None:
        """Raise if a write to the copy, which autograd is to see or not, could not be passed on."""
        self.check()
        if self._index is None or self._base._local is not self._local:
            raise DTensorError(
                f"in-place write to a view of which a redistribution made a copy (now {self._layout}): the write would "
                "not reach the tensor that was viewed. Index-assign to that tensor instead (x[...] = value), or "
                "redistribute it first so that the viewed dimension is not sharded"
            )
        if repeats(self._local, self._base.shape, self._index):
            raise DTensorError(
                f"in-place write to a view of which a redistribution made a copy (now {self._layout}): the tensor that "
                "was viewed is expanded, one element of it stands for several. Please clone() it before"
            )
        if with_grad:
            local = self._base._local
            if local.requires_grad and base_of(local).is_leaf:
                raise _of_a_leaf()
        if type(self._base) is CopiedView:
            self._base._pending.check_writable(with_grad)

    def has_gaps(self) -> bool:
        """Whether on one device the view's elements may not lie one behind the other: to flatten it is to copy it."""
        base = self._base
        if self._index is None or (type(base) is CopiedView and base._pending.has_gaps()):
            return True
        if not is_contiguous(base._local, base.shape):
            return True
        return not torch.empty(tuple(base.shape), device="meta")[self._index].is_contiguous()

    def pass_on(self) -> None:
        """Write the copy to where it is from."""
        self._base[self._index] = wrap(self._copy, self._layout)
        self.keep()


class CopiedView(DTensor):
    """A view of which a redistribution made a copy."""

    __slots__ = ()

    @property
    def _local(self) -> torch.Tensor:  # a slot in the base
        self._pending.check()
        local: torch.Tensor = _local_slot.__get__(self)
        return local

    @_local.setter
    def _local(self, local: torch.Tensor) -> None:
        """It is given memory of its own, and is a view no more."""
        _local_slot.__set__(self, local)
        object.__setattr__(self, "__class__", DTensor)

    def __copy__(self) -> DTensor:
        """Of `copy.copy`: it shares the copy as well."""
        rebuild, parts = self.__reduce_ex__(4)
        result: DTensor = rebuild(*parts)
        mark_alias(result, self)
        return result

    def detach(self) -> DTensor:
        """It shares the copy, and whatever that must be kept from."""
        result = super().detach()
        mark_alias(result, self)
        return result


class writing:
    """Around a write to what an index chooses of a DTensor: copies of other parts stay as good as they are."""

    __slots__ = ("_others",)

    def __init__(self, target: DTensor, index: Any) -> None:
        copies = _copies_of.get(target._local) if _copies_of else None
        region = region_of(index, target.shape) if copies else None
        self._others = [
            origin
            for origin in copies or ()
            if region is not None and origin.is_current() and origin.region.intersect(region) is None
        ]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        for origin in self._others:
            origin.keep()


# What `.data` gives is the same.
CopiedView.data = property(lambda self: self.detach(), DTensor.data.fset)  # type: ignore[assignment, attr-defined]


def _version_of(local: torch.Tensor) -> int:
    return -1 if local.is_inference() else version_of(local)  # inference tensors do not count


def mark_copied(result: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Make the results of the view function `name` copied views of the first tensor among its arguments."""
    leaves = tree_leaves((args, kwargs))  # an einsum's equation comes before its tensors, which may be in a list
    base = next(leaf for leaf in leaves if isinstance(leaf, DTensor))
    reads_shape = (
        name in _RESHAPES and isinstance(result, DTensor) and not (len(args) > 1 and type(args[1]) is torch.dtype)
    )
    if reads_shape and not has_view(base._local, base.shape, result.shape):
        if name in _COPYING_RESHAPES:
            return  # on one device it would be no view either
        raise no_view(base.shape, result.shape)
    results = (result,) if isinstance(result, DTensor) else result
    indices = _indices_of(name, args, kwargs, results)
    for t, index in zip(results, indices, strict=True):
        if isinstance(t, DTensor):
            _become(t, Origin(base, t, index))


def mark_alias(result: Any, view: CopiedView, name: str = "") -> None:
    """Make the results of the view function `name` on a copied view copied views as well."""
    origin = view._pending
    reshapes = name in _COPYING_RESHAPES
    has_gaps = reshapes and origin.has_gaps()
    for t in (result,) if isinstance(result, DTensor) else result:
        if isinstance(t, DTensor):
            # What one device may have copied is nothing to write to, nor is what had to be copied here.
            copies = has_gaps or (reshapes and not has_view(_local_slot.__get__(view), view.shape, t.shape))
            _become(t, Origin(view, t, None) if copies else origin)


def _become(view: DTensor, origin: Origin) -> None:
    object.__setattr__(view, "__class__", CopiedView)
    view._pending = origin


def _indices_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]) -> Sequence[Any]:
    """For each result the index that gives the same view, or None."""
    unknown = [None] * len(results)
    if name in _PARTS:
        dim = kwargs["dim"] if "dim" in kwargs else args[_PARTS[name]] if len(args) > _PARTS[name] else 0
        if not args or not set(kwargs) <= {"dim"} or type(dim) is not int:
            return unknown
        before = [slice(None)] * (dim % args[0].dim())
        if name == "unbind":
            return [(*before, i) for i in range(len(results))]
        stops = list(accumulate(part.shape[dim] for part in results))
        return [(*before, slice(stop - part.shape[dim], stop)) for part, stop in zip(results, stops, strict=True)]
    if kwargs or len(results) != 1:
        return unknown
    if name == "__getitem__":
        return [args[1]]
    if name in ("select", "narrow") and all(type(a) is int for a in args[1:]):
        before = [slice(None)] * (args[1] % args[0].dim())
        if name == "select":
            return [(*before, args[2])]
        start = args[2] % args[0].size(args[1]) if args[2] < 0 else args[2]
        return [(*before, slice(start, start + args[3]))]
    return unknown


def check_writable(target: Any) -> None:
    """Before an in-place write: raise if it would be lost."""
    if type(target) is CopiedView:
        target._pending.check_writable(torch.is_grad_enabled() and target.requires_grad)


def check_no_leaf(target: Any) -> None:
    """Before an in-place write: raise what C++ raises if autograd is to follow it into a leaf."""
    if not (torch.is_grad_enabled() and target.requires_grad):
        return
    if target.is_leaf:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    base = base_of(target._local)
    if base.is_leaf and base.requires_grad:
        raise _of_a_leaf()


def _of_a_leaf() -> RuntimeError:
    return RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")


def check_keeps_shape(target: Any) -> None:
    """Before an in-place change of the shape: raise for a copied view, which would be one no more."""
    if type(target) is CopiedView:
        raise DTensorError(
            "in-place change of the shape of a view of which a redistribution made a copy: use the form without the "
            "underscore"
        )


def pass_on(target: Any) -> None:
    """After an in-place write."""
    if type(target) is CopiedView:
        with torch.set_grad_enabled(torch.is_grad_enabled() and target.requires_grad):
            target._pending.pass_on()
