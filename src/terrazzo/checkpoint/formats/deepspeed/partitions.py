"""The positions of parameters' elements in DeepSpeed's flat partitions, one per data-parallel rank.

In stages 1 and 2 the trainable parameters of a param group are concatenated, padded at the end, and cut into equal
parts:

    group 0    | a a a a | a b b b | b b b . |        three ranks; `.` is padding

In stage 3 each parameter is cut by itself, and a rank's part of a group is its slices one after the other:

    rank 0     | a a b b b |         rank 1    | a a b b b |         rank 2    | a . b . . |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a parameter: `length` elements from `start` on in a rank's flat tensor."""

    rank: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A parameter, and its runs in order."""

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
        partition: the number of elements of a rank's part, including padding.
        paddings: the number of unused elements after each parameter.
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


def sub_groups(shapes: Mapping[str, Sequence[int]], ranks: int, size: int) -> list[dict[str, Sequence[int]]]:
    """Stage 3: the parameters of a param group, by flat tensor; the next one begins when a rank has `size` elements.

    >>> sub_groups({"a": (5,), "b": (2, 2), "c": (1,)}, ranks=2, size=4)
    [{'a': (5,), 'b': (2, 2)}, {'c': (1,)}]
    """
    groups: list[dict[str, Sequence[int]]] = []
    room = 0
    for name, shape in shapes.items():
        if room <= 0:
            groups.append({})
            room = size
        groups[-1][name] = shape
        room -= -(-prod(shape) // ranks)
    return groups


def in_turns(shapes: Mapping[str, Sequence[int]], ranks: int) -> dict[str, Sequence[int]]:
    """The order of `round_robin_gradients`: the parameters whose number is 0 modulo the ranks, then 1, ...

    >>> list(in_turns({"a": (1,), "b": (1,), "c": (1,)}, ranks=2))
    ['a', 'c', 'b']
    """
    names = list(shapes)
    return {name: shapes[name] for first in range(ranks) for name in names[first::ranks]}


def out_of_turns(names: Sequence[str], ranks: int) -> list[str]:
    """The inverse of `in_turns`.

    >>> out_of_turns(["a", "c", "b"], ranks=2)
    ['a', 'b', 'c']
    """
    places = [place for first in range(ranks) for place in range(first, len(names), ranks)]
    return [name for _, name in sorted(zip(places, names, strict=True))]
