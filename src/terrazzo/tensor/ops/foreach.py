"""Lists of tensors at once: `_foreach_*` and `_fused_*`, which optimizers and clipping use.

The lists are unwrapped once. Elementwise updates run on the local tensors when the tensors at each position are placed
alike and none is partial, as in optimizers; other lists are processed tensor by tensor with the ordinary operations.

`torch.nn.utils.clip_grad_norm_` takes a list, too, so a tensor subclass does not see it as one operation. Gradient by
gradient it would need a reduction for each, and fail where parameters are on different meshes. It calls `clipping_norm`
instead (`terrazzo._torch.clipping`): the local norms of all gradients at once, and one reduction per mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from terrazzo._torch.dispatching import OpOverload
from terrazzo.comm.axis import axis_of
from terrazzo.comm.collectives import all_reduce
from terrazzo.layout import Layout, Partial, Replicate
from terrazzo.tensor.copied_view import CopiedView, check_writable, pass_on
from terrazzo.tensor.dispatch.keys import list_handlers
from terrazzo.tensor.dispatch.names import canonical_name
from terrazzo.tensor.dispatch.plain import replicated
from terrazzo.tensor.dtensor import DTensor, local_of, wrap
from terrazzo.tensor.ops.accumulate import join_norms, norm_of_nothing, working_type
from terrazzo.tensor.ops.forms import Form, form_of
from terrazzo.tensor.ops.pointwise import is_pointwise
from terrazzo.tensor.ops.table import Handler, handler
from terrazzo.tensor.running import running

_PLAIN = frozenset([torch.Tensor])
_ELEMENTWISE_FUSED = frozenset(["_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"])


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and isinstance(value[0], torch.Tensor)


def locals_of(value: Any) -> Any:
    if _is_list(value):
        try:
            return [x._local for x in value]
        except AttributeError:
            return [local_of(x) for x in value]
    return local_of(value)


def _layouts(tensors: Sequence[Any]) -> list[Layout | None]:
    """The layouts of the tensors, None for a plain one: a model may have both kinds of parameters."""
    try:
        return [x._layout for x in tensors]
    except AttributeError:
        return [x._layout if isinstance(x, DTensor) else None for x in tensors]


def placed_alike(first: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether the local tensors can be updated without redistributing."""
    layouts = _layouts(first)
    if any(layout is not None and layout.dual is not layout for layout in set(layouts)):
        return False
    for other in others:
        if _is_list(other):
            if _layouts(other) != layouts and not _all_scalars(other, len(layouts), layouts):
                return False
        elif isinstance(other, DTensor) and not _is_scalar(other):
            return False
    return True


def locals_to_step(params: list[Any], others: list[Any]) -> tuple[list[Any], list[Any]] | None:
    """The lists of an optimizer's step, unwrapped once; None where the local tensors cannot be updated directly.

    A step with `foreach=True` is a dozen list operations, and each would check again that its tensors are DTensors and
    placed alike. These steps work element by element and tensor by tensor, so one check is enough.
    """
    if CopiedView in map(type, params) or not placed_alike(params, others):
        return None
    return locals_of(params), [locals_of(value) for value in others]


def _is_scalar(x: Any) -> bool:
    """Whether every rank has the same number: a plain one or a replicated 0-d DTensor."""
    if isinstance(x, DTensor):
        return x._layout.ndim == 0 and x._layout.is_replicated
    return not isinstance(x, torch.Tensor) or x.dim() == 0


def _all_scalars(other: Sequence[Any], count: int, layouts: Sequence[Layout | None]) -> bool:
    if len(other) != count:
        return False
    if {*map(type, other)} == _PLAIN and not any(map(torch.Tensor.dim, other)):
        return True  # as the numbers of an optimizer's steps are
    return all(
        _is_scalar(x) or found is layout for x, found, layout in zip(other, _layouts(other), layouts, strict=True)
    )


@functools.lru_cache(maxsize=512)
def _kind(func: Any) -> tuple[bool, bool]:
    """Whether a list operation is elementwise, and whether it writes its first list."""
    name, inplace = canonical_name(func)
    single = name.removeprefix("_foreach_")
    return is_pointwise(single) or single in ("copy", "zero", "clone"), inplace


@functools.lru_cache(maxsize=512)
def _form(func: Any, count: int, names: tuple[str, ...]) -> Form | None:
    return form_of(func, (None,) * count, dict.fromkeys(names))


