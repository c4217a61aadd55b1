"""Attributes of a DTensor that are facts: they are answered without communication, so that one rank alone may ask.

`torch.Tensor` has its attributes as descriptors in C. Those that are operations (`T`, `real`) go through
`__torch_function__`; every other one that `DTensor` does not define itself, also one of a later PyTorch, is that of the
local tensor. Without this, an attribute would be an operation without a rule, for which all ranks gather the tensor.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final

import torch

from terrazzo._torch.dispatching import attribute_of_wrapper, names_of_attributes
from terrazzo._torch.tensors import is_view
from terrazzo.errors import DTensorError
from terrazzo.tensor.links import links

_OPERATIONS: Final = frozenset({"H", "T", "mH", "mT", "imag", "real"})
_OF_THE_WRAPPER: Final = ("_cdata", "_has_symbolic_sizes_strides", "_python_dispatch")
_METHODS: Final = ("dense_dim", "is_distributed", "sparse_dim")  # with the local tensor's result


def define_attributes(cls: type[Any]) -> None:
    """Define on `DTensor` what it does not define itself."""
    own = {name for base in cls.__mro__[: cls.__mro__.index(torch.Tensor)] for name in vars(base)}
    for name in names_of_attributes():
        if name in own or name in _OPERATIONS:
            continue
        if name in _OF_THE_WRAPPER:
            setattr(cls, name, property(attribute_of_wrapper(name)))
        else:
            setattr(cls, name, property(attrgetter(f"_local.{name}"), _setter_of(name)))
    for name in _METHODS:
        setattr(cls, name, _method_of(name))


def _setter_of(name: str) -> Any:
    def set_on_local(self: Any, value: Any) -> None:
        setattr(self._local, name, value)

    return set_on_local


def _method_of(name: str) -> Any:
    def method(self: Any) -> Any:
        return getattr(self._local, name)()

    method.__name__ = name
    return method


class OwnAttributes:
    """Attributes whose values are not the local tensor's."""

    __slots__ = ()

    @property
    def nbytes(self: Any) -> int:
        """The bytes of the global tensor, as in PyTorch."""
        count: int = self._layout.shape.numel() * self._local.itemsize
        return count

    @property
    def _spec(self: Any) -> Any:
        """PyTorch's attribute for mesh, placements, shape, strides and dtype: a `libraries.DTensorSpec`."""
        return links.spec_of(self)

    @property
    def _local_tensor(self: Any) -> torch.Tensor:
        """PyTorch's attribute for this rank's part, detached; other libraries read it."""
        local: torch.Tensor = self._local
        return local.detach()

    @property
    def _grad(self: Any) -> Any:
        return self.grad

    @_grad.setter
    def _grad(self: Any, value: Any) -> None:
        self.grad = value

    @property
    def _base(self: Any) -> Any:
        if self._is_view():
            raise DTensorError("_base is not known for a DTensor that is a view: use to_local()._base for this rank's")
        return None

    def _is_view(self: Any) -> bool:
        local: torch.Tensor = self._local
        return is_view(local) and not (local.is_leaf and local.requires_grad)  # as parameters are, parts of one buffer
