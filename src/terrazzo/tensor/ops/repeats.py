"""Elements that are joined, repeated or moved along dims that stay whole; other dims may be sharded, and terms pass.

Where partial tensors are joined, a replicated one becomes a term on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terrazzo.tensor.dispatch.spec import Call, Chosen, Dims, LocalFunction, Operand, Spec, within
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
    call: Call, input: Operand, repeats: int, dim: int | None = None, *, output_size: Any = None
) -> Spec | None:
    """Every element equally often; the repeated dim may be sharded if the cuts fall between the same elements."""
    if repeats < 1 or not input.ndim or (dim is None and input.ndim > 1) or output_size is not None:
        return None
    d = norm_dim(dim or 0, input.ndim)
    n = input.shape[d]
    shape = [n * repeats if i == d else m for i, m in enumerate(input.shape)]
    return within(input, (), shape, linear=[(0,)], moves_only=True, even={d: (n, n * repeats)})


@decomposition("repeat_interleave")
def repeat_interleave_each(input: Any, repeats: Any = None, dim: Any = None, *, output_size: Any = None) -> Any:
    """A count for each element: every rank needs the counts to know where each row goes."""
    if repeats is None or not input.ndim:
        return NotImplemented
    if dim is None and input.ndim > 1:
        return torch.repeat_interleave(input.flatten(), repeats, 0, output_size=output_size)
    if not isinstance(repeats, DTensor) or repeats.ndim > 1:
        return NotImplemented
    dim = norm_dim(dim or 0, input.ndim)
    length = input.shape[dim]
    numbers: Any = repeats.expand(length) if repeats.ndim == 0 or repeats.shape[0] == 1 else repeats
    if numbers.shape[0] != length:
        return NotImplemented
    return input.index_select(dim, torch.repeat_interleave(numbers.redistribute()))


# ------------------------------------------------------------------ flip, roll, rot90


def _within(input: Operand, dims: Any) -> Spec | None:
    named = [dims] if isinstance(dims, int) else dims
    if not input.ndim or not isinstance(named, (list, tuple)) or not all(isinstance(d, int) for d in named):
        return None
    return within(input, [norm_dim(d, input.ndim) for d in named], linear=[(0,)], moves_only=True)


@rule("flip")
def flip(call: Call, input: Operand, *dims: Any, **named: Any) -> Spec | None:
    if "dims" in named:
        dims = (named.pop("dims"),)
    return None if named else _within(input, dims[0] if len(dims) == 1 else dims)


@rule("roll")
def roll(call: Call, input: Operand, shifts: Any, dims: Any = None) -> Spec | None:
    """Without `dims` the flattened tensor is rolled."""
    return _within(input, tuple(range(input.ndim)) if dims is None or dims == () or dims == [] else dims)


@decomposition("rot90")
def rot90(input: Any, k: int = 1, dims: Any = (0, 1)) -> Any:
    if len(dims) != 2 or input.ndim < 2 or norm_dim(dims[0], input.ndim) == norm_dim(dims[1], input.ndim):
        return NotImplemented  # invalid arguments: the function itself raises the error
    first, second = dims
    if k % 4 == 0:
        return input.clone(memory_format=torch.contiguous_format)
    if k % 4 == 2:
        return input.flip((first, second))
    return input.flip(second if k % 4 == 1 else first).transpose(first, second)


# ------------------------------------------------------------------ cat, stack


@rule("cat")
def cat(call: Call, tensors: Sequence[Operand], dim: int = 0) -> Spec | None:
    first = tensors[0]
    if any(t.ndim != first.ndim or not t.ndim for t in tensors):
        return None
    d = norm_dim(dim, first.ndim)
    if any(t.shape[:d] != first.shape[:d] or t.shape[d + 1 :] != first.shape[d + 1 :] for t in tensors):
        return None
    dims: Dims = tuple(None if i == d else i for i in range(first.ndim))
    shape = tuple(sum(t.shape[d] for t in tensors) if i == d else n for i, n in enumerate(first.shape))

    def localize(chosen: Chosen) -> LocalFunction | None:
        if all(min(layout.local_shape, default=1) for layout in chosen.ins):
            return None
        # torch.cat drops 1-D tensors without elements; an empty shard must be kept, for its other dims.
        return lambda func, loc, kw: torch.cat(
            [t.unsqueeze(-1) for t in (loc[0] if loc else kw["tensors"])], d
        ).squeeze(-1)

    return Spec(
        [dims] * len(tensors),
        [dims],
        [shape],
        linear=[tuple(range(len(tensors)))],
        moves_only=True,
        localize=localize,
        keeps_terms=True,
    )


@rule("stack")
def stack(call: Call, tensors: Sequence[Operand], dim: int = 0) -> Spec | None:
    first = tensors[0]
    if any(t.shape != first.shape for t in tensors):
        return None
    d = norm_dim(dim, first.ndim + 1)
    dims = tuple(range(first.ndim))
    out = (*dims[:d], None, *dims[d:])
    shape = (*first.shape[:d], len(tensors), *first.shape[d:])
    everything = tuple(range(len(tensors)))
    return Spec([dims] * len(tensors), [out], [shape], linear=[everything], moves_only=True, keeps_terms=True)
