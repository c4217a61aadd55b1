"""`x[...]` and `x[...] = value`.

Basic indices (ints, slices, None, Ellipsis) are one view rule: a dim that is taken whole keeps its shards, a dim that
is cut or selected is gathered. Assignment through a basic index never gathers: each rank writes the elements in its own
box. Index tensors, boolean masks and mixtures are advanced indexing, where whole dims keep their shards, too: integer
tensors have a rule; masks and the rest are handled before it, or with the index on all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from terrazzo.errors import DTensorError
from terrazzo.layout import Box, Layout, Partial, Placement, Replicate, Shard
from terrazzo.tensor.copied_view import check_autograd_allows, check_writable, pass_on, writing
from terrazzo.tensor.dispatch.fallback import replicate_and_run_in_place
from terrazzo.tensor.dispatch.outside_mesh import in_place_outside_mesh, not_known
from terrazzo.tensor.dispatch.plain import admit_plain_tensors, describe
from terrazzo.tensor.dispatch.routes import cast_fresh
from terrazzo.tensor.dispatch.shapes import broadcast_shapes
from terrazzo.tensor.dispatch.spec import Call, Chosen, LocalFunction, OneArgument, Operand, Spec
from terrazzo.tensor.dtensor import DTensor, run_again, wrap
from terrazzo.tensor.indices import MASKS, as_tuple, consumes, expanded, is_basic, is_mask, normal, with_dims
from terrazzo.tensor.ops.questions import check_bounds
from terrazzo.tensor.ops.table import handler, rule
from terrazzo.tensor.ops.views import dims_of_view
from terrazzo.tensor.redistribute import redistribute_local, replicas_of
from terrazzo.tensor.strides import check_no_overlap, with_strides_of


def index_otherwise(target: Any, index: Any) -> Any:
    """Indexing by tensors, lists and masks, where the rule does not apply."""
    if not isinstance(target, DTensor):
        raise DTensorError(
            "a plain tensor cannot be indexed with a DTensor: index a DTensor, or use index.full_tensor()"
        )
    items = normal(index)
    if not is_basic(items):
        return _advanced(target, items)
    if is_basic(as_tuple(index)):
        return NotImplemented  # an invalid index: the function itself raises the error
    return run_again(torch.Tensor.__getitem__, (target, items), {})


@rule("__getitem__", otherwise=index_otherwise, takes_plain=lambda index: True)
def getitem(call: Call, input: Operand, index: Any) -> Spec | None:
    items = as_tuple(index)
    if type(index) is not list and any(isinstance(i, Operand) for i in items):
        return _by_integers(input, items)
    if isinstance(index, list) or not is_basic(items) or sum(i is Ellipsis for i in items) > 1:
        return None
    spec = dims_of_view(call)
    if spec is not None:
        # A new dim may have the stride of a dim of size 1 that an int selects.
        selected = {d for i, d in with_dims(items, input.ndim) if isinstance(i, int)}
        if selected.intersection(spec.ins[0]):
            spec.ins, spec.outs = (
                [tuple([None if d in selected else d for d in dims]) for dims in part] for part in (spec.ins, spec.outs)
            )
        # A slice that takes all of a sharded dim may have global bounds, which would be wrong for the local tensor.
        kept = spec.ins[0]
        local_index = tuple(
            slice(None) if isinstance(i, slice) and kept[d] is not None else i for i, d in with_dims(items, input.ndim)
        )
        spec.localize = lambda chosen: OneArgument(operator.getitem, local_index)
    return spec


def _full(value: Any, like: Layout) -> Any:
    """An index item, gathered on every rank."""
    if isinstance(value, DTensor):
        return redistribute_local(value._local.detach(), value._layout, replicas_of(value._layout))
    return value


def _by_integers(input: Operand, items: Sequence[Any]) -> Spec | None:
    """The rule for integer tensors and whole dims; None if there is another kind of item, as far as it can be seen.

    Whole dims keep their shards; the dims of the result that come from the indices are sharded as the indices are.
    """
    if sum(i is Ellipsis for i in items) > 1 or not all(
        isinstance(i, slice) or i is Ellipsis or (isinstance(i, Operand) and i.ndim) for i in items
    ):
        return None
    indices = expanded(tuple(items), input.ndim)
    if any(isinstance(i, slice) and i.indices(n) != (0, n, 1) for i, n in zip(indices, input.shape, strict=True)):
        return None
    given = [i for i in indices if isinstance(i, Operand)]
    try:
        joined = broadcast_shapes(*[i.shape for i in given])
    except (RuntimeError, ValueError):
        return None  # unless one of them is a mask, C++ raises an error
    of_joined = [input.ndim + k for k in range(len(joined))]
    whole = _arranged(indices)
    out = [f for d in whole for f in (of_joined if d is None else [d])]
    sizes = dict(enumerate(input.shape)) | dict(zip(of_joined, joined, strict=True))
    own = [
        tuple(
            f if n == sizes[f] else None for f, n in zip(of_joined[len(joined) - len(i.shape) :], i.shape, strict=True)
        )
        for i in given
    ]

    def localize(chosen: Chosen) -> LocalFunction | None:
        layout = chosen.ins[0]
        if layout.local_shape.numel() and chosen.outs[0].local_shape.numel():
            return None  # slices that take a whole dim are right for the local tensor, too

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            local, index = loc
            if not local.numel() and chosen.outs[0].shape.numel():
                _check_bounds(as_tuple(index), layout)
            return _own_strides(local[index])

        return run

    return Spec(
        [tuple(d if d in whole else None for d in range(input.ndim)), *own],
        [tuple(out)],
        [tuple(sizes[f] for f in out)],
        linear=[(0,)],
        is_view=False,
        localize=localize,
        guard=_without_masks,
    )


def _without_masks(loc: Sequence[Any], kw: Mapping[str, Any]) -> bool:
    index = loc[1]
    return not any(is_mask(i) for i in index) if type(index) is tuple else index.dtype not in MASKS


def _only_integers(target: DTensor, items: Sequence[Any]) -> bool:
    """Whether everything but whole dims is an integer tensor; then the rule covers it, if the shapes fit together."""
    chosen = [i for i in items if not isinstance(i, slice)]
    if not all(isinstance(i, DTensor) and i._layout.mesh is target._layout.mesh and not is_mask(i) for i in chosen):
        return False
    broadcast_shapes(*[tuple(i.shape) for i in chosen])
    return True


def _basic_part(items: Sequence[Any], ndim: int) -> tuple[tuple[Any, ...], list[Any]]:
    """The ints, slices and Nones as a basic index, and the remaining index: whole dims, tensors and bools.

    >>> _basic_part((0, slice(1, 3), True), 2)
    ((0, slice(1, 3, None)), [slice(None, None, None), True])
    """
    everything = slice(None)
    basic: list[Any] = []
    rest: list[Any] = []
    for i in expanded(tuple(items), ndim):
        if i is None or isinstance(i, slice):
            basic.append(i)
            rest.append(everything)
        elif isinstance(i, int) and not isinstance(i, bool):
            basic.append(i)
        else:
            if not isinstance(i, (bool, torch.Tensor)):
                torch.empty(1, device="cpu")[i]  # raises: it is not a valid index
            basic += [everything] * consumes(i)
            rest.append(i)
    return tuple(basic), rest


def _advanced(target: DTensor, index: Sequence[Any]) -> DTensor:
    """Advanced indexing: the basic part first, as in C++; then every dim is whole or has a tensor."""
    basic, items = _basic_part(index, target.ndim)
    if any(i != slice(None) for i in basic):
        target = run_again(torch.Tensor.__getitem__, (target, basic), {})
    if _only_integers(target, items):
        return run_again(torch.Tensor.__getitem__, (target, tuple(items)), {})
    return _picked(target, items)


def _picked(target: DTensor, index: Sequence[Any]) -> DTensor:
    """Masks, and indices with other placements than the tensor: they are gathered on every rank."""
    layout = target._layout
    if layout.coord is None and any(is_mask(i) for i in index):
        raise not_known("__getitem__", layout.mesh)
    items = [_full(i, layout) for i in index]
    items = [i.to(target._local.device) if isinstance(i, torch.Tensor) and i.dim() else i for i in items]
    shape, whole = _probe(layout.shape, items)
    placements = [
        p if isinstance(p, Partial) or (isinstance(p, Shard) and p.dim in whole) else Replicate()
        for p in layout.placements
    ]
    kept = layout.with_placements(placements, layout.order)
    local = _for_varying(target, kept, kept)
    if not local.numel() and 0 not in shape:
        _check_bounds(items, layout)
    picked = _own_strides(local[tuple(items)])
    placed = [type(p)(whole[p.dim]) if isinstance(p, Shard) else p for p in kept.placements]
    return wrap(picked, Layout.of(layout.mesh, placed, shape, layout.order))


def _for_varying(value: DTensor, wanted: Layout, used: Layout) -> torch.Tensor:
    """This rank's part under `wanted`; ranks use other elements of it along what `used`, of any mesh, varies."""
    have, dims = value._layout, used.varying
    if have.mesh is used.mesh:
        local = redistribute_local(value._local, have, wanted, dims)
        dims = tuple(m for m in dims if wanted.placements[m].is_replicate() and not have.placements[m].is_shard())
    else:
        local = redistribute_local(value._local, have, wanted)
    return cast_fresh(local, dims, used.mesh) if dims and local.requires_grad and torch.is_grad_enabled() else local


