"""Rules as sentences: `"mk, kn -> mn"` names the loops of an operation as einsum does, and the planner does the rest.

Each letter is a loop that may be sharded. `...` at the beginning of a term are batch dims, which broadcast, and `_` is
a dim that belongs to no loop and stays whole. A loop that is in no result must be summed (`sums="k"`), joined by
another reduction (`reduce={"k": "max"}`) or kept whole (`whole="k"`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from terrazzo.errors import DTensorArgumentError
from terrazzo.layout.placement import REDUCE_OPS
from terrazzo.tensor.dispatch.shapes import broadcast_shapes, dims_within
from terrazzo.tensor.dispatch.spec import Dims, Operand, Spec


@dataclass(frozen=True, slots=True)
class Loops:
    """A parsed sentence, see the module's docstring."""

    text: str
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    reduce: Mapping[str, str]
    whole: frozenset[str]
    linear: tuple[tuple[int, ...], ...]

    def spec(self, operands: Sequence[Operand], shapes: Sequence[tuple[int, ...]] | None = None) -> Spec | None:
        """The rule's answer for these operands; None if their numbers of dims or their sizes do not fit.

        `shapes` are those of the results, which are known from the loops unless a result has a dim `_`.
        """
        if len(operands) != len(self.ins):
            return None
        leads = []
        for term, operand in zip(self.ins, operands, strict=True):
            leads.append(operand.ndim - len(term.removeprefix("...")))
            if leads[-1] < 0 or (leads[-1] and not term.startswith("...")):
                return None
        try:
            batch = broadcast_shapes(*(o.shape[:n] for o, n in zip(operands, leads, strict=True)))
        except RuntimeError:
            return None
        sizes: dict[str | int, int] = dict(enumerate(batch))
        ins: list[list[str | int | None]] = []
        for term, operand, lead in zip(self.ins, operands, leads, strict=True):
            dims: list[str | int | None] = [*(dims_within(operand.shape[:lead], batch) or ())]
            for letter, n in zip(term.removeprefix("..."), operand.shape[lead:], strict=True):
                if letter != "_" and sizes.setdefault(letter, n) != n:
                    return None
                dims.append(None if letter == "_" else letter)
            ins.append(dims)
        outs: list[list[str | int | None]] = []
        for term in self.outs:
            own = [None if letter == "_" else letter for letter in term.removeprefix("...")]
            outs.append([*(range(len(batch)) if term.startswith("...") else ()), *own])
        if shapes is None:
            shapes = [tuple(sizes[loop] for loop in dims if loop is not None) for dims in outs]
        for term, dims, shape in zip(self.outs, outs, shapes, strict=True):
            known = [n if loop is None else sizes[loop] for loop, n in zip(dims, shape, strict=False)]
            if len(dims) != len(shape) or known != list(shape):
                raise DTensorArgumentError(
                    f'"{term}" in "{self.text}" is a result of {len(dims)} dims with the sizes {known}, but the '
                    f"operation returns one of shape {tuple(shape)}"
                )
        numbers = {loop: i for i, loop in enumerate(sizes)}
        return Spec(
            [_numbered(dims, numbers) for dims in ins],
            [_numbered(dims, numbers) for dims in outs],
            list(shapes),
            reduce={numbers[loop]: op for loop, op in self.reduce.items()},
            whole=frozenset(numbers[loop] for loop in self.whole),
            linear=self.linear,
        )


def _numbered(dims: Iterable[str | int | None], numbers: Mapping[str | int, int]) -> Dims:
    return tuple(None if loop is None else numbers[loop] for loop in dims)


def loops(
    text: str,
    *,
    sums: str = "",
    reduce: Mapping[str, str] | None = None,
    whole: str = "",
    linear: str | Sequence[Sequence[int]] = (),
) -> Loops:
    """Parse a sentence; raises with the sentence and what is wrong in it.

    Args:
        text: The terms of the operands, `->`, and those of the results, separated by commas.
        sums: The loops that are summed.
        reduce: Other loops that are in no result, with their reductions (`max`, ...).
        whole: Loops that are not sharded.
        linear: Where partial operands may give a partial result: `"each"` operand by itself, as in a product,
            `"together"` for all of them, as in a sum, or groups of operands by their numbers.

    >>> loops("mk, kn -> mn", sums="k").outs
    ('mn',)
    >>> loops("mk, kn -> mn")
    Traceback (most recent call last):
    terrazzo.errors.DTensorArgumentError: loop k of "mk, kn -> mn" is not in all results: say sums="k", ...
    """
    ins, arrow, outs = text.replace(" ", "").partition("->")
    parsed = tuple(ins.split(",")), tuple(outs.split(","))
    if not arrow:
        raise DTensorArgumentError(f'"{text}" has no "->" between operands and results')
    for term in (*parsed[0], *parsed[1]):
        letters = term.removeprefix("...")
        own = letters.replace("_", "")
        if any(not (c.isalpha() or c == "_") for c in letters) or len(set(own)) != len(own):
            raise DTensorArgumentError(
                f'"{term}" in "{text}" must be different letters, or "_" for a dim that is not sharded, after an '
                'optional "..." for batch dims'
            )
    known = set("".join(parsed[0])) - set("._")
    reductions = {**dict.fromkeys(sums, "sum"), **(reduce or {})}
    for letter in (*reductions, *whole, *"".join(parsed[1])):
        if letter not in known and letter not in "._":
            raise DTensorArgumentError(f'loop {letter} of "{text}" is in no operand')
    for letter, op in reductions.items():
        if op not in REDUCE_OPS:
            raise DTensorArgumentError(f'loop {letter} of "{text}" cannot be joined by {op!r}: {", ".join(REDUCE_OPS)}')
    for letter in sorted(known - set(whole) - set(reductions)):
        if any(letter not in term for term in parsed[1]):
            raise DTensorArgumentError(
                f'loop {letter} of "{text}" is not in all results: say sums="{letter}", reduce={{"{letter}": ...}} '
                f'or whole="{letter}"'
            )
    count = len(parsed[0])
    groups: Mapping[str, Sequence[Sequence[int]]]
    groups = {"each": [(i,) for i in range(count)], "together": [range(count)]}
    if isinstance(linear, str) and linear not in groups:
        raise DTensorArgumentError(f"linear must be 'each', 'together' or groups of operands, not {linear!r}")
    chosen = groups[linear] if isinstance(linear, str) else linear
    if any(not 0 <= i < count for group in chosen for i in group):
        raise DTensorArgumentError(f'"{text}" has operands 0 to {count - 1}, but linear={linear} names others')
    return Loops(text, *parsed, reductions, frozenset(whole), tuple(tuple(group) for group in chosen))
