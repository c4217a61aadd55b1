"""Views and rearrangements: which input dim each output dim comes from.

`view`, `reshape`, `flatten` and the like are splits and joins of dims. A joined dim may be sharded by its outermost
part, and a split one by its outermost piece, if the sizes divide evenly; in other views each dim keeps its shards.

Of `view(dtype)` the number of elements depends on the old dtype, and plans do not, so it is decided at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch

from terrazzo._torch.tensors import is_one_of_several_views, is_view
from terrazzo.errors import DTensorError
from terrazzo.layout import Layout
from terrazzo.tensor.copied_view import CopiedView, mark_alias
from terrazzo.tensor.dispatch.outside_mesh import not_known
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
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"Dimension out of range (got {dim} for a tensor of {ndim} dimensions)")
    return dim + ndim if dim < 0 else dim


def moved(
    input: Operand,
    out: Sequence[int | None],
    shape: Sequence[int],
    *,
    localize: Any = None,
    even: Mapping[int, tuple[int, ...]] | None = None,
    keeps_terms: bool = False,
    moves_only: bool = True,
) -> Spec:
    """The spec of a view with these input dims as its output dims (None: new, or not shardable)."""
    ins = tuple(d if d in out else None for d in range(input.ndim))
    return Spec(
        [ins],
        [tuple(out)],
        [tuple(shape)],
        linear=[(0,)],
        moves_only=moves_only,
        localize=localize,
        even=even or {},
        is_view=True,
        keeps_terms=keeps_terms,
    )


def _sizes(args: Sequence[Any]) -> tuple[int, ...] | None:
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    return tuple(sizes) if all(isinstance(s, int) for s in sizes) else None


def resolve_shape(shape: Sequence[int], numel: int) -> tuple[int, ...] | None:
    """`shape` with its one -1 filled in; None when it cannot hold `numel` elements."""
    holes = [i for i, n in enumerate(shape) if n == -1]
    known = prod(n for n in shape if n != -1)
    if len(holes) > 1 or (holes and (known == 0 or numel % known)):
        return None
    result = [numel // known if n == -1 else n for n in shape]
    return tuple(result) if prod(result) == numel else None


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
            return OneArgument(torch.Tensor.reshape, new_shape)
        if is_thin(layout.local_shape, layout.shape):
            return _thin_reshape(layout.shape, shape, new_shape, copies is not None)
        return OneArgument(torch.Tensor.view, new_shape, copies)

    return moved(input, out, shape, localize=localize, even=even)


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
        return local.reshape(new_local).clone()

    return run


@rule("view", "reshape", "_unsafe_view", "_reshape_alias", "_view_copy", "view_copy")
def view(call: Call, input: Operand, *shape: Any, **kwargs: Any) -> Spec | None:
    if kwargs or not shape or isinstance(shape[0], torch.dtype):
        return None
    sizes = _sizes(shape[:1]) if call.name == "_reshape_alias" else _sizes(shape)
    resolved = None if sizes is None else resolve_shape(sizes, input.numel)
    return None if resolved is None else reshape_spec(call, input, resolved)


@rule("flatten")
def flatten(call: Call, input: Operand, start_dim: int = 0, end_dim: int = -1) -> Spec | None:
    if not isinstance(start_dim, int) or not isinstance(end_dim, int):
        return None
    if input.ndim == 0:
        return reshape_spec(call, input, (1,))
    start, end = norm_dim(start_dim, input.ndim), norm_dim(end_dim, input.ndim)
    if start > end:
        return None
    if start == end:  # C++ returns its argument
        return within(input, linear=[(0,)], moves_only=True, localize=lambda chosen: _itself)
    shape = (*input.shape[:start], prod(input.shape[start : end + 1]), *input.shape[end + 1 :])
    return reshape_spec(call, input, shape)


@rule("unflatten")
def unflatten(call: Call, input: Operand, dim: int, sizes: Sequence[int]) -> Spec | None:
    if not isinstance(dim, int) or not input.ndim:
        return None
    dim = norm_dim(dim, input.ndim)
    inner = resolve_shape(tuple(sizes), input.shape[dim])
    return None if inner is None else reshape_spec(call, input, (*input.shape[:dim], *inner, *input.shape[dim + 1 :]))


@decomposition("ravel")
def ravel(input: Any) -> Any:
    """A copy if the tensor is not contiguous, even where a view exists."""
    return input.contiguous().view(-1)


def _reordered(input: Operand, order: Sequence[int]) -> Spec:
    """The spec of `input` with its dims in this order."""
    return moved(input, order, [input.shape[d] for d in order])


@rule("t", "numpy_T", "mT", "adjoint", "H", "mH")
def t(call: Call, input: Operand) -> Spec | None:
    order = list(range(input.ndim))
    if call.name in ("mT", "adjoint", "mH") and input.ndim > 1:
        order[-2:] = [order[-1], order[-2]]
    elif call.name == "numpy_T" or input.ndim == 2:
        order.reverse()
    elif input.ndim > 2:
        return None
    return _reordered(input, order)


@rule("transpose")
def transpose(call: Call, input: Operand, dim0: int, dim1: int) -> Spec | None:
    if not isinstance(dim0, int) or not isinstance(dim1, int):
        return None
    order = list(range(input.ndim))
    if order:
        a, b = norm_dim(dim0, input.ndim), norm_dim(dim1, input.ndim)
        order[a], order[b] = b, a
    return _reordered(input, order)


@rule("permute")
def permute(call: Call, input: Operand, *dims: Any) -> Spec | None:
    order = _sizes(dims)
    if order is None or len(order) != input.ndim:
        return None
    order = tuple(norm_dim(d, input.ndim) for d in order)
    return _reordered(input, order)


@rule("movedim")
def movedim(call: Call, input: Operand, source: Any, destination: Any) -> Spec | None:
    src = [norm_dim(d, input.ndim) for d in ([source] if isinstance(source, int) else source)]
    dst = [norm_dim(d, input.ndim) for d in ([destination] if isinstance(destination, int) else destination)]
    rest = iter([d for d in range(input.ndim) if d not in src])
    placed = dict(zip(dst, src, strict=True))
    order = [placed[i] if i in placed else next(rest) for i in range(input.ndim)]
    return _reordered(input, order)


@rule("unsqueeze")
def unsqueeze(call: Call, input: Operand, dim: int) -> Spec | None:
    if not isinstance(dim, int):
        return None
    dim = norm_dim(dim, input.ndim + 1)
    out: list[int | None] = list(range(input.ndim))
    out.insert(dim, None)
    shape = list(input.shape)
    shape.insert(dim, 1)
    return moved(input, out, shape)


@rule("squeeze")
def squeeze(call: Call, input: Operand, dim: Any = None) -> Spec | None:
    if dim is None:
        gone = [d for d, n in enumerate(input.shape) if n == 1]
    else:
        named = [norm_dim(d, input.ndim) for d in ([dim] if isinstance(dim, int) else dim)]
        if len(set(named)) < len(named):
            return None  # an error, which the function itself raises
        gone = [d for d in named if input.ndim and input.shape[d] == 1]
    kept = [d for d in range(input.ndim) if d not in gone]

    def localize(chosen: Chosen) -> LocalFunction:
        # Squeezed by global sizes: a dim of which this rank happens to hold one row must stay.
        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            return torch.squeeze(loc[0], gone)

        return run

    return moved(input, kept, [input.shape[d] for d in kept], localize=localize)


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

    spec = moved(input, range(input.ndim - 1), input.shape[:-1], localize=localize, moves_only=False)
    if any(p.is_partial("avg") for p in input.placements):
        spec.linear = []  # PyTorch cannot divide complex numbers of half precision, so means are taken before
    return spec


@rule("view_as_real")
def view_as_real(call: Call, input: Operand) -> Spec:
    # Twice as many elements of half the size, so terms of sums may pass; those of products would mix the parts.
    return moved(input, [*range(input.ndim), None], [*input.shape, 2], keeps_terms=True, moves_only=False)


@rule("diagonal", "linalg_diagonal")
def diagonal(call: Call, input: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """Two dims become a new last one."""
    ends = {"dim1": -2, "dim2": -1} if call.name == "linalg_diagonal" else {"dim1": 0, "dim2": 1}
    given = {"offset": 0} | ends | dict(zip(("offset", "dim1", "dim2"), args, strict=False)) | dict(kwargs)
    if input.ndim < 2 or len(given) > 3 or not all(isinstance(v, int) for v in given.values()):
        return None
    offset = given["offset"]
    first, second = norm_dim(given["dim1"], input.ndim), norm_dim(given["dim2"], input.ndim)
    if first == second:
        return None
    rows, columns = input.shape[first], input.shape[second]
    length = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    kept = [d for d in range(input.ndim) if d not in (first, second)]
    return moved(input, [*kept, None], [*[input.shape[d] for d in kept], length])


@rule("select_scatter", "slice_scatter")
def write_part(call: Call, input: Operand, src: Operand, dim: int = 0, *args: Any, **kwargs: Any) -> Spec | None:
    """A copy of `input` in which a part along `dim` is replaced by `src`."""
    if call.operands != [input, src] or not isinstance(dim, int) or not input.ndim:
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
    if not all(isinstance(v, int) for v in (offset, dim1, dim2)) or not input.ndim:
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


@rule("expand", "broadcast_to")
def expand(call: Call, input: Operand, *sizes: Any, implicit: bool = False) -> Spec | None:
    target = _sizes(sizes)
    if target is None or len(target) < input.ndim:
        return None
    shift = len(target) - input.ndim
    out: list[int | None] = [None] * len(target)
    shape = list(target)
    for d, n in enumerate(input.shape):
        if target[d + shift] in (-1, n):
            out[d + shift] = d
            shape[d + shift] = n
        elif n != 1:
            return None
    if -1 in shape:
        return None

    def localize(chosen: Chosen) -> LocalFunction:
        return OneArgument(torch.Tensor.expand, tuple(chosen.outs[0].local_shape))

    return moved(input, out, shape, localize=localize)


@rule("select")
def select(call: Call, input: Operand, dim: int, index: int) -> Spec | None:
    if not isinstance(dim, int) or not isinstance(index, int) or not input.ndim:
        return None
    dim = norm_dim(dim, input.ndim)
    if not -input.shape[dim] <= index < input.shape[dim]:
        return None
    out = [d for d in range(input.ndim) if d != dim]
    return moved(input, out, [input.shape[d] for d in out])


@rule("narrow")
def narrow(call: Call, input: Operand, dim: int, start: int, length: int) -> Spec | None:
    if not all(isinstance(v, int) for v in (dim, start, length)) or not input.ndim:
        return None
    dim = norm_dim(dim, input.ndim)
    start = start + input.shape[dim] if start < 0 else start
    if not 0 <= start <= input.shape[dim] or length < 0 or start + length > input.shape[dim]:
        return None
    return _cut(input, dim, start, start + length, 1)


@rule("slice")
def slice_(call: Call, input: Operand, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Spec | None:
    if not all(v is None or isinstance(v, int) for v in (dim, start, end, step)) or not input.ndim:
        return None
    dim = norm_dim(dim, input.ndim)
    first, stop, stride = slice(start, end, step).indices(input.shape[dim])
    return _cut(input, dim, first, max(first, stop), stride)


def _cut(input: Operand, dim: int, start: int, stop: int, step: int) -> Spec:
    length = len(range(start, stop, step))
    shape = [length if d == dim else n for d, n in enumerate(input.shape)]
    if length == input.shape[dim] and step == 1:
        return moved(input, range(input.ndim), shape, localize=_identity)
    out = [None if d == dim else d for d in range(input.ndim)]
    return moved(input, out, shape)


def _itself(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
    same: torch.Tensor = loc[0]
    return same


def _identity(chosen: Chosen) -> LocalFunction:
    def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = loc[0].view(loc[0].shape)
        return result

    return run


def _parts(
    input: Operand, dim: int, sizes: Sequence[int], localize: Callable[[Chosen], LocalFunction] | None = None
) -> Spec:
    """Several views, one after another along `dim`."""
    dims: Dims = tuple(None if d == dim else d for d in range(input.ndim))
    shapes = [tuple(n if d == dim else m for d, m in enumerate(input.shape)) for n in sizes]
    return Spec([dims], [dims] * len(shapes), shapes, linear=[(0,)], moves_only=True, is_view=True, localize=localize)


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


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def split(call: Call, input: Operand, split_size: Any, dim: int = 0) -> Spec | None:
    if not isinstance(dim, int) or not input.ndim:
        return None
    dim = norm_dim(dim, input.ndim)
    n = input.shape[dim]
    if isinstance(split_size, int):
        if split_size <= 0:
            return None
        sizes = [min(split_size, n - i) for i in range(0, n, split_size)] or [0]
    else:
        sizes = list(split_size)
    return _parts(input, dim, sizes, _as_views(call.name))


@rule("chunk", "unsafe_chunk")
def chunk(call: Call, input: Operand, chunks: int, dim: int = 0) -> Spec | None:
    if not isinstance(chunks, int) or chunks <= 0 or not input.ndim:
        return None
    dim = norm_dim(dim, input.ndim)
    n = input.shape[dim]
    step = -(-n // chunks)
    if n == 0:
        return None
    return _parts(input, dim, [min(step, n - i) for i in range(0, n, step)], _as_views(call.name))


def _split_by_values(input: Any, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    """If the split points are a tensor, every rank needs their values."""
    cuts = named.get("tensor_indices_or_sections", indices_or_sections)
    if not isinstance(cuts, torch.Tensor):
        return NotImplemented
    if isinstance(cuts, DTensor) and cuts._layout.coord is None:
        raise not_known("tensor_split", cuts._layout.mesh)
    return torch.tensor_split(input, cuts.tolist(), dim)


@rule("tensor_split", otherwise=_split_by_values, takes_plain=lambda cuts: True)
def tensor_split(
    call: Call, input: Operand, indices_or_sections: Any = None, dim: int = 0, *, indices: Any = None,
    sections: Any = None,
) -> Spec | None:  # fmt: skip
    cuts = next((c for c in (indices_or_sections, indices, sections) if c is not None), None)
    if not input.ndim or not isinstance(dim, int) or not isinstance(cuts, (int, list, tuple)):
        return None
    d = norm_dim(dim, input.ndim)
    n = input.shape[d]
    if isinstance(cuts, int):
        if cuts <= 0:
            return None
        small, longer = divmod(n, cuts)
        stops = list(accumulate(small + (i < longer) for i in range(cuts)))
        bounds = list(zip([0, *stops], stops, strict=False))
    elif all(isinstance(c, int) for c in cuts):
        places = [slice(None, c).indices(n)[1] for c in cuts]
        bounds = [(min(a, n), max(a, b)) for a, b in zip([0, *places], [*places, n], strict=True)]
    else:
        return None
    spec = _parts(input, d, [b - a for a, b in bounds])

    def localize(chosen: Chosen) -> LocalFunction:
        # `narrow`, as on one device: autograd forbids in-place writes to the results of `split`.
        return lambda func, loc, kw: tuple(loc[0].narrow(d, a, b - a) for a, b in bounds)

    spec.localize = localize
    return spec


@rule("unbind")
def unbind(call: Call, input: Operand, dim: int = 0) -> Spec | None:
    if not isinstance(dim, int) or not input.ndim:
        return None
    dim = norm_dim(dim, input.ndim)
    kept = [d for d in range(input.ndim) if d != dim]
    ins: Dims = tuple(None if d == dim else d for d in range(input.ndim))
    shape = tuple(input.shape[d] for d in kept)
    count = input.shape[dim]
    return Spec([ins], [tuple(kept)] * count, [shape] * count, linear=[(0,)], moves_only=True, is_view=True)


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
