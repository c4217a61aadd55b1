"""Comparisons of whole tensors, which answer with a Python bool that is the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from terrazzo.comm.axis import axis_of
from terrazzo.comm.collectives import all_reduce
from terrazzo.tensor.dispatch.calls import admit_plain_tensors, special
from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.ops.table import decomposition
from terrazzo.tensor.redistribute import redistribute_local


@special("equal")
def equal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Each rank compares what it holds; one bit is reduced."""
    admitted = admit_plain_tensors("equal", func, args, kwargs)
    first, second = admitted[0] if admitted is not None else args
    if first.shape != second.shape:
        return False
    with torch.no_grad():
        layout = first._layout.dual
        mine = redistribute_local(first._local.detach(), first._layout, layout)
        other = redistribute_local(second._local.detach(), second._layout, layout)
        same = torch.tensor(torch.equal(mine, other), dtype=torch.int32, device=mine.device)
        if layout.varying:
            same = all_reduce(same, axis_of(layout.mesh, layout.varying), "min")
    return bool(same)


@special("is_same_size")
def is_same_size(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    first, second = args
    return bool(first.shape == second.shape)


@special("is_nonzero")
def is_nonzero(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    (tensor,) = args
    assert isinstance(tensor, DTensor)
    return bool(tensor)


@special("is_pinned")
def is_pinned(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    tensor = args[0]
    assert isinstance(tensor, DTensor)
    return bool(tensor._local.is_pinned(*args[1:], **kwargs))


@special("is_set_to")
def is_set_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether both are one memory, placed alike."""
    first, second = args
    both = isinstance(first, DTensor) and isinstance(second, DTensor)
    return both and first._layout is second._layout and bool(first._local.is_set_to(second._local))


@decomposition("allclose")
def allclose(input: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    return bool(torch.isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan).all())
