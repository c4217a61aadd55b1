"""Views and rearrangements: which input dim each output dim comes from.

`view`, `reshape`, `flatten` and the like are splits and joins of dims. A joined dim may be sharded by its outermost
part, and a split one by its outermost piece, if the sizes divide evenly; in other views each dim keeps its shards.

Of `view(dtype)` the number of elements depends on the old dtype, and plans do not, so it is decided at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from terrazzo._torch.tensors import is_one_of_several_views, is_view
from terrazzo.errors import DTensorError
from terrazzo.layout import Layout
from terrazzo.tensor.copied_view import CopiedView, mark_alias
from terrazzo.tensor.dispatch.outside_mesh import not_known
from terrazzo.tensor.dispatch.shapes import of_tensors_without_data
from terrazzo.tensor.dispatch.spec import Call, Chosen, Dims, LocalFunction, OneArgument, Operand, Spec, within
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.ops.table import decomposition, rule
from terrazzo.tensor.strides import (
    has_view,
    is_thin,
    no_view,
    note_strides,
    strides_in_memory,
    view_groups,
    what_strides_say,
)


def norm_dim(dim: int, ndim: int) -> int:
    """A dim as a nonnegative number."""
    end = max(ndim, 1)
    if not -end <= dim < end:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-end}, {end - 1}], but got {dim})")
    return dim + ndim if dim < 0 else dim


_VIEWS_ONLY = frozenset(["view", "unflatten"])
"""Functions that raise where `reshape` would copy."""


def reshape_spec(call: Call, input: Operand, shape: tuple[int, ...]) -> Spec:
    """The spec of viewing `input` as `shape`."""
    out: list[int | None] = [None] * len(shape)
    even: dict[int, tuple[int, ...]] = {}
    if prod(shape):
        for old, new in view_groups(input.shape, shape):
            # Of joined or split dims only the outermost may be sharded, not counting dims of size 1.
            a = [d for d in old if input.shape[d] != 1]
            b = [d for d in new if shape[d] != 1]
            # A dim of size 1 that is in both shapes may be sharded, too: one rank has all of it.
            for single, still in zip([d for d in old if d not in a], [d for d in new if d not in b], strict=False):
                out[still] = single
            if not a or not b:
                continue
            out[b[0]] = a[0]
            if len(a) > 1 or len(b) > 1:
                even[a[0]] = (input.shape[a[0]], shape[b[0]])

    copies = None if call.name in _VIEWS_ONLY else torch.Tensor.reshape

    def localize(chosen: Chosen) -> LocalFunction:
        layout, new_shape = chosen.ins[0], tuple(chosen.outs[0].local_shape)
        if layout is not input.layout:  # it was redistributed, so it is a copy and may have any strides
            return lambda func, loc, kw: _reshaped_copy(loc[0], layout.shape, shape, new_shape)
        if is_thin(layout.local_shape, layout.shape):
            return _thin_reshape(layout.shape, shape, new_shape, copies is not None)
        return OneArgument(torch.Tensor.view, new_shape, copies)

    ins = tuple(d if d in out else None for d in range(input.ndim))
    return Spec(
        [ins], [tuple(out)], [shape], even=even, linear=[(0,)], moves_only=True, localize=localize, is_view=True
    )


def _reshaped_copy(
    local: torch.Tensor, shape: Sequence[int], new_shape: Sequence[int], new_local: Sequence[int]
) -> torch.Tensor:
    made = local.reshape(new_local)
    return made if has_view(local, shape, new_shape) else made.contiguous()  # as a copy is on one device


def _thin_reshape(
    shape: Sequence[int], new_shape: Sequence[int], new_local: Sequence[int], copies: bool
) -> LocalFunction:
    """One row can be viewed as any shape; but all ranks must do the same, so the global strides decide."""
    views: dict[Any, bool] = {}

    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
        local: torch.Tensor = loc[0]
        key = what_strides_say(local)
        if key not in views:
            views[key] = has_view(local, shape, new_shape)
        if views[key]:
            return local.view(new_local)
        if not copies:
            raise no_view(shape, new_shape)
        return local.reshape(new_local).clone(memory_format=torch.contiguous_format)

    return run


@rule("view", "reshape", "_unsafe_view", "_reshape_alias", "_view_copy", "view_copy", "flatten", "unflatten")
def view(call: Call, *args: Any, **kwargs: Any) -> Spec | None:
    if len(call.operands) != 1 or any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        return None
    (input,) = call.operands
    whole = torch.empty(input.shape, device="meta")
    result = of_tensors_without_data(call, [whole])
    if result is whole:  # C++ returns its argument, in flatten
        return within(input, linear=[(0,)], moves_only=True, localize=lambda chosen: lambda func, loc, kw: loc[0])
    return reshape_spec(call, input, tuple(result.shape))


@decomposition("ravel")
def ravel(input: Any) -> Any:
    """A copy if the tensor is not contiguous, even where a view exists."""
    return input.contiguous().view(-1)


_STEPS = [n for n in range(23, 400) if all(n % k for k in range(2, 20))]
"""Primes: strides of which no other is a multiple, or the sum of two. There are more than a tensor may have dims."""


def dims_of_view(call: Call, localize: Callable[[Chosen], LocalFunction] | None = None) -> Spec | None:
    """The spec of a view, or of several, read from the strides that the function gives a tensor without data.

    A dim of the result that has stride and size of one of the tensor's is that dim. Of a result that is the whole
    tensor each rank takes all of its part, whatever sizes the arguments say.
    """
    if len(call.operands) != 1:
        return None
    (input,) = call.operands
    strides = _STEPS[: input.ndim]
    found = of_tensors_without_data(call, [torch.empty_strided(input.shape, strides, device="meta")])
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    sources = dict(zip(zip(strides, input.shape, strict=True), range(input.ndim), strict=True))
    outs: list[list[int | None]] = []
    for result in results:
        dims = list(map(sources.get, zip(result.stride(), result.shape, strict=True)))
        for i, d in enumerate(dims[:-1]):  # a new dim of size 1 may have the stride of one of size 1 that follows it
            if d in dims[i + 1 :]:
                dims[i] = None
        outs.append(dims)
    kept = set(range(input.ndim)).intersection(*outs)
    if isinstance(found, torch.Tensor) and outs[0] == list(range(input.ndim)):
        localize = _identity
    return Spec(
        [tuple([d if d in kept else None for d in range(input.ndim)])],
        [tuple([d if d in kept else None for d in dims]) for dims in outs],
        [tuple(result.shape) for result in results],
        linear=[(0,)],
        moves_only=True,
        localize=localize,
        is_view=True,
    )


def _identity(chosen: Chosen) -> LocalFunction:
    return lambda func, loc, kw: loc[0].view(loc[0].shape)


@rule(
    *("t", "numpy_T", "mT", "adjoint", "H", "mH", "transpose", "permute", "movedim", "unsqueeze", "diagonal"),
    *("linalg_diagonal", "select", "narrow", "slice", "unbind"),
)
def view_of_dims(call: Call, *args: Any, **kwargs: Any) -> Spec | None:
    return dims_of_view(call)


@rule("squeeze")
def squeeze(call: Call, *args: Any, **kwargs: Any) -> Spec | None:
    """By global sizes: a dim of which this rank happens to hold one row must stay."""
    spec = dims_of_view(call)
    if spec is not None and spec.localize is None:
        gone = [d for d, kept in enumerate(spec.ins[0]) if kept is None]
        spec.localize = lambda chosen: OneArgument(torch.squeeze, gone)
    return spec


@rule("expand", "broadcast_to")
def expand(call: Call, *args: Any, **kwargs: Any) -> Spec | None:
    return dims_of_view(call, lambda chosen: OneArgument(torch.Tensor.expand, tuple(chosen.outs[0].local_shape)))


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk")
def split(call: Call, *args: Any, **kwargs: Any) -> Spec | None:
    spec = dims_of_view(call, _as_views(call.name))
    if spec is None or len(spec.outs) != 1:
        return spec
    one = torch.unsafe_chunk if call.name.startswith("unsafe_") else torch.chunk  # the sizes given are global ones
    as_views = _as_views(one.__name__)

    def localize(chosen: Chosen) -> LocalFunction:
        whole = as_views(chosen) if as_views else lambda func, loc, kw: func(*loc)
        return lambda func, loc, kw: whole(one, [loc[0], 1], {})

    spec.localize = localize
    return spec


@rule("view_as_complex")
def view_as_complex(call: Call, input: Operand) -> Spec | None:
    """The real and imaginary parts are along the last dim. Sums may pass; a product of pairs is none of their parts."""
    if not input.ndim or input.shape[-1] != 2:
        return None

    def localize(chosen: Chosen) -> LocalFunction:
        gathered = chosen.ins[0] is not input.layout

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            pairs: torch.Tensor = loc[0] if loc else kw["input"]
            return torch.view_as_complex(pairs.contiguous() if gathered else pairs)

        return run

    # PyTorch cannot divide complex numbers of half precision, so means are taken before.
    linear = [] if any(p.is_partial("avg") for p in input.placements) else [(0,)]
    dims = tuple(range(input.ndim - 1))
    return Spec([(*dims, None)], [dims], [input.shape[:-1]], linear=linear, localize=localize, is_view=True)


@rule("view_as_real")
def view_as_real(call: Call, input: Operand) -> Spec:
    # Twice as many elements of half the size, so terms of sums may pass; those of products would mix the parts.
    dims = tuple(range(input.ndim))
    return Spec([dims], [(*dims, None)], [(*input.shape, 2)], linear=[(0,)], keeps_terms=True, is_view=True)


@rule("select_scatter", "slice_scatter")
def write_part(call: Call, input: Operand, src: Operand, dim: int = 0, *args: Any, **kwargs: Any) -> Spec | None:
    """A copy of `input` in which a part along `dim` is replaced by `src`."""
    if call.operands != [input, src] or not input.ndim:
        return None
    d = norm_dim(dim, input.ndim)
    dims: Dims = tuple(None if i == d else i for i in range(input.ndim))
    others = [n for i, n in enumerate(input.shape) if i != d]
    part = tuple(f for f in dims if f is not None) if call.name == "select_scatter" else dims
    given = [n for i, n in enumerate(src.shape) if i != d or call.name == "select_scatter"]
    if len(part) != src.ndim or given != others:
        return None
    return Spec([dims, part], [dims], [input.shape], linear=[(0, 1)], moves_only=True, keeps_terms=True)


@rule("diag_embed")
def diag_embed(call: Call, input: Operand, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Spec | None:
    """The last dim becomes the diagonal of two new dims."""
    if not input.ndim:
        return None
    first, second = norm_dim(dim1, input.ndim + 1), norm_dim(dim2, input.ndim + 1)
    if first == second:
        return None
    size = input.shape[-1] + abs(offset)
    rest = iter(range(input.ndim - 1))
    out: Dims = tuple(None if i in (first, second) else next(rest) for i in range(input.ndim + 1))
    ins: Dims = (*range(input.ndim - 1), None)
    shape = tuple(size if f is None else input.shape[f] for f in out)
    return Spec([ins], [out], [shape], linear=[(0,)], moves_only=True)


def _as_views(name: str) -> Callable[[Chosen], LocalFunction] | None:
    """For `unsafe_split` and the like, whose parts have their own version counters in C++: without autograd they share
    the input's, so that a write to one part is noticed by a copied view of another."""
    if not name.startswith("unsafe_"):
        return None
    counted = getattr(torch.Tensor, name.removeprefix("unsafe_"))

    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> Any:
        input = loc[0] if loc else kw["input"]
        if input.requires_grad and torch.is_grad_enabled():
            return func(*loc, **kw)
        if input.requires_grad and is_one_of_several_views(input):
            raise DTensorError(
                f"{name}: this tensor requires a gradient and is one of several views that were created together. "
                "Without autograd, a write to a part of it would make it unusable: take the parts of its detach()"
            )
        parts = counted(input, *loc[1:], **{k: v for k, v in kw.items() if k != "input"})
        return tuple(part.detach() for part in parts)  # not views for autograd, as in C++

    return lambda chosen: run


