"""What a DTensor answers besides operations: attributes, its memory (refused), and its values as numbers and lists.

Attributes are facts: they are answered without communication, so that one rank alone may ask.

`torch.Tensor` has its attributes as descriptors in C. Those that are operations (`T`, `real`) go through
`__torch_function__`; every other one that `DTensor` does not define itself, also one of a later PyTorch, is that of the
local tensor. Without this, an attribute would be an operation without a rule, for which all ranks gather the tensor.

Values need the whole tensor, so all ranks take part.
"""

from __future__ import annotations

from functools import partial
from numbers import Number
from operator import attrgetter
from typing import Any, Final, NoReturn

import torch

from terrazzo._torch.dispatching import attribute_of_wrapper, names_of_attributes
from terrazzo._torch.tensors import is_view
from terrazzo.errors import DTensorError, DTensorTypeError
from terrazzo.tensor.links import links

_OPERATIONS: Final = frozenset({"H", "T", "mH", "mT", "imag", "real"})
_OF_THE_WRAPPER: Final = ("_cdata", "_has_symbolic_sizes_strides", "_python_dispatch")
_METHODS: Final = (  # with the local tensor's result
    *("dense_dim", "element_size", "get_device", "is_complex", "is_distributed", "is_floating_point", "is_inference"),
    *("is_signed", "sparse_dim", "_use_count"),  # the last one: swap_tensors refuses what graphs and views refer to
)


def define_attributes(cls: type[Any]) -> None:
    """Define on `DTensor` what it does not define itself."""
    own = {name for base in cls.__mro__[: cls.__mro__.index(torch.Tensor)] for name in vars(base)}
    for name in names_of_attributes():
        if name in own or name in _OPERATIONS:
            continue
        if name in _OF_THE_WRAPPER:
            setattr(cls, name, property(attribute_of_wrapper(name)))
        else:
            setter = partial(lambda name, tensor, value: setattr(tensor._local, name, value), name)
            setattr(cls, name, property(attrgetter(f"_local.{name}"), setter))
    for name in _METHODS:
        setattr(cls, name, _method_of(name))


def _method_of(name: str) -> Any:
    of_local = getattr(torch.Tensor, name)

    def method(self: Any) -> Any:
        return of_local(self._local)

    method.__name__ = name
    return method


class OwnAttributes:
    """Attributes whose values are not the local tensor's."""

    __slots__ = ()

    @property
    def nbytes(self: Any) -> int:
        """The bytes of the global tensor, as in PyTorch."""
        return self._layout.shape.numel() * self._local.itemsize

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


# ------------------------------------------------------------------ memory and storage


def _refusing(what: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(what)

    return refuse


class NoRawAccess:
    """Refuses everything that would expose a tensor's memory, and says what to use instead."""

    __slots__ = ()

    numpy = _refusing("numpy()")
    __array__ = _refusing("conversion to a numpy array")
    data_ptr = _refusing("data_ptr()")
    const_data_ptr = _refusing("const_data_ptr()")
    untyped_storage = _refusing("untyped_storage()")
    storage = _refusing("storage()")
    _typed_storage = _refusing("typed storage")
    __dlpack__ = __dlpack_device__ = _refusing("DLPack export")
    share_memory_ = _refusing("share_memory_()")
    resize_ = _refusing("resize_()")

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], NoRawAccess):
            self.data = args[0].detach()  # type: ignore[misc, attr-defined]  # both are DTensors
            return self
        _refuse("set_() of anything but a DTensor")

    @property
    def __cuda_array_interface__(self) -> Any:
        raise AttributeError("a DTensor has no __cuda_array_interface__: use to_local() or full_tensor()")


def _refuse(what: str) -> NoReturn:
    raise DTensorError(
        f"{what} is not possible for a DTensor, whose elements are spread over several ranks: use .to_local() for this "
        "rank's part or .full_tensor() for the whole"
    )


def refuse_export() -> NoReturn:
    _refuse("DLPack export")


# ------------------------------------------------------------------ values of Python


class OneValue:
    """Conversions of a DTensor with one element to Python's numbers, and the questions that use them."""

    __slots__ = ()
    _local: torch.Tensor
    _layout: Any

    def item(self) -> Any:
        return self._one_value("item").item()

    def tolist(self) -> Any:
        return self._whole().tolist()

    def __format__(self, spec: str) -> str:
        """A number if this rank holds it, else as `repr`: one rank alone may format, so this does not communicate."""
        layout = self._layout
        if layout.ndim == 0 and layout.is_replicated and layout.coord is not None:
            return format(self._local.item(), spec)
        if spec and layout.ndim == 0:
            raise DTensorTypeError(
                f"the format {spec!r} needs a number, and this rank does not hold that of a DTensor placed "
                f"{list(layout.placements)} on {layout.mesh}: format x.item(), which every rank of the mesh must call"
            )
        return object.__format__(self, spec)

    def __bool__(self) -> bool:
        return bool(self._one_value("bool"))

    def __int__(self) -> int:
        return int(self._one_value("int"))

    def __float__(self) -> float:
        return float(self._one_value("float"))

    def __complex__(self) -> complex:
        return complex(self._one_value("complex"))

    def __index__(self) -> int:
        if self._layout.shape.numel() != 1:  # what Python expects of what is no index, as in `[0] * x`
            raise TypeError("only integer tensors of a single element can be converted to an index")
        if self._layout.coord is None:  # sizes and bounds come from it, which would differ from those of other ranks
            raise DTensorError(
                f"this rank is outside the mesh {self._layout.mesh}, so the value of this DTensor, which is used as an "
                "index or a size, is not known; call this on ranks of the mesh only"
            )
        return self._one_value("index").__index__()

    def __contains__(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor | Number | torch.SymInt | torch.SymFloat | torch.SymBool):
            raise RuntimeError(f"a tensor may contain tensors and numbers, and was asked for a {type(value)}")
        where: Any = self == value
        return bool(where.any())

    def _one_value(self, what: str) -> torch.Tensor:
        if self._layout.shape.numel() != 1:
            raise RuntimeError(
                f"{what}() needs a tensor with one element, this DTensor has shape {tuple(self._layout.shape)}"
            )
        return self._local.detach() if self._layout.is_replicated else self._whole()

    def _whole(self) -> torch.Tensor:
        whole: torch.Tensor = self.detach().full_tensor()  # type: ignore[attr-defined]  # a DTensor's
        return whole
