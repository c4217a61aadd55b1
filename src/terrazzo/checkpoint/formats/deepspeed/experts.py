"""Experts that ranks have divided among them: DeepSpeed's files name each, and here all are one stacked tensor.

A layer's expert is in a file of its own, `layer_0_expert_3_mp_rank_00_model_states.pt`, by its number among all. In the
partitions of ZeRO stages 1 and 2 a rank has only its own experts, numbered from 0; the ranks with the same experts
share a line. Either way expert 3 is a part of the tensor `...deepspeed_experts.weight`, whose first dim counts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

from terrazzo.checkpoint.formats.deepspeed.files import FileTensor, OpenFile, expert_files
from terrazzo.checkpoint.formats.deepspeed.partitions import Placed, Run
from terrazzo.checkpoint.formats.torch_archive import StoredTensor
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, UnsupportedValueError
from terrazzo.layout.box import Box

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


def stacked(line: Callable[[int], Iterable[Placed]], teams: Sequence[range]) -> list[Placed]:
    """The parameters of a group, those of experts stacked; `line` places them for a team, from its first rank."""
    runs: dict[str, list[tuple[Run, ...]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for team in teams:
        own: dict[str, dict[int, tuple[Run, ...]]] = {}
        for placed in line(team[0]):
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
