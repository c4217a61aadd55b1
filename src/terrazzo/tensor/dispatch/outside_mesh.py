"""Operations on a rank outside the mesh of their DTensors.

Such a rank holds no elements and does not communicate, but it runs the same program: it gets DTensors with the same
shapes, layouts, dtypes and strides as the ranks inside the mesh, and they require gradients where those do. The
operation runs on tensors of the global shapes without data. Only results that depend on values cannot be given there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch

from terrazzo.errors import DTensorError
from terrazzo.layout import Layout, Replicate
from terrazzo.tensor.dispatch.keys import Route
from terrazzo.tensor.dispatch.planner import CallPlan
from terrazzo.tensor.dispatch.spec import Call, Operand
from terrazzo.tensor.dispatch.structure import get_at, map_tensors, on_one_element, on_stand_ins, tied_to
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.strides import note_strides, strides_in_memory

_LOGGER: Final = logging.getLogger("torch._subclasses.fake_tensor")


def route_outside_mesh(call: Call, plan: CallPlan) -> Route:
    """The route of a planned call on a rank that holds none of its operands."""

    def run(func: Any, args: Any, loc: Any, kw: Any, kwargs: Any) -> Any:
        joins = plan.joined is not None and plan.joined.applies(loc, kw)
        outs = plan.joined_outs if joins else plan.outs
        return results_outside_mesh(call, outs, args, loc, kw, kwargs)

    return run


def not_known(name: str, mesh: Any) -> DTensorError:
    """The error for a call whose result needs what the ranks of the mesh hold."""
    return DTensorError(
        f"{name}: this rank is outside the mesh {mesh}, and the shape or dtype of the result is not known without the "
        "values; call this on ranks of the mesh only, or redistribute the tensor to a mesh of all ranks first"
    )


def in_place_outside_mesh(
    call: Call, args: Sequence[Any], loc: Sequence[Any], kw: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> Any:
    """The first argument, which requires a gradient from now on if an operand does.

    What raises without knowing the values (shapes, dtypes, bounds) raises here, too.
    """
    from terrazzo._torch.graphs import NEEDS_SHAPE, NEEDS_VALUE, NO_FAKE

    try:
        _on_fakes(call.func, call.operands, loc, kw)
    except (NEEDS_SHAPE, NEEDS_VALUE, NO_FAKE):
        pass
    target: DTensor = args[0]
    sources = [o for o in [get_at(args, kwargs, o.path) for o in call.operands[1:]] if o.requires_grad]
    differentiates = target._local.is_floating_point() or target._local.is_complex()
    if torch.is_grad_enabled() and differentiates and (sources or target._local.requires_grad):
        written = target._local.detach().clone()
        target._local.copy_(tied_to(written, *[o._local for o in sources]))
    return target


def results_outside_mesh(
    call: Call,
    outs: Sequence[Layout] | None,
    args: Sequence[Any],
    loc: Sequence[Any],
    kw: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """What a call returns, with DTensors without elements in the layouts `outs`; replicated if that is None."""
    given = [get_at(args, kwargs, o.path) for o in call.operands]
    result, same = without_data(call.func, call.operands, loc, kw)
    found: list[torch.Tensor] = []
    map_tensors(result, found.append)
    mesh = call.operands[0].layout.mesh
    if outs is None and result is not None:
        whole = (Replicate(),) * len(call.operands[0].layout.mesh_shape)
        outs = [Layout.of(mesh, whole, tuple(t.shape)) for t in found]
    if result is None or outs is None or [tuple(t.shape) for t in found] != [tuple(o.shape) for o in outs]:
        result = None
        with suppress(Exception):  # of the result only dtypes are used
            result = None if outs is None else on_one_element(call.func, loc, kw)
        found = []
        map_tensors(result, found.append)
        if outs is None or len(found) != len(outs):
            raise not_known(call.name, mesh)
        same, strides = [], False
    else:
        strides = True
    sources = [t._local for t in given if t._local.requires_grad]
    layouts = iter(outs)

    def make(like: torch.Tensor) -> DTensor:
        out = next(layouts)
        for fake, tensor in zip(same, given, strict=False):
            if like is fake:
                return tensor  # the operation had nothing to do and returned its argument
        local = torch.zeros(out.local_shape, dtype=like.dtype, device=given[0]._local.device)
        if like.requires_grad:
            local = tied_to(local, *sources)
        if strides and out.ndim:
            local = note_strides(local, out.shape, like.stride())
        return wrap(local, out)

    return result if result is NotImplemented else map_tensors(result, make)


def without_data(
    func: Any, operands: Sequence[Operand], loc: Sequence[Any], kw: Mapping[str, Any]
) -> tuple[Any, list[torch.Tensor]]:
    """The result for tensors of the global shapes without data, and these; None if it depends on values."""
    try:
        return _on_fakes(func, operands, loc, kw)
    except Exception:  # whatever it is: other errors than of missing values the ranks of the mesh raise, too
        return None, []


def _on_fakes(
    func: Any, operands: Sequence[Operand], loc: Sequence[Any], kw: Mapping[str, Any]
) -> tuple[Any, list[torch.Tensor]]:
    """The result for tensors of the global shapes without data, and these."""
    from terrazzo._torch.graphs import FakeTensorMode  # imports sympy, which no rank inside needs

    fakes = []
    with _without_log(), FakeTensorMode(allow_non_fake_inputs=True):
        for o in operands:
            local = get_at(loc, kw, o.path)
            strides = strides_in_memory(local, o.shape)
            fake = torch.empty_strided(o.shape, strides, dtype=local.dtype, device=local.device)
            if local.requires_grad:
                fake.requires_grad_()
                fake = fake if local.is_leaf else fake.clone()
            fakes.append(fake)
        return on_stand_ins(func, loc, kw, [o.path for o in operands], fakes), fakes


@contextmanager
def _without_log() -> Iterator[None]:
    """Errors of the operation itself are raised, and not logged as well."""
    before, _LOGGER.disabled = _LOGGER.disabled, True
    try:
        yield
    finally:
        _LOGGER.disabled = before
