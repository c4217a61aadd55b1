"""Where DeepSpeed puts the elements of a parameter: flat partitions, one per data-parallel rank.

Stages 1 and 2 lay the trainable parameters of a param group one after the other, pad the end, and cut the whole into
equal parts:

    group 0    | a a a a | a b b b | b b b . |        three ranks; `.` is padding

Stage 3 cuts each parameter by itself, and a rank's part of a group is its slices one after the other:

    rank 0     | a a b b b |         rank 1    | a a b b b |         rank 2    | a . b . . |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of a parameter that lie together: `length` of them from `start` on in a rank's flat tensor."""

    rank: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A parameter and the runs, in order, that it is made of."""

    name: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]


def in_one_line(
    shapes: Iterable[tuple[str, Sequence[int]]], partition: int, paddings: Sequence[int] | None = None
) -> Iterator[Placed]:
    """Stages 1 and 2: the parameters of a group, in the order of the layout.

    >>> for placed in in_one_line([("a", (5,)), ("b", (2, 3))], partition=4):
    ...     print(placed.name, [(run.rank, run.start, run.length) for run in placed.runs])
    a [(0, 0, 4), (1, 0, 1)]
    b [(1, 1, 3), (2, 0, 3)]

    Args:
        partition: the elements of a rank's part, padding included.
        paddings: how many elements follow each parameter unused.
    """
    position = 0
    for number, (name, shape) in enumerate(shapes):
        end = position + prod(shape)
        runs = []
        at = position
        while at < end:
            rank = at // partition
            length = min(end, (rank + 1) * partition) - at
            runs.append(Run(rank, at - rank * partition, length))
            at += length
        yield Placed(name, tuple(shape), tuple(runs))
        position = end + (paddings[number] if paddings is not None else 0)


def one_by_one(shapes: Iterable[tuple[str, Sequence[int]]], ranks: int) -> Iterator[Placed]:
    """Stage 3: the parameters of a sub-group, in the order of the layout.

    >>> for placed in one_by_one([("a", (5,)), ("b", (2, 2))], ranks=3):
    ...     print(placed.name, [(run.rank, run.start, run.length) for run in placed.runs])
    a [(0, 0, 2), (1, 0, 2), (2, 0, 1)]
    b [(0, 2, 2), (1, 2, 2)]
    """
    position = 0
    for name, shape in shapes:
        total = prod(shape)
        part = -(-total // ranks)
        lengths = [max(min(part, total - rank * part), 0) for rank in range(ranks)]
        yield Placed(
            name, tuple(shape), tuple(Run(rank, position, length) for rank, length in enumerate(lengths) if length)
        )
        position += part
