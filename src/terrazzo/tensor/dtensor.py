"""The distributed tensor: a plain local tensor with a layout.

`DTensor` is a wrapper subclass with the global shape. Its `_local` is an ordinary tensor that carries the autograd
graph, and its `_layout` says which part of the global tensor that is. `__torch_function__` below is the hot path of
the whole package: it builds a key from the function, the layouts and the static arguments, looks up the route, and runs
it on the local tensors. What happens once per key is in `dispatch` and `ops`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import has_torch_function

from terrazzo._torch.autograd import is_transformed, run_backward
from terrazzo._torch.dispatching import without_subclass_functions
from terrazzo._torch.tensors import is_view
from terrazzo._torch.tensors import make_wrapper as _make
from terrazzo._torch.tensors import set_wrapper_data as set_wrapper_data
from terrazzo.comm.mesh import ranks_of
from terrazzo.errors import DTensorError
from terrazzo.layout import Layout, Partial, Placement
from terrazzo.tensor.attributes import NoRawAccess, OneValue, OwnAttributes, define_attributes
from terrazzo.tensor.dispatch.keys import (
    FALSE,
    KEYWORD,
    LIST,
    NUMBER_TENSOR,
    PLAIN_KEYS,
    SLICE,
    TRUE,
    TUPLE,
    Unkeyable,
    any_number,
    append_basic_index,
    float_key,
    list_handlers,
    recall,
    routes,
)
from terrazzo.tensor.links import links
from terrazzo.tensor.strides import global_stride, is_contiguous, keeping_strides, without_data

BRINGS = "_brings_gradient"  # called with the local tensor, to set a gradient that is elsewhere, when it is asked for
WRITTEN = "_on_write"
"""An attribute of some DTensors: a function to call before they can be written to past all version counters."""

_SUM, _AVERAGE = Partial(), Partial("avg")
_STRIDED = torch.strided  # passed by position, which saves a tenth of an operation's cost


def wrap(local: torch.Tensor, layout: Layout) -> DTensor:
    """A DTensor around `local`, with its memory and its autograd graph."""
    result: DTensor = _make(DTensor, layout.shape, None, None, None, local.dtype, _STRIDED, local.device)
    result._local = local
    result._layout = layout
    result._memo = None
    return result


def local_of(value: Any) -> Any:
    """The local tensor of a DTensor; any other value itself."""
    return value._local if isinstance(value, DTensor) else value


def become(target: DTensor, value: DTensor) -> None:
    """Turn `target` into `value` but keep the object: for in-place operations that change the shape."""
    local = value._local
    # Without a graph a leaf stays a leaf that requires a gradient; a view that requires one has nowhere to put it.
    if target.requires_grad and local.grad_fn is None and local is not target._local:
        local = keeping_strides(local.detach(), local).requires_grad_()
    elif not local.requires_grad and is_view(local) and not is_view(target._local):
        local = keeping_strides(local.detach(), local)  # the tensor whose shape was changed is not a view of itself
    with without_subclass_functions():
        set_wrapper_data(target, wrap(local.detach(), value._layout))
    target._local, target._layout, target._memo = local, value._layout, value._memo


def run_again(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` from code that already knows that there are DTensors among the arguments."""
    return DTensor.__torch_function__(func, (DTensor,), args, dict(kwargs))


