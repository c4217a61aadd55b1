"""The positions of parameters' elements in DeepSpeed's flat partitions, one per data-parallel rank.

In stages 1 and 2 the trainable parameters of a param group are concatenated, padded at the end, and cut into equal
parts:

    group 0    | a a a a | a b b b | b b b . |        three ranks; `.` is padding

In stage 3 each parameter is cut by itself, and a rank's part of a group is its slices one after the other:

    rank 0     | a a b b b |         rank 1    | a a b b b |         rank 2    | a . b . . |

Experts that ranks have divided among them: DeepSpeed's files name each, and here all are one stacked tensor.

A layer's expert is in a file of its own, `layer_0_expert_3_mp_rank_00_model_states.pt`, by its number among all. In the
partitions of ZeRO stages 1 and 2 a rank has only its own experts, numbered from 0; the ranks with the same experts
share a line. Either way expert 3 is a part of the tensor `...deepspeed_experts.weight`, whose first dim counts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from math import prod
from typing import Any, Final

import torch

from terrazzo.checkpoint.formats.deepspeed.files import FileTensor, OpenFile, expert_files
from terrazzo.checkpoint.formats.stored import StoredBox
from terrazzo.checkpoint.formats.torch_archive import StoredTensor
from terrazzo.checkpoint.native.spans import strides_of
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, UnsupportedValueError
from terrazzo.layout.box import Box, boxes_of_flat_range


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


_Found = tuple[OpenFile, StoredTensor, Run]


def joined(placed: Placed, by_rank: Sequence[tuple[OpenFile, Any]]) -> FileTensor:
    """A parameter whose elements, in row-major order, are runs of the ranks' flat tensors, one after the other."""
    found: list[_Found] = []
    for run in placed.runs:
        if run.rank >= len(by_rank) or not isinstance(by_rank[run.rank][1], StoredTensor):
            raise CheckpointCorruptError(f"{placed.name}: the partition of data-parallel rank {run.rank} is missing")
        file, stored = by_rank[run.rank]
        if stored.dtype != by_rank[placed.runs[0].rank][1].dtype or len(stored.shape) != 1:
            raise CheckpointCorruptError(
                f"{placed.name}: {file.where} has it in another form than the other ranks' files"
            )
        if run.start + run.length > stored.shape[0]:
            raise CheckpointCorruptError(f"{placed.name}: the partition in {file.where} is too short")
        found.append((file, stored, run))
    dtype = found[0][1].dtype if found else torch.float32
    return FileTensor(dtype, placed.shape, partial(_rows_of, placed, found))


def _rows_of(placed: Placed, found: Sequence[_Found]) -> list[StoredBox]:
    rows, first = [], 0
    for file, stored, run in found:
        (stride,) = stored.strides
        step = stride * stored.dtype.itemsize
        at = stored.start + run.start * step
        for box in boxes_of_flat_range(placed.shape, first, first + run.length):
            strides = tuple([stride * each for each in strides_of(box.lengths)])
            part = replace(stored, start=at, shape=box.lengths, strides=strides)
            rows.append(file.archive.row(part, placed.name, box))
            at += box.numel * step
        first += run.length
    return rows


def in_one_line(
    shapes: Iterable[tuple[str, Sequence[int]]], partition: int, gaps: Iterable[int] = repeat(0)
) -> Iterator[Placed]:
    """Stages 1 and 2: the parameters of a group, in the order of the layout.

    >>> for placed in in_one_line([("a", (5,)), ("b", (2, 3))], partition=4):
    ...     print(placed.name, [(run.rank, run.start, run.length) for run in placed.runs])
    a [(0, 0, 4), (1, 0, 1)]
    b [(1, 1, 3), (2, 0, 3)]

    Args:
        partition: the number of elements of a rank's part, including padding.
        gaps: the number of unused elements after each parameter.
    """
    position = 0
    for (name, shape), gap in zip(shapes, gaps, strict=False):
        end = position + prod(shape)
        runs = []
        at = position
        while at < end:
            rank = at // partition
            length = min(end, (rank + 1) * partition) - at
            runs.append(Run(rank, at - rank * partition, length))
            at += length
        yield Placed(name, tuple(shape), tuple(runs))
        position = end + gap


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


# ------------------------------------------------------------------ experts


STACK: Final = "deepspeed_moe.experts.deepspeed_experts."
_ONE: Final = re.compile(rf"(.*{re.escape(STACK)})(\d+)\.(.+)")


def stacked_name(name: str) -> str:
    """The name of the tensor of all experts that has this parameter of one of them; else the name itself.

    >>> stacked_name("h.deepspeed_moe.experts.deepspeed_experts.3.up.weight"), stacked_name("h.3.up.weight")
    ('h.deepspeed_moe.experts.deepspeed_experts.up.weight', 'h.3.up.weight')
    """
    match = _ONE.fullmatch(name)
    return name if match is None else match[1] + match[3]


def has_experts(names: Iterable[str]) -> bool:
    """Whether some of these are parameters of one expert."""
    return any(_ONE.fullmatch(name) for name in names)