def _check_bounds(items: Sequence[Any], layout: Layout) -> None:
    """For an empty local tensor: C++ does not check the bounds of an index into an empty tensor."""
    for i, d in with_dims(items, layout.ndim):
        if isinstance(i, torch.Tensor) and not is_mask(i):
            n = layout.shape[d]
            check_bounds(torch.where(i < 0, i + n, i), n, "index")


def _check_masks(items: Sequence[Any], layout: Layout) -> None:
    """Raise if a mask has another shape than the dims that it is for."""
    for i, d in with_dims(items, layout.ndim):
        shape = layout.shape[d : d + consumes(i)]
        if is_mask(i) and tuple(i.shape) != tuple(shape):
            raise IndexError(
                f"The shape of the mask {list(i.shape)} does not match the shape of the indexed tensor "
                f"{list(layout.shape)} from dim {d} on"
            )


def _own_strides(picked: torch.Tensor) -> torch.Tensor:
    """The result with the strides of a new tensor: for empty ones C++ gives strides of 0, as if it were expanded."""
    return picked if picked.numel() else picked.clone(memory_format=torch.contiguous_format)


def _probe(shape: Sequence[int], items: Sequence[Any]) -> tuple[tuple[int, ...], dict[int, int]]:
    """The shape of the result, and where in it each whole dim goes.

    The index tensors are broadcast together.
    """
    joined = broadcast_shapes(*[_shape_of(i) for i in items if not isinstance(i, slice)])
    found: list[int] = []
    places: dict[int, int] = {}
    for d in _arranged(items):
        if d is not None:
            places[d] = len(found)
        found += joined if d is None else [shape[d]]
    return tuple(found), places