def _by_position(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The same arguments, with as few by name as possible."""
    form = _form(func, len(args), tuple(kwargs))
    return (args, kwargs) if form is None else form.apply(args, kwargs)


def _foreach(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if kwargs:
        args, kwargs = _by_position(func, args, kwargs)
    elementwise, inplace = _kind(func)
    first = args[0]
    others = [*args[1:], *kwargs.values()] if kwargs else args[1:]
    if (
        not elementwise
        or not _is_list(first)
        or (inplace and CopiedView in map(type, first))
        or (torch.is_grad_enabled() and any(x.requires_grad for v in (first, *others) if _is_list(v) for x in v))
        or not placed_alike(first, others)
    ):
        return _one_by_one(func, args, kwargs)
    result = func(*[locals_of(a) for a in args], **{k: locals_of(v) for k, v in kwargs.items()})
    if inplace:
        return first if result is not None else None
    placed = zip(result, _layouts(first), strict=True)
    return type(result)([r if layout is None else wrap(r, layout) for r, layout in placed])


def _one_by_one(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The ordinary operation for each position of the lists."""
    name, inplace = canonical_name(func)
    single = name.removeprefix("_foreach_") + ("_" if inplace else "")
    method = _OWN.get(single) or getattr(torch.Tensor, single, None) or getattr(torch, single)
    args, kwargs = _by_position(func, args, kwargs)
    count = len(args[0]) if _is_list(args[0]) else len(args[1])
    if not _is_list(args[0]):
        method = torch.pow  # of a number
    lists = [v for v in (*args, *kwargs.values()) if type(v) in (list, tuple)]
    if any(len(v) != count for v in lists):
        return NotImplemented

    def at(value: Any, i: int) -> Any:
        return value[i] if type(value) in (list, tuple) else value

    def position(i: int) -> Any:
        own = [at(a, i) for a in args]
        named = {k: at(v, i) for k, v in kwargs.items()}
        if single in ("addcmul", "addcdiv", "addcmul_", "addcdiv_"):
            scalars = own[3:] + [named.pop(k) for k in ("value", "scalars") if k in named]
            value = scalars[0] if scalars else 1
            return method(*own[:3], value=value[i].item() if isinstance(value, torch.Tensor) else value)
        if (
            single in ("add", "add_", "sub", "sub_")
            and len(own) == 2
            and "alpha" in named
            and not isinstance(own[1], torch.Tensor)
        ):
            return method(own[0], own[1] * named["alpha"])
        return method(*own, **named)

    results = [position(i) for i in range(count)]
    if inplace:
        return None if isinstance(func, OpOverload) else args[0]
    return tuple(results)


def _written(functional: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *more: x.copy_(functional(x, *more))


def _powsum(x: Any, order: Any, dtype: torch.dtype | None = None) -> Any:
    wanted = dtype or x.dtype
    found = x.to(working_type(wanted)).abs().pow(order).sum()
    return found.to(wanted.to_real())


# maximum and minimum, of numbers in lists, are the same operations.
_BOUNDED: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(("clamp_max", "minimum"), lambda x, bound: torch.clamp(x, max=bound)),
    **dict.fromkeys(("clamp_min", "maximum"), lambda x, bound: torch.clamp(x, min=bound)),
}

# What the operation for one tensor is where PyTorch has none of the name, or one that takes less.
_OWN: Final[dict[str, Callable[..., Any]]] = {
    **_BOUNDED,
    **{single + "_": _written(functional) for single, functional in _BOUNDED.items()},
    "norm": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype),
    "powsum": _powsum,
}