def refuse_experts(names: Iterable[str]) -> None:
    """Raise if some of these are stacked experts: only a run knows among how many ranks they are divided."""
    for name in names:
        if STACK in name:
            raise UnsupportedValueError(
                f"{name}: experts of deepspeed.moe.layer.MoE cannot be converted to DeepSpeed's layout: resume the run "
                "and save it with layout='deepspeed', or convert it to safetensors"
            )


def numbered(shapes: Mapping[str, Sequence[int]], parts: int) -> dict[str, tuple[int, ...]]:
    """The parameters of one rank's experts, by DeepSpeed's names, of stacked ones that are divided among `parts`.

    >>> for name, shape in numbered({f"{STACK}up": (4, 2), f"{STACK}down": (4, 3)}, parts=2).items():
    ...     print(name.removeprefix(STACK), shape)
    0.up (2,)
    0.down (3,)
    1.up (2,)
    1.down (3,)
    """
    layers: dict[str, list[str]] = {}
    for name in shapes:
        layers.setdefault(layer_of(name), []).append(name)
    return {
        name_of_expert(name, number): tuple(shapes[name][1:])
        for names in layers.values()
        for number in range(shapes[names[0]][0] // parts)
        for name in names
    }


def layer_of(name: str) -> str:
    """The beginning of a stacked parameter's name, which those of the same layer have."""
    return name.partition(STACK)[0]


def name_of_expert(name: str, number: int) -> str:
    """The name that a stacked parameter has as that of one expert."""
    layer, _, inside = name.partition(STACK)
    return f"{layer}{STACK}{number}.{inside}"


def expert_file(layer: int, number: int) -> str:
    """The name of the file of an expert of a layer."""
    return f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"


def ranks_by_experts(ranks: int, same: int, data_first: bool) -> list[range]:
    """The ranks that have the same experts: `same` of them, for each part of the experts in order.

    >>> [list(each) for each in ranks_by_experts(4, 2, False)], [list(each) for each in ranks_by_experts(4, 2, True)]
    ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    """
    parts = ranks // same
    if data_first:
        return [range(part * same, (part + 1) * same) for part in range(parts)]
    return [range(part, ranks, parts) for part in range(parts)]


def stacked(lines: Iterable[Iterable[Placed]], teams: Sequence[range]) -> list[Placed]:
    """The parameters of a group, those of experts stacked, from their places on each team."""
    runs: dict[str, list[tuple[Run, ...]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for line, team in zip(lines, teams, strict=True):
        own: dict[str, dict[int, tuple[Run, ...]]] = {}
        for placed in line:
            match = _ONE.fullmatch(placed.name)
            if match is None:
                raise CheckpointFormatError(f"{placed.name} is in a param group of experts, but is of none")
            name = match[1] + match[3]
            if shapes.setdefault(name, placed.shape) != placed.shape:
                raise CheckpointCorruptError(f"{placed.name}: experts differ in shape")
            here = tuple(replace(run, rank=team[run.rank]) for run in placed.runs)
            own.setdefault(name, {})[int(match[2])] = here
        for name, numbered in own.items():  # numbers are this team's; the experts of the next come after them
            runs.setdefault(name, []).extend(numbered[number] for number in sorted(numbered))
    return [
        Placed(name, (len(found), *shapes[name]), tuple(run for each in found for run in each))
        for name, found in runs.items()
    ]


def expert_tensors(folder: Place) -> dict[str, FileTensor]:
    """The parameters in the experts' files, stacked."""
    found: dict[str, dict[int, tuple[OpenFile, StoredTensor]]] = {}
    for file in expert_files(folder):
        opened = OpenFile(folder, file)
        for name, value in opened.value.items():
            match = _ONE.fullmatch(name)
            if match is None or not isinstance(value, StoredTensor):
                raise CheckpointFormatError(
                    f"{opened.where}: {name!r} is no parameter of a layer deepspeed.moe.layer.MoE"
                )
            found.setdefault(match[1] + match[3], {})[int(match[2])] = opened, value
    return {name: _stacked_files(folder, name, experts) for name, experts in found.items()}


def _stacked_files(folder: Place, name: str, experts: Mapping[int, tuple[OpenFile, StoredTensor]]) -> FileTensor:
    if sorted(experts) != list(range(len(experts))):
        raise CheckpointCorruptError(f"{folder}: of {name} there are only the experts {sorted(experts)}")
    _, first = experts[0]
    for file, stored in experts.values():
        if (stored.shape, stored.dtype) != (first.shape, first.dtype):
            raise CheckpointCorruptError(
                f"{file.where}: {name} is {stored.dtype} of shape {stored.shape}, and in another file {first.dtype} of "
                f"shape {first.shape}"
            )

    def rows() -> list[Any]:
        result = []
        for number, (file, stored) in sorted(experts.items()):
            box = Box((number, *[0] * len(stored.shape)), (1, *stored.shape))
            one = replace(stored, shape=box.lengths, strides=(prod(stored.shape), *stored.strides))
            result.append(file.archive.row(one, name, box))
        return result

    return FileTensor(first.dtype, (len(experts), *first.shape), rows)