def _by_other_class(func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What another class of tensors makes of the call, if it has a `__torch_function__` of its own.

    PyTorch's DTensors have none, so there a class that wraps DTensors, such as torchao's, is asked before them.
    """
    default = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]  # a method of the class
    others = tuple(each for each in types if not issubclass(each, DTensor))
    for each in others:
        method = each.__torch_function__  # type: ignore[attr-defined]  # PyTorch names only types that have it
        if getattr(method, "__func__", method) is not default:
            result = method(func, others, args, kwargs)
            if result is not NotImplemented:
                return result
    return NotImplemented


def sums_only(layout: Layout) -> bool:
    """Whether all terms in the layout, if any, are terms of sums: their gradient is the sum's on every rank."""
    if layout.dual is layout:
        return True
    return all(not p.is_partial() or p.is_partial("sum") for p in layout.placements)


def gradient_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor in `layout`, as autograd finds it for the local tensors.

    Every term of a sum has the sum's gradient. A term of an average, a maximum or a minimum has a part of the tensor's
    gradient: these parts are terms of a sum, the same for every term of another mesh dim's sum.
    """
    if sums_only(layout):
        return layout.dual
    if any(p.is_partial("product") for p in layout.placements):
        raise DTensorError(
            f"the gradient of a tensor placed {list(layout.placements)} is not known: the factors of a product have "
            "gradients of their own. Redistribute the tensor to Replicate first, and ask for the gradient of the result"
        )
    placements = [(_AVERAGE if p is _SUM else _SUM) if p.is_partial() else p for p in layout.placements]
    return layout.with_placements(placements, layout.order)


def key_of(value: Any, key: list[Any], func: Any) -> Any:
    """Append what identifies `value` to a route's key; return it with local tensors in place of DTensors."""
    kind = type(value)
    if kind is DTensor:
        key.append(value._layout)
        return value._local
    if kind in PLAIN_KEYS:
        key.append(int if kind is int and func in any_number else value)
        return value
    if kind is bool:
        key.append(TRUE if value else FALSE)
        return value
    if kind is float:
        key.append(kind if func in any_number else float_key(value))
        return value
    if kind is complex:
        key.append(kind if func in any_number else (kind, float_key(value.real), float_key(value.imag)))
        return value
    if kind is list or kind is tuple:
        if value and type(value[0]) is DTensor:
            try:
                key.append((kind, *[x._layout for x in value]))
                return kind([x._local for x in value])
            except AttributeError:
                pass
        key.append(kind)
        key.append(len(value))
        parts: list[Any] = []
        if kind is tuple and append_basic_index(value, parts):
            key += parts
            return value
        return kind([key_of(x, key, func) for x in value])
    if kind is slice:
        append_basic_index((value,), key)
        return value
    if isinstance(value, DTensor):  # pending communication, a copied view, or a user's subclass
        key.append(value._layout)
        return value._local
    if isinstance(value, torch.Tensor):
        asks = has_torch_function((value,)) or is_transformed(value)
        if not asks and value.dim() == 0 and not value.requires_grad:
            key.append(NUMBER_TENSOR)
            return value
        raise Unkeyable("a plain tensor")
    if isinstance(value, torch.Generator):
        raise Unkeyable("a generator")
    if isinstance(value, Number):  # one of NumPy's
        key.append(kind if func in any_number else (kind, repr(value)))  # which differs for 0.0 and -0.0
        return value
    try:
        hash(value)
    except TypeError:
        raise Unkeyable(f"an unhashable {kind.__name__}") from None
    key.append((kind, value))  # with its type: a Size equals a tuple, a number of numpy equals one of Python
    return value


def _general_key(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Any], dict[str, Any]]:
    """The key of a call, and its arguments with local tensors in place of DTensors."""
    key = [func]
    loc = []
    for a in args:
        kind = type(a)
        if kind is DTensor:
            key.append(a._layout)
            loc.append(a._local)
        elif kind in PLAIN_KEYS:
            key.append(int if kind is int and func in any_number else a)
            loc.append(a)
        else:
            loc.append(key_of(a, key, func))
    kw = {}
    for name, a in kwargs.items():
        key.append(KEYWORD)
        key.append(name)
        kind = type(a)
        if kind in PLAIN_KEYS:
            key.append(int if kind is int and func in any_number else a)
            kw[name] = a
        else:
            kw[name] = key_of(a, key, func)
    return tuple(key), loc, kw


def key_of_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """A key for a call; None if it has arguments that cannot be keyed."""
    try:
        return _general_key(func, args, kwargs)[0]
    except Unkeyable:
        return None