def _fused(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    first = args[0]
    for x in first:
        check_writable(x)
    others = [*args[1:], *kwargs.values()]
    rest = [v for v in others if not (_is_list(v) and all(map(_is_scalar, v)))]  # without the numbers of steps
    if not placed_alike(first, rest):
        first_layouts = [x._layout for x in first]
        if any(isinstance(p, Partial) for layout in first_layouts for p in layout.placements):
            return NotImplemented
        args = [first, *[_placed_like(a, first) for a in args[1:]]]
        kwargs = {k: _placed_like(v, first) for k, v in kwargs.items()}
    result = func(*[locals_of(a) for a in args], **{k: locals_of(v) for k, v in kwargs.items()})
    for x in args[0]:
        pass_on(x)
    return result


def _placed_like(value: Any, first: Sequence[DTensor]) -> Any:
    """Gradients with other placements are redistributed to their parameters' layout."""
    if not _is_list(value) or len(value) != len(first):
        return value
    return [
        x.redistribute(p.device_mesh, p.placements) if isinstance(x, DTensor) and x.shape == p.shape else x
        for x, p in zip(value, first, strict=True)
    ]


def local_norms(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The norms of plain tensors, in float32 for half types; an empty tensor gets the value that changes no norm."""
    norms: list[Any] = [None] * len(tensors)
    alike: dict[tuple[torch.device, torch.dtype, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        wide = dtype or working_type(t.dtype)
        if t.numel() or not (t.is_floating_point() or t.is_complex()):  # integers have no norm, as C++ says
            alike.setdefault((t.device, t.dtype, wide), []).append(i)
        else:
            norms[i] = torch.full((), norm_of_nothing(order), dtype=wide.to_real(), device=t.device)
    for (_, own, wide), members in alike.items():
        found = torch._foreach_norm([tensors[i] for i in members], order, dtype=None if own is wide else wide)
        for i, norm in zip(members, found, strict=True):
            norms[i] = norm
    return norms


def _norms(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Local norms, then one reduction per mesh and set of mesh dims for all tensors together."""
    args, kwargs = _by_position(func, args, kwargs)
    tensors = args[0]
    order = float(args[1] if len(args) > 1 else 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    if not all(isinstance(x, DTensor) for x in tensors) or (
        torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    ):
        return _one_by_one(func, args, kwargs)
    tensors = [x if x._layout.dual is x._layout else x.redistribute() for x in tensors]
    results = local_norms([x._local for x in tensors], order, None if dtype is None else working_type(dtype))
    groups: dict[tuple[Any, tuple[int, ...], torch.dtype], list[int]] = {}
    for i, x in enumerate(tensors):
        if x._layout.varying and x._layout.coord is not None:
            groups.setdefault((x._layout.mesh, x._layout.varying, results[i].dtype), []).append(i)
    for (mesh, dims, _), members in groups.items():
        joined = join_norms(torch.stack([results[i] for i in members]), order, axis_of(mesh, dims))
        for i, value in zip(members, joined.unbind(), strict=True):
            results[i] = value
    scalars: dict[Any, Layout] = {}
    wrapped = []
    for x, value in zip(tensors, results, strict=True):
        mesh = x._layout.mesh
        layout = scalars.get(mesh)
        if layout is None:
            layout = scalars[mesh] = Layout.of(mesh, (Replicate(),) * len(x._layout.mesh_shape), ())
        wanted = dtype or x._local.dtype
        wrapped.append(wrap(value if value.dtype is wanted else value.to(wanted.to_real()), layout))
    return tuple(wrapped)


def _unscale(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """GradScaler's unscaling: an overflow on one rank counts on all ranks. Some gradients may be plain tensors."""
    grads, found_inf, inv_scale = args
    func([locals_of(g) for g in grads], locals_of(found_inf), locals_of(inv_scale))
    found = locals_of(found_inf)
    done: set[tuple[int, tuple[int, ...]]] = set()
    for layout in _layouts(grads):
        if layout is None or layout.coord is None:
            continue
        if layout.varying and (id(layout.mesh), layout.varying) not in done:
            done.add((id(layout.mesh), layout.varying))
            found.copy_(all_reduce(found, axis_of(layout.mesh, layout.varying), "max"))


def _update_scale(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(*[locals_of(a) for a in args], **{k: locals_of(v) for k, v in kwargs.items()})


def _register() -> None:
    """Register a handler for every list operation that the installed torch has."""
    apart: dict[str, Handler] = {"_foreach_norm": _norms, "_foreach_max": _one_by_one}
    names = {n for n in (*dir(torch.ops.aten), *dir(torch)) if n.startswith("_foreach_") and not n.endswith("_out")}
    for name in sorted(names):
        run = apart.get(name, _foreach)
        handler(name)(run)
        if hasattr(torch, name):
            list_handlers[getattr(torch, name)] = run
    for name in _ELEMENTWISE_FUSED:
        handler(name, name + "_")(_fused)
        if hasattr(torch, name + "_"):
            list_handlers[getattr(torch, name + "_")] = _fused
    handler("_amp_foreach_non_finite_check_and_unscale_")(_unscale)
    handler("_amp_update_scale_")(_update_scale)


_register()

# ------------------------------------------------------------------ clipping


def clipping_norm(tensors: list[torch.Tensor], order: float, error_if_nonfinite: bool) -> torch.Tensor:
    """The total norm for PyTorch's clipping, in place of its own loop over tensors."""
    with running("clip_grad_norm"):
        total = total_norm(tensors, order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {order} of the gradients is not finite, so it cannot be clipped; to scale by it "
            "anyway, set error_if_nonfinite=False"
        )
    return total


def total_norm(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of all tensors as one vector, replicated on the mesh of the first DTensor.

    Ranks outside a tensor's mesh hold none of it, and get the norm of what they hold.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    first: Layout | None = None
    for t in tensors:
        if not isinstance(t, DTensor):
            groups.setdefault((None, ()), []).append(t)
            continue
        if t._layout.dual is not t._layout:
            t = t.redistribute(placements=t._layout.dual.shown)
        layout = t._layout
        first = first or layout
        groups.setdefault((layout.mesh, layout.varying), []).append(t._local)
    assert first is not None
    device = first.mesh.device_type
    norms = []
    for (mesh, dims), members in groups.items():
        parts = local_norms(members, order)
        if any(part.device.type != device for part in parts):
            parts = [part.to(device) for part in parts]
        norm = torch.linalg.vector_norm(torch.stack(parts), order)
        norms.append(join_norms(norm, order, axis_of(mesh, dims)) if dims else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return replicated(total.to(dtype.to_real()), first)
