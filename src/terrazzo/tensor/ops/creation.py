"""New tensors with another tensor's dtype and device; they also get its placements if they have its shape.

The other tensor's values do not matter, so it is never redistributed: if the shapes differ, or it is partial, the new
tensor is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from terrazzo.tensor.dispatch.plain import replicated
from terrazzo.tensor.dispatch.spec import Call, Chosen, Dims, LocalFunction, Operand, Spec, Static, within
from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.ops.table import handler, rule

_UNREAD = frozenset((0,))


@rule("new_zeros", "new_ones", "new_empty", "new_full")
def new_tensor(call: Call, input: Operand, size: Any, *args: Static, **kwargs: Static) -> Spec | None:
    values = args[:1] if call.name == "new_full" else ()
    if isinstance(size, int):
        size = (size, *args)
    if not all(isinstance(n, int) for n in size):
        return None
    if call.name == "new_full":
        values = values or (kwargs["fill_value"],)
    options = {k: v for k, v in kwargs.items() if k not in ("size", "fill_value")}
    make = getattr(torch.Tensor, call.name)
    return _made(input, tuple(size), lambda local, shape: make(local.detach(), shape, *values, **options))


@rule("new_empty_strided")
def new_empty_strided(
    call: Call, input: Operand, size: Sequence[int], stride: Sequence[int], **kwargs: Any
) -> Spec | None:
    """Each rank's part has its dims in the memory order that the strides give."""
    if len(size) != len(stride):
        return None
    order = sorted(range(len(size)), key=lambda d: (-stride[d], d))
    back = sorted(range(len(size)), key=order.__getitem__)

    def make(local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return local.new_empty([shape[d] for d in order], **kwargs).permute(back)

    return _made(input, tuple(size), make)


def _made(input: Operand, shape: tuple[int, ...], make: Any) -> Spec:
    same = shape == tuple(input.shape)
    dims: Dims = tuple(range(input.ndim)) if same else (None,) * input.ndim
    out: Dims = dims if same else (None,) * len(shape)

    def localize(chosen: Chosen) -> LocalFunction:
        local_shape = tuple(chosen.outs[0].local_shape)

        return lambda func, loc, kw: make(loc[0], local_shape)

    return Spec([dims], [out], [shape], localize=localize, unread=_UNREAD)


@handler("new_tensor")
def new_tensor_of_data(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The caller's data is the same on every rank, so the result is replicated."""
    source = args[0]
    if not isinstance(source, DTensor) or source._layout.coord is None:
        return NotImplemented
    if any(isinstance(a, torch.Tensor) for a in (*args[1:], *kwargs.values())):
        return NotImplemented
    return replicated(source._local.new_tensor(*args[1:], **kwargs), source._layout)


@rule("zeros_like", "ones_like", "full_like", "empty_like", any_number=True)
def filled_like(call: Call, input: Operand, *args: Static, **kwargs: Static) -> Spec:
    """Terms of zeros are zeros, so zeros_like keeps Partial; for other values Partial becomes Replicate.

    So it does for integers, of which there are no averages.
    """
    dtype = kwargs.get("dtype")
    zeros = call.name in ("zeros_like", "empty_like") and (dtype is None or dtype.is_floating_point or dtype.is_complex)
    return within(input, linear=[(0,)] if zeros else [], unread=_UNREAD, keeps_terms=True)
