"""What a sharding rule says about one call, as data.

A rule sees a `Call`: the function's canonical name, its arguments with every DTensor replaced by an `Operand` (shape
and placements only: rules are the same on every rank and for every dtype). It answers with a `Spec`, or None when
it does not cover the call.

A `Spec` maps each dimension of each operand and output to a *factor*, a loop of the computation: `mm` is
`ins=[(0, 1), (1, 2)], outs=[(0, 2)]`. Sharding a factor shards every dimension that it names.

- A factor in no output must be in `reduce`, with the reduction that joins the partial results.
- A factor in `whole` cannot be sharded; None stands for a dimension with its own factor that cannot.
- A factor in `even` can only be sharded when every size given for it divides by the number of ranks (views that split
  or join dims: the dim's size before and after).
- `linear` lists groups of operands in which the function is linear together: partial operands give a partial result.
  With `moves_only` the function only moves elements, and terms of any reduction may pass.
- `addends` lists operands that are added to the result: where the other operands are partial, they are made partial,
  too, so that they are added once.
- `unread` lists operands of which only shape, dtype or device are used: they are never redistributed. Their shards are
  still a reason to shard a factor.
- `keeps_terms` lets terms pass through a linear function also where its result is larger than its input.
- `acceptable` replaces all of this by a list of what may happen along one mesh dim; the factors then mean nothing.
- With `never_empty` the function is not called for an empty shard, which many functions refuse or cannot differentiate
  twice: a rank that holds no row along some dim gives it one row of zeros there, and drops what it makes of that row.
  Only for functions that give finite numbers for zeros, also as gradients of their other operands (norms do not).
- `localize` makes the function that runs on the local tensors when that is not the caller's own function with the
  caller's own arguments (for example when a shape argument must become the local shape).
- `joined` makes, where the outputs would be partial, a function that reduces them at once; see `Joined`.
- `guard` says, from the local tensors of a call, whether the plan applies, where that depends on dtypes (a rule does
  not see dtypes). Other calls use `otherwise`, if given, or run as calls that the rule does not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch

from terrazzo.layout import Layout, Placement

Dims: TypeAlias = tuple[int | None, ...]
LocalFunction: TypeAlias = Callable[[Any, list[Any], dict[str, Any]], Any]
"""Runs on the locals: (caller's function, local args, local kwargs) -> result."""


@dataclass(frozen=True, slots=True)
class OneArgument:
    """A local function of the most common form: `function(local, argument)`, called without another Python frame.

    `otherwise` is called where it raises RuntimeError.
    """

    function: Callable[[Any, Any], Any]
    argument: Any
    otherwise: Callable[[Any, Any], Any] | None = None

    def __call__(self, func: Any, loc: list[Any], kw: dict[str, Any]) -> Any:
        if self.otherwise is None:
            return self.function(loc[0], self.argument)
        try:
            return self.function(loc[0], self.argument)
        except RuntimeError:
            return self.otherwise(loc[0], self.argument)


HALF = frozenset((torch.float16, torch.bfloat16))
"""Dtypes that PyTorch does not accumulate in: on one device they are summed in float32 and rounded once."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A local function that communicates: it reduces what the ranks hold, and returns the result on all of them.

    The outputs are then not partial: where the plan says Partial they are replicated. With `half_only` this is done for
    results of a half type only, which is decided from the dtypes of the local tensors; other results stay partial.
    """

    run: LocalFunction
    half_only: bool = True

    def applies(self, loc: Sequence[Any], kw: Mapping[str, Any]) -> bool:
        if not self.half_only:
            return True
        if not kw and loc[0].dtype not in HALF:
            return False
        return result_type(loc, kw) in HALF


def result_type(loc: Sequence[Any], kw: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that `dtype=` asks for, or else the promoted dtype of the tensor arguments."""
    found: torch.dtype | None = kw.get("dtype")
    if found is None:
        for value in (*loc, *kw.values()):
            if isinstance(value, torch.Tensor):
                found = value.dtype if found is None else torch.promote_types(found, value.dtype)
    return found


Static: TypeAlias = Any
"""As the annotation of a rule's argument: it is no DTensor, nor a list of some."""
Ints: TypeAlias = int | Sequence[int] | None
"""Dims, as arguments name them: one, several, or by None all."""


@dataclass(eq=False, repr=False, slots=True)
class Operand:
    """A DTensor argument in the form that rules get."""

    layout: Layout
    path: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def ndim(self) -> int:
        return self.layout.ndim

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.layout.placements

    @property
    def numel(self) -> int:
        return prod(self.layout.shape)

    def dim(self) -> int:
        return self.layout.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.layout.shape if dim is None else self.layout.shape[dim]

    def __repr__(self) -> str:
        return f"Operand({self.layout})"


@dataclass(slots=True)
class Call:
    """One call: the canonical name (without the in-place underscore), and what was passed."""

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: list[Operand]
    inplace: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the planner chose: the layouts that operands are redistributed to, and those of the outputs."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    sharded: Mapping[int, tuple[int, ...]]
    """Factor -> the mesh dims that shard it, outermost first."""


@dataclass(frozen=True, slots=True)
class Acceptable:
    """One way to run a call along one mesh dim: placements of the operands and the resulting ones of the outputs."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]


@dataclass(slots=True)
class Spec:
    """A rule's answer; see the module docstring."""

    ins: Sequence[Dims]
    outs: Sequence[Dims]
    shapes: Sequence[tuple[int, ...]]
    reduce: Mapping[int, str] = field(default_factory=dict)
    whole: frozenset[int] = frozenset()
    even: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    linear: Sequence[tuple[int, ...]] = ()
    moves_only: bool = False
    addends: frozenset[int] = frozenset()
    localize: Callable[[Chosen], LocalFunction | None] | None = None
    joined: Callable[[Chosen], Joined] | None = None
    is_view: bool | None = None
    """None: as the operator's schema says."""
    acceptable: Sequence[Acceptable] = ()
    unread: frozenset[int] = frozenset()
    keeps_terms: bool = False
    never_empty: bool = False
    guard: Callable[[Sequence[Any], Mapping[str, Any]], bool] | None = None
    otherwise: Spec | None = None

    def for_locals(self, loc: Sequence[Any], kw: Mapping[str, Any]) -> Spec | None:
        """The spec for a call with these local tensors: this one, or `otherwise` where the guard refuses it."""
        return self if self.guard is None or self.guard(loc, kw) else self.otherwise


def within(
    input: Operand, dims: Collection[int] = (), shape: Sequence[int] | None = None, outs: int = 1, **said: Any
) -> Spec:
    """The spec of a function of one tensor that works within `dims`, which stay whole; every other dim is a loop.

    `shape` is that of each of its results, by default the tensor's own; `said` is what else a `Spec` may say.
    """
    loops = tuple(None if d in dims else d for d in range(input.ndim))
    return Spec([loops], [loops] * outs, [tuple(input.shape if shape is None else shape)] * outs, **said)
