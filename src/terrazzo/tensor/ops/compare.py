"""Comparisons of whole tensors, and questions about them, with the same answer on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from terrazzo.comm.axis import axis_of
from terrazzo.comm.collectives import all_reduce
from terrazzo.tensor.dispatch.plain import admit_plain_tensors
from terrazzo.tensor.dtensor import DTensor, local_of
from terrazzo.tensor.ops.table import decomposition, handler
from terrazzo.tensor.redistribute import redistribute_local


@handler("equal")
def equal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Each rank compares what it holds; one truth value is reduced.

    A plain tensor of the whole shape is compared with the values of the DTensor.
    """
    args = sorted(args, key=lambda x: not isinstance(x, DTensor))
    admitted = admit_plain_tensors("equal", args, kwargs, lambda plain: plain.shape == args[0].shape)
    first, second = admitted[0] if admitted is not None else args
    if first.shape != second.shape:
        return False
    layout = first._layout.dual
    if layout.coord is None:
        return True  # this rank holds no element, so none that differs
    with torch.no_grad():
        mine = redistribute_local(first._local.detach(), first._layout, layout)
        other = redistribute_local(second._local.detach(), second._layout, layout)
        same = torch.tensor(torch.equal(mine, other), dtype=torch.int32, device=mine.device)
        # Plain tensors may differ between replicas.
        over = layout.varying if admitted is None else tuple(range(len(layout.mesh_shape)))
        if over:
            same = all_reduce(same, axis_of(layout.mesh, over), "min")
    return bool(same)


@handler("is_same_size")
def is_same_size(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    first, second = args
    return bool(first.shape == second.shape)


@handler("is_nonzero")
def is_nonzero(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    (tensor,) = args
    assert isinstance(tensor, DTensor)
    return bool(tensor)


@handler(
    *("is_complex", "is_floating_point", "is_signed", "is_inference", "is_conj", "is_neg", "is_tensor", "is_storage"),
    *("_is_zerotensor", "can_cast", "promote_types", "result_type", "get_is_conj", "get_is_neg", "is_pinned"),
)
def ask_local(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Questions about dtype and the like, which every local tensor can answer."""
    return func(*map(local_of, args), **{k: local_of(v) for k, v in kwargs.items()})


@handler("is_set_to")
def is_set_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether both share their memory and are placed alike."""
    first, second = args
    both = isinstance(first, DTensor) and isinstance(second, DTensor)
    return both and first._layout is second._layout and bool(first._local.is_set_to(second._local))


@decomposition("allclose")
def allclose(input: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    return bool(torch.isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan).all())
