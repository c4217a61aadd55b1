"""Shapes that an operation does not accept are found before anything is sent.

Where a rule refuses a call its operands may be replicated, and the operation itself raises if their shapes do not fit.
But then the shapes may differ between ranks, too: `from_local` without `shape=` assumes that all ranks have parts of
the same size, so that ranks with different parts gather different sizes, for which gloo ends the process. So the global
shapes are tried first, on tensors without memory.

`broadcast_shapes` is here because `torch.broadcast_shapes` imports sympy, which takes longer than the rest of the first
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from terrazzo.errors import DTensorArgumentError, DTensorError
from terrazzo.tensor.dispatch.spec import Call, Dims
from terrazzo.tensor.dispatch.structure import get_at, on_stand_ins

_REFUSALS = (RuntimeError, ValueError, IndexError)


def check_shapes(call: Call, loc: Sequence[Any], kw: Mapping[str, Any]) -> None:
    """Raise if the function refuses the operands' global shapes; nothing happens if all operands are replicated."""
    if len(call.operands) < 2 or all(o.layout.is_replicated for o in call.operands):
        return
    refusal = _refusal(call, loc, kw, lambda local, shape: local.new_empty(shape, device="meta"))
    if refusal is None or isinstance(refusal, NotImplementedError):  # the latter: not for tensors without memory
        return
    # Such tensors are refused for other reasons, too, so it is asked again, with zeros.
    again = _refusal(call, loc, kw, lambda local, shape: local.new_zeros(()).expand(shape))
    if type(again) is not type(refusal):
        return
    shapes = " and ".join(str(tuple(o.shape)) for o in call.operands)
    raise DTensorArgumentError(
        f"{call.name} of tensors of the global shapes {shapes}: {again}. If one was made by from_local of parts that "
        "differ in size between ranks, pass from_local the global shape, shape="
    ) from again


def _refusal(
    call: Call, loc: Sequence[Any], kw: Mapping[str, Any], make: Callable[..., torch.Tensor]
) -> Exception | None:
    tensors = [make(get_at(loc, kw, o.path), o.shape) for o in call.operands]
    try:
        with torch.no_grad():
            on_stand_ins(call.func, loc, kw, [o.path for o in call.operands], tensors)
    except _REFUSALS as error:
        return error
    except Exception:
        return None
    return None


def of_tensors_without_data(call: Call, tensors: Sequence[torch.Tensor] | None = None) -> Any:
    """What the function makes of these in place of its operands, by default meta tensors; raises its own errors."""
    if tensors is None:
        tensors = [torch.empty(o.shape, device="meta") for o in call.operands]
    return on_stand_ins(call.func, call.args, call.kwargs, [o.path for o in call.operands], tensors)


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape of tensors of these shapes.

    >>> broadcast_shapes((8, 1, 6), (7, 1), ())
    (8, 7, 6)
    """
    result: list[int] = [1] * max((len(shape) for shape in shapes), default=0)
    for shape in shapes:
        for d, size in enumerate(shape, len(result) - len(shape)):
            if size == 1 or size == result[d]:
                continue
            if result[d] != 1:
                raise DTensorError(f"shapes {', '.join(str(tuple(s)) for s in shapes)} cannot be broadcast together")
            result[d] = size
    return tuple(result)


def dims_within(shape: Sequence[int], out: Sequence[int]) -> Dims | None:
    """The dims of a tensor as factors 0, 1, ... of the shape `out`, to which it is broadcast; None if it cannot be.

    >>> dims_within((3, 1), (2, 3, 4)), dims_within((3,), (2, 4))
    ((1, None), None)
    """
    first = len(out) - len(shape)
    if first < 0 or any(n not in (1, m) for n, m in zip(shape, out[first:], strict=True)):
        return None
    return tuple(d if n == out[d] else None for d, n in enumerate(shape, first))
