"""Autograd's entry points for DTensors, whose graphs are those of their local tensors.

`torch.autograd.backward` and `grad` are called with the local tensors. `torch.autograd.Function.apply` would record
nothing, because the DTensors themselves require no gradient in C++. So it is bridged: a second class is applied to the
local tensors, and runs the user's forward and backward on DTensors.

In `torch.func.grad` functorch would wrap each tensor in a plain one, and a DTensor inside such a wrapper would be taken
for a plain tensor by the DTensors in the same call. Gradients do not need the wrapper: the differentiated arguments are
replaced by views of them, and autograd computes the gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch

from terrazzo._torch.autograd import default_setup_context, leaves_of
from terrazzo._torch.checkpointing import captured
from terrazzo._torch.dispatching import attribute_of_wrapper, tree_flatten, tree_map, tree_unflatten
from terrazzo._torch.function_apply import node_class_of, only_saves, plain_apply
from terrazzo.comm.differentiable import cast, first_of
from terrazzo.errors import DTensorError
from terrazzo.layout import Layout, Partial
from terrazzo.tensor.dtensor import DTensor, gradient_layout, local_of, sums_only, wrap
from terrazzo.tensor.links import links
from terrazzo.tensor.ops.accumulate import axis_of_terms
from terrazzo.tensor.ops.table import handler
from terrazzo.tensor.redistribute import redistribute_local

Function = torch.autograd.Function


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, torch.Tensor) or value is None else tuple(value)


def gradient_of(local: torch.Tensor, layout: Layout) -> DTensor:
    """The gradient that autograd found for a local tensor of `layout`, as a DTensor; for partial, that of the tensor.

    Inside autograd each rank may have a different gradient of a sum's term; outside it is one replicated value. This
    matters for the backward of the backward, where gradients of that value on several ranks are summed.
    """
    if layout.dual is not layout and sums_only(layout):
        local = first_of(local, axis_of_terms(layout))
    return wrap(local, gradient_layout(layout))


def gradient_for(gradient: DTensor, layout: Layout) -> torch.Tensor:
    """The reverse of `gradient_of`: the local gradient to pass to autograd for a local tensor of `layout`."""
    dual = layout.dual
    if any(isinstance(p, Partial) and p.reduce_op not in ("sum", "avg") for p in layout.placements):
        raise DTensorError(
            f"the gradient of a tensor placed {list(layout.placements)} cannot be replaced: how its terms share it is "
            "not known. Redistribute the tensor to Replicate first, and replace the gradient of the result"
        )
    if gradient._layout is not dual:
        gradient = gradient.redistribute(dual.mesh, dual.shown)
    if dual is layout:
        return gradient._local
    terms = prod(layout.mesh_shape[m] for m, p in enumerate(layout.placements) if p.is_partial("avg"))
    own = gradient._local if terms == 1 else gradient._local / terms
    return cast(own, axis_of_terms(layout))


links.gradient_of, links.gradient_for = gradient_of, gradient_for


def _root(output: Any, gradient: Any) -> tuple[Any, Any]:
    """The local root of a backward and its gradient; the gradient of a sum's term is that of the sum.

    For terms of other reductions it is not (a mean divides it, a maximum passes it to one rank), so these are reduced
    first.
    """
    if not isinstance(output, DTensor):
        return output, gradient
    local, layout = output._local, output._layout
    if not sums_only(layout):
        local, layout = redistribute_local(local, layout, layout.dual), layout.dual
    if gradient is None:
        if output.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return local, torch.ones_like(local)
    if not isinstance(gradient, DTensor):
        if gradient.dim() == 0 and output.dim() == 0:
            return local, gradient
        raise DTensorError(f"the gradient of a DTensor must be a DTensor, got {type(gradient).__name__}")
    return local, gradient_for(gradient, layout)


@handler("backward")
def backward(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if func is not torch.autograd.backward:
        tensor, *rest = args
        names = ("gradient", "retain_graph", "create_graph", "inputs")
        given = dict(zip(names, rest, strict=False)) | dict(kwargs)
        gradient = given.pop("gradient", None)
        torch.autograd.backward((tensor,), None if gradient is None else (gradient,), **given)
        return
    _backward(*args, **kwargs)


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    outputs = _as_tuple(tensors)
    given = (None,) * len(outputs) if grad_tensors is None else _as_tuple(grad_tensors)
    roots = [_root(o, g) for o, g in zip(outputs, given, strict=True)]
    wanted = None if inputs is None else [local_of(i) for i in _as_tuple(inputs)]
    torch.autograd.backward([r[0] for r in roots], [r[1] for r in roots], retain_graph, create_graph, inputs=wanted)


@handler("grad")
def grad(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _grad(*args, **kwargs) if func is torch.autograd.grad else NotImplemented


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: Any = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    if is_grads_batched:
        raise DTensorError("torch.autograd.grad(is_grads_batched=True) does not support DTensors: loop over the batch")
    outs, ins = _as_tuple(outputs), _as_tuple(inputs)
    given = (None,) * len(outs) if grad_outputs is None else _as_tuple(grad_outputs)
    roots = [_root(o, g) for o, g in zip(outs, given, strict=True)]
    found = torch.autograd.grad(
        [r[0] for r in roots], [local_of(i) for i in ins], [r[1] for r in roots], retain_graph, create_graph,
        allow_unused=allow_unused, materialize_grads=materialize_grads,
    )  # fmt: skip
    return tuple(
        gradient_of(g, i._layout) if g is not None and isinstance(i, DTensor) else g
        for g, i in zip(found, ins, strict=True)
    )


@handler("_has_compatible_shallow_copy_type")
def shallow_copy(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor can take over another's data: `nn.Module.to` asks, and makes new parameters if it cannot."""
    first, second = args
    return isinstance(first, DTensor) and isinstance(second, DTensor)