def _split_by_values(input: Any, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    """If the split points are a tensor, every rank needs their values."""
    cuts = named.get("tensor_indices_or_sections", indices_or_sections)
    if not isinstance(cuts, torch.Tensor):
        return NotImplemented
    if isinstance(cuts, DTensor) and cuts._layout.coord is None:
        raise not_known("tensor_split", cuts._layout.mesh)
    return torch.tensor_split(input, cuts.tolist(), dim)


@rule("tensor_split", otherwise=_split_by_values, takes_plain=lambda cuts: True)
def tensor_split(call: Call, *args: Any, **kwargs: Any) -> Spec | None:
    return dims_of_view(call)


@decomposition("as_strided")
def as_strided(input: Any, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None) -> Any:
    """Only for a tensor that occupies all of its memory, which is gathered; else strides in memory are not known."""
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
    of_a_view = isinstance(input, CopiedView) or is_view(input._local)
    has_gaps = type(input) is CopiedView and input._pending.has_gaps()
    if (
        has_gaps
        or not input.is_contiguous()
        or (storage_offset and of_a_view)
        or (storage_offset or 0) + extent > input.numel()
    ):
        raise DTensorError(
            f"as_strided({tuple(size)}, {tuple(stride)}, {storage_offset}) of a DTensor of shape {tuple(input.shape)}: "
            "this tensor is a view or not contiguous, and the memory around it is not on one rank. Use indexing, "
            "unfold, or contiguous() first"
        )
    return NotImplemented


# ------------------------------------------------------------------ the same bytes as another dtype


@decomposition("view")
def view_as_dtype(x: Any, dtype: Any) -> Any:
    """`view(dtype)` only; `view` to another shape has a rule."""
    if not isinstance(dtype, torch.dtype) or not isinstance(x, DTensor):
        return NotImplemented
    layout = x._layout
    before, after = x._local.element_size(), dtype.itemsize
    if layout.coord is None or any(p.is_partial() for p in layout.placements):
        return NotImplemented  # the bytes of partial terms have no meaning
    if before == after:
        return _same_memory(x, x._local.view(dtype), layout)
    last = layout.ndim - 1
    if last < 0 or layout.packed or any(p.is_shard(last) for p in layout.placements):
        return NotImplemented
    length = layout.shape[last] * before
    if length % after:
        return NotImplemented  # the function itself raises the error
    seen = Layout.of(layout.mesh, layout.placements, (*layout.shape[:last], length // after), layout.order)
    return _same_memory(x, x._local.view(dtype), seen)


def _same_memory(x: DTensor, local: torch.Tensor, layout: Layout) -> DTensor:
    if is_thin(layout.local_shape, layout.shape):
        before = strides_in_memory(x._local, x.shape)
        whole = torch.empty_strided(tuple(x.shape), before, dtype=x.dtype, device="meta")
        local = note_strides(local, layout.shape, whole.view(local.dtype).stride())
    result = wrap(local, layout)
    if type(x) is CopiedView:
        mark_alias(result, x)
    return result