def _arranged(items: Sequence[Any]) -> list[int | None]:
    """The whole dims as they follow each other in the result, and None for the dims of the index tensors together.

    These take the place of the first indexed dim if the indexed dims are adjacent, else they come first.
    """
    at = [k for k, i in enumerate(items) if not isinstance(i, slice)]
    apart = at != list(range(at[0], at[-1] + 1))
    found: list[int | None] = [None] if apart else []
    d = 0
    for k, i in enumerate(items):
        if isinstance(i, slice):
            found.append(d)
        elif k == at[0] and not apart:
            found.append(None)
        d += consumes(i)
    return found


def _shape_of(i: Any) -> tuple[int, ...]:
    """The shape that an item contributes to the result."""
    if isinstance(i, bool):
        return (int(i),)
    return (int(i.sum()),) if is_mask(i) else tuple(i.shape)


# ------------------------------------------------------------------ assignment


@handler("__setitem__")
def set_(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    target, index, value = args
    if index is False:
        return  # C++ ignores it, too
    if index is True:
        index = None  # False and True: as in C++
    if not isinstance(target, DTensor):
        raise DTensorError(
            "a DTensor cannot be assigned to a part of a plain tensor: use value.full_tensor(), or assign to a DTensor"
        )
    items = normal(index)
    taken = _taken(items, target._layout)  # before the value is looked at, as in C++
    check_writable(target)
    check_autograd_allows(target)
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim():
        admitted = admit_plain_tensors("__setitem__", (target, 0, value), {})
        assert admitted is not None
        value = admitted[0][2]
    if taken is not None and isinstance(value, DTensor) and value.dim():  # also on ranks that do not hold the region
        torch.empty(target.shape, device="meta")[tuple(items)] = torch.empty(value.shape, device="meta")
    boxes = not target._layout.packed and not any(isinstance(p, Partial) for p in target._layout.placements)
    outside = target._layout.coord is None
    if is_basic(items) and boxes and all(not isinstance(i, slice) or (i.step or 1) > 0 for i in items):
        check_no_overlap(target._local, target.shape, tuple(items))
        with writing(target, items):
            (_assign_outside if outside else _assign_box)(target, items, value)
        if taken is None or taken.numel():
            pass_on(target)
    elif outside:
        _assign_outside(target, tuple(items), value)
        pass_on(target)
    else:
        plain_index = tuple(_full(i, target._layout) for i in items)
        replicate_and_run_in_place("__setitem__", _assign, (target, plain_index, value), {})


def _taken(items: Sequence[Any], layout: Layout) -> torch.Tensor | None:
    """The view that a basic index gives of a tensor with this layout, without data; raises for an invalid index."""
    if any(isinstance(i, torch.Tensor) for i in items):
        return None
    return torch.empty(layout.shape, device="meta")[tuple(items)]


def _assign(target: torch.Tensor, index: Any, value: Any) -> None:
    target[index] = value


def _assign_outside(target: DTensor, items: tuple[Any, ...], value: Any) -> None:
    """On a rank outside the mesh, which holds none of the elements."""
    _check_masks(items, target._layout)
    args = (target, items, value)
    call, loc, kw = describe("__setitem__", True, torch.Tensor.__setitem__, args, {})
    in_place_outside_mesh(call, args, loc, kw, {})


def _assign_box(target: DTensor, items: tuple[Any, ...], value: Any) -> None:
    """Write those of the indexed elements that are in this rank's box."""
    layout = target._layout
    box: Box = layout.box()
    wanted_at = _value_layout(value._layout, items, layout) if isinstance(value, DTensor) else None
    local_index: list[Any] = []
    region: list[int] = []  # global lengths of the region's dims
    mine: list[slice] = []  # the part of each that is this rank's
    d = 0
    for i in expanded(items, layout.ndim):
        if i is None:
            local_index.append(None)
            region.append(1)
            mine.append(slice(0, 1))
            continue
        n, first, length = layout.shape[d], box.offsets[d], box.lengths[d]
        if isinstance(i, slice):
            start, stop, step = i.indices(n)
            wanted = range(start, stop, step)
            lo = max(0, -(-(first - start) // step))
            hi = min(len(wanted), max(lo, -(-(first + length - start) // step)))
            hi = max(lo, hi)
            if hi > lo:
                local_index.append(slice(wanted[lo] - first, wanted[hi - 1] - first + 1, step))
            else:
                local_index.append(slice(0, 0))
            region.append(len(wanted))
            mine.append(slice(lo, hi))
        else:
            at = i % n - first
            if not 0 <= at < length:
                _write_nothing(target, value, wanted_at)
                return
            local_index.append(at)
        d += 1
    part = _my_part(value, wanted_at, region, mine, layout)
    if isinstance(value, DTensor):
        part = with_strides_of(target._local[tuple(local_index)], part)
    target._local[tuple(local_index)] = part


def _value_layout(value: Layout, items: Sequence[Any], target: Layout) -> Layout:
    """The layout in which an assigned value is needed: sharded like the target along dims that the index takes whole,
    replicated otherwise."""
    if value.mesh is not target.mesh:
        return replicas_of(value)
    taken: list[int | None] = []  # for each dim of the region, the target's dim if it is taken whole, else None
    for i, d in with_dims(items, target.ndim):
        if i is None or isinstance(i, slice):
            whole = i is not None and range(*i.indices(target.shape[d])) == range(target.shape[d])
            taken.append(d if whole else None)
    shift = len(taken) - value.ndim
    placements: list[Placement] = []
    for p in target.placements:
        at = taken.index(p.dim) - shift if isinstance(p, Shard) and p.dim in taken else -1
        fits = isinstance(p, Shard) and 0 <= at < value.ndim and value.shape[at] == target.shape[p.dim]
        placements.append(Shard(at) if fits else Replicate())
    return Layout.of(value.mesh, placements, value.shape, target.order)


def _write_nothing(target: DTensor, value: Any, wanted: Layout | None) -> None:
    """For a rank outside the region: it takes part in redistributing the value, and in the backward of that.

    Its local tensor is marked as written, as on the other ranks.
    """
    part = _my_part(value, wanted, [], [], target._layout)
    target._local[:0] = part.sum() * 0 if isinstance(value, DTensor) else value  # which may be none of its numbers


def _my_part(value: Any, wanted: Layout | None, region: Sequence[int], mine: Sequence[slice], layout: Layout) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        assert wanted is not None
        local = _for_varying(value, wanted, layout)
    else:
        local = value
    if not mine:
        return local
    extra = max(local.dim() - len(region), 0)
    local = local.reshape(local.shape[extra:]) if extra else local  # drop leading dims of size 1, as torch does
    shift = len(region) - local.dim()
    index = tuple(
        mine[k + shift] if n == region[k + shift] and n != 1 else slice(None) for k, n in enumerate(local.shape)
    )
    return local[index]
