"""Copied views: results of view operations that needed a redistribution, which copied the data.

On one device a view and its tensor share memory. A copy made by a redistribution does not, so it could silently show
old values, or a write to it could be lost. Therefore using a copied view after its tensor was written raises an error.
A write to a copied view is also written to the tensor if the view was made by indexing, and raises an error otherwise.

Copied views have their own class, so that ordinary tensors do not pay for these checks.
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
from terrazzo._torch.tensors import base_of, is_one_of_several_views, version_of
from terrazzo.errors import DTensorError
from terrazzo.layout import Layout
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.indices import region_of
from terrazzo.tensor.links import links
from terrazzo.tensor.strides import has_view, is_contiguous, no_view, repeats

_local_slot: Any = DTensor.__dict__["_local"]
# View functions with several results, with the position of their `dim` argument.
_PARTS = {"unbind": 1, "split": 2, "split_with_sizes": 2, "chunk": 2, "tensor_split": 2}
_COPYING_RESHAPES = frozenset(["reshape", "reshape_as", "flatten"])
_RESHAPES = _COPYING_RESHAPES | {"view", "unflatten"}


# For each local tensor the live copies of parts of it.
_copies_of: Any = WeakIdKeyDictionary()


class CopySource:
    """Where a copy comes from; shared by the copy and its own views."""

    __slots__ = ("__weakref__", "_base", "_copy", "_data", "_index", "_layout", "_local", "_version", "region")

    def __init__(self, base: DTensor, copy: DTensor, index: Any) -> None:
        """`index` is the index into `base` that gives the copied elements; None if no index does."""
        self._base = base
        self._local = base._local
        self._data: list[torch.Tensor] = []  # tensors that `.data` has returned
        self._version = self._writes()
        self._index = index
        self.region = None if index is None else region_of(index, base.shape)
        if self.region is not None:
            _copies_of.setdefault(self._local, WeakSet()).add(self)
        self._copy: torch.Tensor = copy._local
        self._layout: Layout = copy._layout
        links.copies.add(self)

    def watch(self, data: torch.Tensor) -> None:
        """Count writes to `data`, too, if it shares this memory."""
        if memory_of(data) == memory_of(self._local):
            self._data.append(data)
            self._version += _version_of(data)

    def _writes(self) -> int:
        return _version_of(self._local) + sum(_version_of(data) for data in self._data)

    def check(self) -> None:
        """Raise if the tensor was written since the copy was made."""
        if not self.is_current():
            raise DTensorError(
                f"this view of a DTensor is a copy, because the view needed a redistribution ({self._layout}), and the "
                "DTensor was written to after the copy was made. Take the view again, or clone() it before the write "
                "if you want the old values"
            )
        if type(self._base) is CopiedView:
            self._base._pending.check()

    def is_current(self) -> bool:
        """Whether the tensor has not been written since the copy was made."""
        return self._writes() == self._version

    def keep(self) -> None:
        """Accept the writes so far: they did not touch the elements of the copy."""
        self._version = self._writes()

    def check_writable(self, with_grad: bool) -> None:
        """Raise if a write to the copy (`with_grad`: one that autograd records) cannot be passed on to the tensor."""
        self.check()
        if self._index is None or self._base._local is not self._local:
            raise DTensorError(
                f"in-place write to a view that is a copy, because it needed a redistribution (now {self._layout}): "
                "the write would not reach the viewed tensor. Assign to that tensor by index (x[...] = value), or "
                "redistribute it first so that the viewed dimension is not sharded"
            )
        if repeats(self._local, self._base.shape, self._index):
            raise DTensorError(
                f"in-place write to a view that is a copy, because it needed a redistribution (now {self._layout}): "
                "the viewed tensor is expanded, so several of its elements share one memory location. Clone it first"
            )
        if with_grad:
            local = self._base._local
            if local.requires_grad and base_of(local).is_leaf:
                raise _of_a_leaf()
        if type(self._base) is CopiedView:
            self._base._pending.check_writable(with_grad)

    def has_gaps(self) -> bool:
        """Whether on one device the view's elements may not be adjacent in memory, so that flattening it copies."""
        base = self._base
        if self._index is None or (type(base) is CopiedView and base._pending.has_gaps()):
            return True
        if not is_contiguous(base._local, base.shape):
            return True
        return not torch.empty(tuple(base.shape), device="meta")[self._index].is_contiguous()

    def pass_on(self) -> None:
        """Write the copy's values back to the tensor."""
        self._base[self._index] = wrap(self._copy, self._layout)
        self.keep()