@handler("_make_dual", "_unpack_dual")
def forward_mode(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    raise DTensorError(
        "DTensors do not support forward-mode derivatives (jvp): use backward or torch.autograd.grad, or "
        "torch.autograd.functional.jvp, which calls backward twice"
    )


# ------------------------------------------------------------------ user functions


class _Context:
    """The `ctx` of the user's forward and backward: it saves local tensors and returns DTensors."""

    # `_real` is set only while forward or backward runs: kept longer, it would make a reference cycle with the node,
    # and saved tensors would live until the garbage collector runs.
    _real: Any
    _count: int
    _layouts: tuple[Any, ...]

    def __init__(self, count: int) -> None:
        self.__dict__.update(_real=None, _count=count, _layouts=())

    def save_for_backward(self, *tensors: Any) -> None:
        self.__dict__["_layouts"] = tuple(t._layout if isinstance(t, DTensor) else None for t in tensors)
        self._real.save_for_backward(*[local_of(t) for t in tensors])

    save_for_forward = save_for_backward

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        saved = self._real.saved_tensors
        layouts = self._layouts or (None,) * len(saved)
        return tuple(
            wrap(t, layout) if t is not None and layout is not None else t
            for t, layout in zip(saved, layouts, strict=True)
        )

    def mark_dirty(self, *tensors: Any) -> None:
        self._real.mark_dirty(*[local_of(t) for t in tensors])

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self._real.mark_non_differentiable(*[local_of(t) for t in tensors])

    def set_materialize_grads(self, value: bool) -> None:
        self._real.set_materialize_grads(value)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        return self._real.needs_input_grad[-self._count :] if self._count else ()


_bridges: WeakKeyDictionary[type, type] = WeakKeyDictionary()
_bridges_lock = threading.Lock()


def _bridge_of(user: type) -> type:
    """The class that is applied to local tensors in place of `user`. It does not keep `user` alive, nor outlives it."""
    with _bridges_lock:
        found = _bridges.get(user)
        if found is None:
            members = {"forward": staticmethod(_forward), "backward": staticmethod(_backward_of_user), _MARK: True}
            found = _bridges[user] = type(user.__name__, (Function,), members)
            _hook_with_dtensors(node_class_of(found))
    return found


_MARK = "_terrazzo_bridge"


def _forward(ctx: Any, user: Any, report: list[Any], layouts: Any, *flat: Any) -> Any:
    ctx.user = user  # a class that is made for one call is kept alive by its node alone
    ctx.in_force = captured()
    proxy = ctx.proxy = _Context(len(flat))
    proxy.__dict__["_real"] = ctx
    args = [wrap(x, layout) if layout is not None else x for x, layout in zip(flat, layouts, strict=True)]
    ctx.tensor_layouts = [layout for x, layout in zip(flat, layouts, strict=True) if isinstance(x, torch.Tensor)]
    if user.setup_context is not default_setup_context:
        result = user.forward(*args)
        user.setup_context(proxy, tuple(args), result)
    else:
        result = user.forward(proxy, *args)
    outs = tuple(_sums(o) for o in (result if isinstance(result, tuple) else (result,)))
    ctx.layouts = layouts
    ctx.out_layouts = [o._layout if isinstance(o, DTensor) else None for o in outs]
    proxy.__dict__["_real"] = None
    report.append((ctx.out_layouts, isinstance(result, tuple)))
    return tuple(local_of(o) for o in outs)


def _backward_of_user(ctx: Any, *grads: Any) -> Any:
    user = ctx.user
    given = _given(grads, ctx.out_layouts)
    ctx.proxy.__dict__["_real"] = ctx
    try:
        with ctx.in_force():
            result = user.backward(ctx.proxy, *given)
    finally:
        ctx.proxy.__dict__["_real"] = None
    result = result if isinstance(result, tuple) else (result,)
    found = (_input_grad(user, g, layout) for g, layout in zip(result, ctx.layouts, strict=False))
    return (None, None, None, *found)


def _given(grads: Any, layouts: Any) -> tuple[Any, ...]:
    """The gradients of outputs, or of inputs, as the user's functions get them."""
    return tuple(
        gradient_of(g, layout) if g is not None and layout is not None else g
        for g, layout in zip(grads, layouts, strict=True)
    )


def _input_grad(user: type, gradient: Any, layout: Any) -> Any:
    if isinstance(gradient, DTensor):
        if layout is None:
            raise DTensorError(
                f"{user.__name__}.backward returned a DTensor as the gradient of an input that is a plain tensor"
            )
        return gradient_for(gradient, layout)
    if isinstance(gradient, torch.Tensor) and layout is not None:
        raise DTensorError(
            f"{user.__name__}.backward returned a plain tensor as the gradient of a DTensor input; it must return a "
            "DTensor"
        )
    return gradient


def _sums(value: Any) -> Any:
    """A DTensor with terms of mean, max, ... reduced, as their gradient is not that of a sum; else the value itself."""
    if isinstance(value, DTensor) and not sums_only(value._layout):
        return value.redistribute(placements=value._layout.dual.shown)
    return value


def _hook_with_dtensors(node: Any) -> None:
    """Hooks on a bridge's node (for example a module's backward hooks) get DTensors, as the user's function does."""

    def taken(grads: Any, layouts: Any) -> Any:
        if grads is None:
            return None
        grads = (grads,) if isinstance(grads, torch.Tensor) else grads
        return tuple(
            gradient_for(g, layout) if isinstance(g, DTensor) else g for g, layout in zip(grads, layouts, strict=True)
        )

    def register_hook(self: Any, hook: Any) -> Any:
        ins, outs = self.tensor_layouts, self.out_layouts
        return super(node, self).register_hook(lambda gi, go: taken(hook(_given(gi, ins), _given(go, outs)), ins))

    def register_prehook(self: Any, hook: Any) -> Any:
        outs = self.out_layouts
        return super(node, self).register_prehook(lambda go: taken(hook(_given(go, outs)), outs))

    node.register_hook, node.register_prehook = register_hook, register_prehook


_wrapper_requires_grad = attribute_of_wrapper("requires_grad")


class _LocalOf(Function):
    """The local tensor of a wrapper that has a graph in C++; backward passes the wrapper's gradient on."""

    @staticmethod
    def forward(ctx: Any, wrapper: DTensor) -> torch.Tensor:
        ctx.layout = wrapper._layout
        return wrapper._local.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return gradient_of(grads[0], ctx.layout)


def with_graph_of_wrapper(made: DTensor) -> DTensor:
    """What a Function of plain tensors returned, such as reentrant checkpointing, connected to the Function's node."""
    if made._local.requires_grad or not _wrapper_requires_grad(made):
        return made
    return wrap(plain_apply(_LocalOf, made), made._layout)


def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`cls.apply` when there are DTensors among the arguments."""
    if kwargs or getattr(cls, _MARK, False) or only_saves(cls):  # a bridge would save copies of the tensors
        return plain_apply(cls, *args, **kwargs)
    report: list[Any] = []
    args = tuple(_sums(a) for a in args)
    layouts = [a._layout if isinstance(a, DTensor) else None for a in args]
    outs = plain_apply(_bridge_of(cls), cls, report, layouts, *[local_of(a) for a in args])
    out_layouts, is_tuple = report[0]
    wrapped = tuple(wrap(o, layout) if layout is not None else o for o, layout in zip(outs, out_layouts, strict=True))
    return wrapped if is_tuple else wrapped[0]


# ------------------------------------------------------------------ torch.func


def grad_and_value(func: Callable[..., Any], argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """`torch.func.grad_and_value` if there are DTensors among the differentiated arguments."""
    single = isinstance(argnums, int)
    positions: tuple[int, ...] = (argnums,) if single else tuple(argnums)
    outer_grad = torch.is_grad_enabled()
    with torch.enable_grad():
        arguments = list(args)
        for i in positions:
            arguments[i] = tree_map(lambda x: _own(x, outer_grad), arguments[i])
        chosen = arguments[positions[0]] if single else tuple(arguments[i] for i in positions)
        flat, spec = tree_flatten(chosen)
        output = func(*arguments, **kwargs)
        aux = None
        if has_aux:
            output, aux = output
        if not isinstance(output, torch.Tensor) or output.dim() != 0:
            shape = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else type(output)
            raise DTensorError(f"torch.func.grad: the function must return a 0-d tensor, but it returned {shape}")
        tensors = [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad]
        found = iter(torch.autograd.grad(output, tensors, create_graph=True, materialize_grads=True))
        grads = [next(found) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in flat]
    if not outer_grad or not _depends_on_others([output, *grads], tensors):
        output, aux, grads = tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, (output, aux, grads))
    result = tree_unflatten(grads, spec)
    return (result, (output, aux)) if has_aux else (result, output)


def _own(x: Any, outer_grad: bool) -> Any:
    """A view of `x` to differentiate by: it has `x`'s graph, but `x`'s own gradient is not affected."""
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return x.view_as(x) if outer_grad and x.requires_grad else x.detach().requires_grad_()


def _depends_on_others(results: Iterable[Any], own: Iterable[torch.Tensor]) -> bool:
    """Whether the graph of `results` reaches a leaf outside `own`: then an outer computation still needs the graph."""
    locals_ = [local_of(x) for x in results if isinstance(x, torch.Tensor)]
    reached = leaves_of([local for local in locals_ if local.grad_fn is not None])
    return not reached.keys() <= {id(local_of(x)) for x in own}
