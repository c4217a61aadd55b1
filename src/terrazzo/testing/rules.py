"""`check_rule`: is the sharding rule of an operation right, and does it miss a way to shard?

No ranks are needed. What several ranks would compute is computed in one process, on the parts that each would have, and
put together as the rule says; one device says what must come out. Missing ways are found by trying all placements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from terrazzo.errors import DTensorArgumentError
from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.layout.chunking import chunk_sizes
from terrazzo.layout.drawing import Shown
from terrazzo.tensor.dispatch.candidates import candidates_of
from terrazzo.tensor.dispatch.names import canonical_name
from terrazzo.tensor.dispatch.overrides import OVERRIDES, Decomposed
from terrazzo.tensor.dispatch.plain import describe
from terrazzo.tensor.dispatch.spec import Chosen, Spec
from terrazzo.tensor.dispatch.structure import map_tensors
from terrazzo.tensor.dtensor import wrap
from terrazzo.tensor.ops.table import apply_rule, operation

_R, _SUM = Replicate(), Partial()
_WITH_TERMS = (torch.float32, torch.float64, torch.complex64, torch.complex128)  # others round too much to compare
_REDUCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "avg": torch.mean,
    "product": torch.prod,
    "max": torch.amax,
    "min": torch.amin,
}
_Way = tuple[tuple[Placement, ...], tuple[Placement, ...]]


@dataclass(frozen=True, slots=True, repr=False)
class RuleReport(Shown):
    """What `check_rule` found; each entry is placements of the operands and of the results, as in `explain`."""

    right: tuple[str, ...]
    """What the rule allows, and what gives the results of one device."""
    wrong: tuple[str, ...]
    """What the rule allows, but gives other results."""
    missing: tuple[str, ...]
    """What would give the results of one device without communication, but the rule does not allow."""

    def __str__(self) -> str:
        parts = (("right", self.right), ("wrong", self.wrong), ("missing", self.missing))
        return "\n".join(f"{name}: {', '.join(ways) or 'none'}" for name, ways in parts)


@dataclass(frozen=True)
class _Rank:
    """The mesh of one dim as one of its ranks sees it."""

    shape: tuple[int, ...]
    rank: int
    ndim: int = 1
    device_type: str = "cpu"

    def get_coordinate(self) -> list[int]:
        return [self.rank]


def check_rule(
    function: Callable[..., Any], *args: Any, ranks: int = 2, missing_ok: bool = False, **kwargs: Any
) -> RuleReport:
    """Compare the sharding rule of `function` with one device, for a call with these plain tensors.

    Raises AssertionError with what is wrong or missing. A rule is wrong if the parts that it lets ranks compute do not
    make up the result. It misses a way to shard if such parts do, but the rule would communicate first.

    Args:
        function: An operator or function, as a program calls it.
        args: The arguments; pass random tensors, so that no result is right by chance, with dims that are longer than
            `ranks`. Repeat the check with the options that matter.
        ranks: How many ranks to compute.
        missing_ok: Do not raise for what is missing.
        kwargs: Keyword arguments.

    >>> check_rule(torch.mm, torch.randn(4, 6), torch.randn(6, 5)).right
    ('P(sum) R -> P(sum)', 'R P(sum) -> P(sum)', 'R R -> R', 'R S(1) -> S(1)', 'S(0) R -> S(0)', 'S(1) S(0) -> P(sum)')
    """
    check = _Check(function, args, kwargs, ranks)
    allowed = check.allowed()
    right = [way for way in allowed if check.holds(*way)]
    wrong = [way for way in allowed if way not in right]
    known = {ins for ins, _ in allowed}
    missing = [way for way in check.possible() if way[0] not in known]
    report = RuleReport(*(tuple(sorted(map(_shown, ways))) for ways in (right, wrong, missing)))
    name = canonical_name(function)[0]
    if not allowed:
        if function not in OVERRIDES and (how := operation(name).how) != "rule":
            raise AssertionError(f"{name} has no rule ({how}): register_loops gives it one")
        shapes = ", ".join(str(tuple(t.shape)) for t in check.tensors)
        raise AssertionError(f"the rule of {name} does not fit tensors of shape {shapes}: they would be gathered first")
    found = [f"wrong: {way}, whose parts do not make up the result of one device" for way in report.wrong]
    found += [f"missing: {way}" for way in report.missing if not missing_ok]
    if found:
        raise AssertionError(f"the rule of {name} for {check.operands} operands:\n  " + "\n  ".join(found))
    return report


class _Check:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int) -> None:
        self.function, self.args, self.kwargs, self.ranks = function, args, kwargs, ranks
        self.meshes = [_Rank((ranks,), rank) for rank in range(ranks)]
        self.tensors: list[torch.Tensor] = []
        map_tensors((args, kwargs), self.tensors.append)
        self.operands = len(self.tensors)
        if not self.tensors:
            raise DTensorArgumentError("check_rule needs plain tensors among the arguments")
        self.random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.expected = _tensors(function(*args, **kwargs))
        self.options = [
            [_R, *(Shard(d) for d, n in enumerate(t.shape) if n >= ranks), *([_SUM] if t.dtype in _WITH_TERMS else [])]
            for t in self.tensors
        ]

    def allowed(self) -> list[_Way]:
        """What the rule allows, whatever the operands' placements are."""
        found: dict[_Way, None] = {}
        for placed in product(*self.options):
            spec, layouts = self.spec(placed)
            if spec is not None:
                for candidate in candidates_of(spec, layouts, 0, (self.ranks,), {}, (), None):
                    found.setdefault((candidate.ins, candidate.outs))
        return list(found)

    def possible(self) -> list[_Way]:
        """The placements of operands of which each rank's result is a part of the result."""
        found: list[_Way] = []
        for ins in product(*self.options):
            try:
                parts = self.run([self.function] * self.ranks, ins)
            except Exception:  # of the operation, on such parts
                continue
            outs = [self.fitting(j, [part[j] for part in parts]) for j in range(len(self.expected))]
            if all(out is not None for out in outs):
                found.append((ins, tuple(out for out in outs if out is not None)))
        return found

    def holds(self, ins: tuple[Placement, ...], outs: tuple[Placement, ...]) -> bool:
        """Whether the ranks' results, put together as `outs` says, are those of one device."""
        spec, _ = self.spec(ins)
        assert spec is not None
        functions = [self.function] * self.ranks if spec.localize is None else self.localized(spec, ins, outs)
        try:
            parts = self.run(functions, ins)
        except Exception as error:
            raise AssertionError(f"wrong: {_shown((ins, outs))}, of whose parts the operation says: {error}") from error
        return all(self.fits(j, [part[j] for part in parts], out) for j, out in enumerate(outs))

    def localized(
        self, spec: Spec, ins: tuple[Placement, ...], outs: tuple[Placement, ...]
    ) -> list[Callable[..., Any]]:
        """What each rank runs where the rule has local functions of its own."""
        factors = {dims[p.dim] for dims, p in zip(spec.ins, ins, strict=True) if isinstance(p, Shard)}
        functions: list[Callable[..., Any]] = []
        for mesh in self.meshes:
            layouts = tuple(Layout.of(mesh, (p,), t.shape) for p, t in zip(ins, self.tensors, strict=True))
            results = tuple(Layout.of(mesh, (p,), shape) for p, shape in zip(outs, spec.shapes, strict=True))
            assert spec.localize is not None
            local = spec.localize(Chosen(layouts, results, {f: (0,) for f in factors if f is not None}))
            functions.append(self.function if local is None else _calling(local, self.function))
        return functions

    def spec(self, placed: Sequence[Placement]) -> tuple[Spec | None, list[Layout]]:
        """What the rule says about operands that are placed so."""
        layouts = [Layout.of(self.meshes[0], (p,), t.shape) for p, t in zip(placed, self.tensors, strict=True)]
        pairs = zip(self.tensors, layouts, strict=True)
        made = iter([wrap(t.new_zeros(layout.local_shape), layout) for t, layout in pairs])
        args, kwargs = map_tensors((self.args, self.kwargs), lambda _: next(made))
        name, inplace = canonical_name(self.function)
        call, loc, kw = describe(name, inplace, self.function, args, kwargs)
        override = OVERRIDES.get(self.function)
        if isinstance(override, Decomposed):
            raise DTensorArgumentError(f"{name} has a decomposition and no rule: check the operations in it")
        spec = apply_rule(call) if override is None else override(call, args, kwargs)
        return None if spec is None else spec.for_locals(loc, kw), layouts

    def run(self, functions: Sequence[Callable[..., Any]], ins: Sequence[Placement]) -> list[list[torch.Tensor]]:
        """The results of each rank."""
        cut = [self.parts(t, p) for t, p in zip(self.tensors, ins, strict=True)]
        results = []
        for rank, function in enumerate(functions):
            args, kwargs = map_tensors((self.args, self.kwargs), _next_of(iter([parts[rank] for parts in cut])))
            with torch.no_grad():
                results.append(_tensors(function(*args, **kwargs)))
        return results

    def parts(self, whole: torch.Tensor, placement: Placement) -> list[torch.Tensor]:
        """What each rank has of a tensor."""
        if isinstance(placement, Shard):
            return list(whole.split(list(chunk_sizes(whole.shape[placement.dim], self.ranks)), placement.dim))
        if not isinstance(placement, Partial):
            return [whole] * self.ranks
        others = [torch.rand(whole.shape, generator=self.random).to(whole) + 0.5 for _ in range(self.ranks - 1)]
        op = placement.reduce_op
        if op in ("max", "min"):
            return [whole, *(whole - other if op == "max" else whole + other for other in others)]
        if op == "product":
            return [whole / torch.stack(others).prod(0), *others]
        return [whole * (self.ranks if op == "avg" else 1) - sum(others), *others]

    def fitting(self, j: int, parts: list[torch.Tensor]) -> Placement | None:
        """A placement of which these are the ranks' parts of result `j`."""
        options = [_R, *(Shard(d) for d in range(self.expected[j].ndim)), _SUM, Partial("max"), Partial("min")]
        return next((p for p in options if self.fits(j, parts, p)), None)

    def fits(self, j: int, parts: list[torch.Tensor], placement: Placement) -> bool:
        expected = self.expected[j]
        if isinstance(placement, Shard):
            sizes = chunk_sizes(expected.shape[placement.dim], self.ranks)
            shapes = [[*expected.shape[: placement.dim], n, *expected.shape[placement.dim + 1 :]] for n in sizes]
            return [list(part.shape) for part in parts] == shapes and _close(torch.cat(parts, placement.dim), expected)
        if any(part.shape != expected.shape for part in parts):
            return False
        if isinstance(placement, Partial):
            op = placement.reduce_op
            if expected.dtype not in _WITH_TERMS or (expected.is_complex() and op in ("max", "min")):
                return False
            return _close(_REDUCTIONS[op](torch.stack(parts), 0), expected)
        return all(_close(part, expected) for part in parts)


def _calling(local: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: local(function, list(args), kwargs)


def _next_of(tensors: Iterator[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: next(tensors)


def _tensors(result: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(result, found.append)
    return found


def _close(mine: torch.Tensor, expected: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(mine, expected, equal_nan=True)
    except AssertionError:
        return False
    return True


def _shown(way: _Way) -> str:
    ins, outs = (" ".join(map(str, placed)) for placed in way)
    return f"{ins} -> {outs}"