class CopiedView(DTensor):
    """A view that is a copy, because the view operation needed a redistribution."""

    __slots__ = ()

    @property
    def _local(self) -> torch.Tensor:  # a slot in the base
        self._pending.check()
        return _local_slot.__get__(self)

    @_local.setter
    def _local(self, local: torch.Tensor) -> None:
        """It gets its own memory, and is no longer a view."""
        _local_slot.__set__(self, local)
        object.__setattr__(self, "__class__", DTensor)

    def __copy__(self) -> DTensor:
        """For `copy.copy`: the new object shares the copied memory and its origin."""
        rebuild, parts = self.__reduce_ex__(4)
        result: DTensor = rebuild(*parts)
        mark_alias(result, self)
        return result

    def detach(self) -> DTensor:
        """The result shares the copied memory, so it has the same checks."""
        result = super().detach()
        mark_alias(result, self)
        return result


class writing:
    """Around a write to the elements that an index selects: copies of other elements of the DTensor stay valid."""

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


# `.data` shares the copied memory, too.
CopiedView.data = property(lambda self: self.detach(), DTensor.data.fset)  # type: ignore[assignment, attr-defined]


def _version_of(local: torch.Tensor) -> int:
    return -1 if local.is_inference() else version_of(local)  # inference tensors have no version counter


def mark_copied(result: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Make the results of the view function `name` copied views of the first tensor among its arguments."""
    leaves = tree_leaves((args, kwargs))  # in an einsum the equation comes first, and the tensors may be in a list
    base = next(leaf for leaf in leaves if isinstance(leaf, DTensor))
    reads_shape = (
        name in _RESHAPES and isinstance(result, DTensor) and not (len(args) > 1 and type(args[1]) is torch.dtype)
    )
    if reads_shape and not has_view(base._local, base.shape, result.shape):
        if name in _COPYING_RESHAPES:
            return  # on one device it would not be a view either
        raise no_view(base.shape, result.shape)
    results = (result,) if isinstance(result, DTensor) else result
    indices = _indices_of(name, args, kwargs, results)
    for t, index in zip(results, indices, strict=True):
        if isinstance(t, DTensor):
            _become(t, CopySource(base, t, index))


def mark_alias(result: Any, view: CopiedView, name: str = "") -> None:
    """Make the results of the view function `name` on a copied view copied views as well."""
    origin = view._pending
    reshapes = name in _COPYING_RESHAPES
    has_gaps = reshapes and origin.has_gaps()
    for t in (result,) if isinstance(result, DTensor) else result:
        if isinstance(t, DTensor):
            # Not writable: where one device might have copied, and where a copy was needed here.
            copies = has_gaps or (reshapes and not has_view(_local_slot.__get__(view), view.shape, t.shape))
            _become(t, CopySource(view, t, None) if copies else origin)


def perhaps_another(view: DTensor) -> DTensor:
    """`view`; if it is a copied view that one device might have to copy, a copied view that refuses to be written."""
    if type(view) is not CopiedView or not view._pending.has_gaps():
        return view
    result = wrap(view._local, view._layout)
    _become(result, CopySource(view, result, None))
    return result


def _become(view: DTensor, origin: CopySource) -> None:
    object.__setattr__(view, "__class__", CopiedView)
    view._pending = origin


def _indices_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]) -> Sequence[Any]:
    """For each result the index that gives the same view; None where there is no such index."""
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
    """Before an in-place write: raise if the write would be lost."""
    if type(target) is CopiedView:
        target._pending.check_writable(torch.is_grad_enabled() and target.requires_grad)


def check_autograd_allows(target: Any) -> None:
    """Before an in-place write: raise PyTorch's error if autograd would record it, and cannot."""
    if not (torch.is_grad_enabled() and target.requires_grad):
        return
    if target.is_leaf:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    base = base_of(target._local)
    if base.is_leaf and base.requires_grad:
        raise _of_a_leaf()
    if is_one_of_several_views(target._local):
        raise RuntimeError(
            "in-place write to a view that was created together with others (split, chunk, unbind, ...), which "
            "autograd does not allow"
        )


def _of_a_leaf() -> RuntimeError:
    return RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")


def check_keeps_shape(target: Any) -> None:
    """Before an in-place change of the shape: raise for a copied view, which would lose its connection."""
    if type(target) is CopiedView:
        raise DTensorError(
            "in-place change of the shape of a view that is a copy, because it needed a redistribution: use the "
            "operation without the underscore"
        )


def pass_on(target: Any) -> None:
    """After an in-place write: write a copied view's values back to the viewed tensor."""
    if type(target) is CopiedView:
        with torch.set_grad_enabled(torch.is_grad_enabled() and target.requires_grad):
            target._pending.pass_on()