class DTensor(NoRawAccess, OneValue, OwnAttributes, torch.Tensor):
    """A tensor whose elements are spread over the ranks of a `DeviceMesh`.

    Create one with `distribute_tensor`, `DTensor.from_local` or the factory functions of `terrazzo.tensor`, not with
    the constructor, which is for libraries (`terrazzo.tensor.libraries`). It behaves as one tensor: every operation
    gives what the same operation on one device would give.
    """

    __slots__ = ("_local", "_layout", "_memo", "_grad_wrapper", "_pending")
    _local: torch.Tensor
    _layout: Layout
    _memo: Any
    _grad_wrapper: DTensor | None
    _pending: Any  # used by the subclasses for pending communication and for copied views

    def __new__(cls, local_tensor: Any = None, spec: Any = None, requires_grad: bool = False) -> DTensor:
        return links.from_spec(local_tensor, spec, requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The most common forms are written out: this is the cost of every operation.
        try:
            if kwargs:
                if args and type(args[0]) is list and func in list_handlers:
                    return list_handlers[func](func, args, kwargs)
                hashable, loc, kw = _general_key(func, args, kwargs)
            else:
                kwargs = kw = {}
                count = len(args)
                first = args[0] if count else None
                if type(first) is DTensor and count < 4:
                    if count == 1:
                        hashable = (func, first._layout)
                        loc = [first._local]
                    elif count == 2:
                        second = args[1]
                        kind = type(second)
                        if kind is DTensor:
                            hashable = (func, first._layout, second._layout)
                            loc = [first._local, second._local]
                        elif kind in PLAIN_KEYS:
                            value = int if kind is int and func in any_number else second
                            hashable = (func, first._layout, value)
                            loc = [first._local, second]
                        elif kind is tuple:
                            key = [func, first._layout, TUPLE]
                            for i in second:  # append_basic_index, inlined
                                if type(i) is slice:
                                    key.append((SLICE, i.start, i.stop, i.step))
                                elif type(i) in PLAIN_KEYS:
                                    key.append(i)
                                else:
                                    hashable, loc, kw = _general_key(func, args, kw)
                                    break
                            else:
                                hashable = tuple(key)
                                loc = [first._local, second]
                        else:
                            hashable, loc, kw = _general_key(func, args, kw)
                    else:
                        _, second, third = args
                        if type(second) in PLAIN_KEYS and type(third) in PLAIN_KEYS and func not in any_number:
                            hashable = (func, first._layout, second, third)
                            loc = [first._local, second, third]
                        else:
                            hashable, loc, kw = _general_key(func, args, kw)
                elif type(first) is list and func in list_handlers:
                    return list_handlers[func](func, args, kw)
                elif type(first) is list and count == 2 and type(args[1]) in PLAIN_KEYS:
                    second = args[1]
                    try:
                        hashable = (func, LIST, second, *[x._layout for x in first])
                        loc = [[x._local for x in first], second]
                    except AttributeError:  # one of them is not a DTensor
                        hashable, loc, kw = _general_key(func, args, kw)
                else:
                    hashable, loc, kw = _general_key(func, args, kw)
            try:
                route = routes.get(hashable)
            except TypeError:  # a bound of a slice is unhashable: an array
                hashable, route = None, None
        except Unkeyable:
            hashable, route = None, None
        if route is None:
            route = recall(hashable)
            if route is None:
                if len(types) > 1:
                    result = _by_other_class(func, types, args, kwargs or {})
                    if result is not NotImplemented:
                        return result
                return links.miss(func, args, kwargs, hashable)
        return route(func, args, loc, kw, kwargs)  # type: ignore[arg-type]  # never None here

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return links.aten(func, args, kwargs or {})

    # ------------------------------------------------------------------ what it is

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that holds the tensor."""
        return self._layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh dimension.

        If several mesh dims shard one tensor dim, the earlier ones cut first. `fully_shard` over tensor parallelism
        leaves it to the later one, and the earlier one is shown as PyTorch shows it, as a `_StridedShard`.
        """
        return self._layout.shown

    # attrgetter runs in C, which is worth it here: every layer of a model asks for shapes.
    shape = property(attrgetter("_layout.shape"))
    ndim = property(attrgetter("_layout.ndim"))

    def size(self, dim: int | None = None) -> Any:
        return self._layout.shape if dim is None else self._layout.shape[dim]

    def dim(self) -> int:
        return self._layout.ndim

    ndimension = dim

    def numel(self) -> int:
        return self._layout.shape.numel()

    nelement = numel

    def stride(self, dim: int | None = None) -> Any:
        strides = global_stride(self._local, self._layout.shape)
        return strides if dim is None else strides[dim]

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        if memory_format is torch.contiguous_format:
            return is_contiguous(self._local, self._layout.shape)
        return without_data(self._local, self._layout.shape).is_contiguous(memory_format=memory_format)

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._layout.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self._layout.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    def storage_offset(self) -> int:
        return 0

    __hash__ = object.__hash__  # by identity, like a tensor's, but without a call into Python

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DTensor(local_tensor={self._shown()}, device_mesh={self.device_mesh}, placements={self.placements})"

    __str__ = __repr__

    def _shown(self) -> str:
        return repr(self._local)

    def _repr_html_(self) -> str | None:
        if self._layout.packed:  # there are no boxes to draw; a notebook shows the text then
            return None
        return self._layout.html(ranks_of(self._layout.mesh), f"DTensor, {self.dtype}", self._layout.mesh.device_type)

    # ------------------------------------------------------------------ conversions

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """The DTensor whose part on this rank is `local_tensor`; differentiable.

        Without `shape` every rank must hold a part of the same size. Ranks do not compare sizes, because that takes
        communication. If they differ, operations whose shapes do not fit raise an error; but a gather fails, for which
        gloo ends the process ("op.preamble.length <= op.nbytes"). So pass `shape`, the global shape, if parts are
        uneven. `run_check=True` compares the parts, raises an error on all ranks if they do not fit together, and gives
        replicas the values of the first rank. `stride` is accepted for compatibility and ignored: strides follow the
        local tensor. `grad_placements` are the placements of the gradient of `local_tensor`: by default `placements`,
        with Replicate in place of Partial.
        """
        return links.from_local(
            local_tensor, device_mesh, placements, run_check=run_check, shape=shape, grad_placements=grad_placements
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part; differentiable. `grad_placements` are the placements that its gradient will have."""
        local: torch.Tensor = self._local
        if not local.requires_grad:
            return local
        return links.to_local(self, grad_placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank of the mesh; differentiable."""
        return links.full_tensor(self, grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor with other placements, on the same mesh or on another; differentiable.

        Without `placements` it is replicated. With `async_op=True` the communication runs until the result is used.
        `forward_dtype` is the dtype that is sent and that the result has; `backward_dtype` is the one in which the
        gradient is sent, before it is converted to the tensor's own dtype.
        """
        return links.redistribute(
            self,
            device_mesh,
            placements,
            async_op=async_op,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
        )

    def __create_chunk_list__(self) -> list[Any]:
        """The boxes of the global tensor that this rank holds, for checkpoints."""
        return links.chunk_list(self)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """The parts of the global tensor that this rank may write, as items of a checkpoint's planner."""
        return links.write_items(fqn, object)

    def _raise_if_contains_partial_placements(self) -> None:
        """PyTorch's method for libraries."""
        links.chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """The part of the local tensor that is the box which begins at `index.offset`."""
        return links.chunk_at(self, index.offset)

    # ------------------------------------------------------------------ autograd

    def _set_requires_grad(self, value: bool) -> None:
        self._local.requires_grad = value

    requires_grad = property(attrgetter("_local.requires_grad"), _set_requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        self._local.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> DTensor | None:
        if (bring := self.__dict__.pop(BRINGS, None)) is not None:
            bring(self._local)
        g = self._local.grad
        if g is None:
            return None
        try:
            w = self._grad_wrapper
        except AttributeError:  # the slot is set when a gradient is first asked for
            w = None
        if w is not None and w._local is g:
            return w
        if g.requires_grad and self._layout.dual is not self._layout:
            return links.gradient_of(g, self._layout)
        w = self._grad_wrapper = wrap(g, gradient_layout(self._layout))
        return w

    @grad.setter
    def grad(self, value: DTensor | None) -> None:
        self.__dict__.pop(BRINGS, None)
        if value is None:
            self._local.grad = self._grad_wrapper = None
            return
        if not isinstance(value, DTensor):
            raise DTensorError(
                f"the gradient of a DTensor must be a DTensor, got {type(value).__name__}: wrap it with "
                "DTensor.from_local or distribute_tensor"
            )
        wanted = gradient_layout(self._layout)
        if value._layout is not wanted:
            value = value.redistribute(self.device_mesh, wanted.shown)
        self._local.grad = value._local
        self._grad_wrapper = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> DTensor:
        if (written := self.__dict__.get(WRITTEN)) is not None:
            written()  # the caller may write to it past all version counters
        local = self._local
        if not local.requires_grad:
            # Writes to it count as writes to this tensor.
            return wrap(keeping_strides(local.detach(), local), self._layout)
        data = keeping_strides(local.data, local)
        for origin in list(links.copies):
            origin.watch(data)  # counts the writes to it separately
        return wrap(data, self._layout)

    @data.setter
    def data(self, value: DTensor) -> None:
        links.set_data(self, value)

    def detach(self) -> DTensor:
        return wrap(keeping_strides(self._local.detach(), self._local), self._layout)

    def detach_(self) -> DTensor:
        self._local.detach_()
        return self

    def retain_grad(self) -> None:
        self._local.retain_grad()

    def backward(
        self,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if inputs is not None or gradient is not None or self._layout.shape.numel() != 1 or not sums_only(self._layout):
            torch.autograd.backward((self,), gradient, retain_graph, create_graph, inputs=inputs)
            return
        local = self._local
        keep = create_graph if retain_graph is None else retain_graph
        run_backward((local,), (torch.ones_like(local),), keep, create_graph, (), True, True)

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        layout = self._layout

        def on_local(grad: torch.Tensor) -> torch.Tensor | None:
            result = hook(links.gradient_of(grad, layout))
            return None if result is None else links.gradient_for(result, layout)

        return self._local.register_hook(on_local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        me, layout = weakref.ref(self), self._layout

        def on_local(local: torch.Tensor) -> None:
            target = me()  # the graph may outlive this object
            hook(wrap(local, layout) if target is None else target)

        return self._local.register_post_accumulate_grad_hook(on_local)

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self._local.is_leaf:
            raise RuntimeError("only DTensors created by the user (graph leaves) can be deep-copied")
        local = keeping_strides(self._local.detach().clone(), self._local).requires_grad_(self._local.requires_grad)
        if (grad := self.grad) is not None:
            local.grad = grad._local.detach().clone()
        result = wrap(local, self._layout)
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return links.reduce(self)


define_attributes(DTensor)
