"""Copies of elements: repeat and repeat_interleave."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.tensor.dispatch.spec import Call, Dims, Operand, Spec, within
from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.ops.table import decomposition, rule
from terrazzo.tensor.ops.views import norm_dim


@rule("repeat")
def repeat(call: Call, input: Operand, *repeats: Any) -> Spec | None:
    """Dims that are not repeated may be sharded."""
    times = repeats[0] if len(repeats) == 1 and isinstance(repeats[0], (list, tuple)) else repeats
    lead = len(times) - input.ndim
    if lead < 0 or not all(isinstance(n, int) for n in times):
        return None
    own = times[lead:]
    factors: Dims = tuple(d if own[d] == 1 else None for d in range(input.ndim))
    shape = (*times[:lead], *(n * m for n, m in zip(own, input.shape, strict=True)))
    return Spec([factors], [(*(None,) * lead, *factors)], [shape], linear=[(0,)], moves_only=True)


@rule("repeat_interleave")
def repeat_interleave(
    call: Call, input: Operand, repeats: Any, dim: Any = None, *, output_size: Any = None
) -> Spec | None:
    """Every element equally often; the repeated dim may be sharded if the cuts fall between the same elements."""
    if not isinstance(repeats, int) or repeats < 1 or not input.ndim or output_size is not None:
        return None
    if dim is None:
        if input.ndim > 1:
            return None
        dim = 0
    d = norm_dim(dim, input.ndim)
    n = input.shape[d]
    shape = [n * repeats if i == d else m for i, m in enumerate(input.shape)]
    return within(input, (), shape, linear=[(0,)], moves_only=True, even={d: (n, n * repeats)})


@decomposition("repeat_interleave")
def repeat_interleave_each(input: Any, repeats: Any = None, dim: Any = None, *, output_size: Any = None) -> Any:
    """A count for each element: every rank needs the counts to know where each row goes."""
    if repeats is None or not input.ndim:
        return NotImplemented
    if dim is None:
        return (
            torch.repeat_interleave(input.flatten(), repeats, 0, output_size=output_size)
            if input.ndim > 1
            else (NotImplemented if isinstance(repeats, int) else _rows(input, repeats, 0))
        )
    return NotImplemented if isinstance(repeats, int) else _rows(input, repeats, norm_dim(dim, input.ndim))


def _rows(input: Any, repeats: Any, dim: int) -> Any:
    if not isinstance(repeats, DTensor) or repeats.ndim > 1:
        return NotImplemented
    length = input.shape[dim]
    numbers: Any = repeats.expand(length) if repeats.ndim == 0 or repeats.shape[0] == 1 else repeats
    if numbers.shape[0] != length:
        return NotImplemented
    return input.index_select(dim, torch.repeat_interleave(numbers.redistribute()))
