"""Build the contents of DeepSpeed's files from a description of a run and its tensors.

Each data-parallel rank has a file of its flat partitions. The model is in one file, in the dtype of forward; in stage 3
each rank has one, with its slices of untrained parameters. Experts that ranks have divided among them have partitions
of their own, over the ranks with the same ones, and each is in a file by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Protocol

import torch

from terrazzo.checkpoint.formats.deepspeed.partitions import (
    STACK,
    Placed,
    expert_file,
    in_one_line,
    in_turns,
    layer_of,
    name_of_expert,
    numbered,
    one_by_one,
    ranks_by_experts,
    stacked,
    sub_groups,
)
from terrazzo.checkpoint.formats.source import new_file
from terrazzo.checkpoint.formats.torch_save import Instance, write_archive
from terrazzo.checkpoint.stores import Store
from terrazzo.errors import UnsupportedValueError

# The release of DeepSpeed with this layout; DeepSpeed refuses checkpoints without one.
VERSION: Final = "0.19.8"
SUB_GROUP_SIZE: Final = 1_000_000_000  # DeepSpeed's default
LARGEST_OF_EXPERTS: Final = 178_956_971  # elements of a param group
_ALIGNMENT: Final = 2  # partitions begin at even elements

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Group:
    """A param group of the optimizer.

    Attributes:
        shapes: its trained parameters, in order; if they are of experts, stacked.
        options: learning rate and the like.
        kept: the optimizer's state with an element for each of the parameter's elements.
        once: the rest of its state: the number of steps.
        parts: among how many ranks the experts are divided; 0 for other parameters.
    """

    shapes: Shapes
    options: Mapping[str, Any]
    kept: tuple[str, ...]
    once: Mapping[str, Any]
    parts: int = 0


def param_group(
    shapes: Shapes, options: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]], parts: int = 0
) -> Group:
    """A param group from the optimizer's state of each parameter: values with a shape, or plain values.

    DeepSpeed has one step count for a group: the largest of its parameters' counts. Of experts it divides groups that
    are larger than `LARGEST_OF_EXPERTS`, and finds them by name.
    """
    if parts:
        size = sum(map(prod, numbered(shapes, parts).values()))
        if size > LARGEST_OF_EXPERTS:
            raise UnsupportedValueError(
                f"a rank has {size} elements of experts in one param group, and DeepSpeed divides groups of more than "
                f"{LARGEST_OF_EXPERTS}: divide the experts among more ranks, or save without layout="
            )
        options = {**options, "name": f"ep_size_{parts}", "moe": True}
    kept: dict[str, None] = {}
    once: dict[str, Any] = {}
    for name, shape in shapes.items():
        for key, value in states.get(name, {}).items():
            if key == "step":
                once[key] = max(int(value), once.get(key, 0))
            elif not hasattr(value, "shape"):
                once.setdefault(key, value)
            elif tuple(value.shape) == tuple(shape):
                kept[key] = None
            else:
                raise UnsupportedValueError(
                    f"{name}: the optimizer's {key} has the shape {tuple(value.shape)}, but DeepSpeed's flat "
                    "partitions can only have state with the shape of the parameter"
                )
    adam = {"bias_correction": True} if "exp_avg_sq" in kept else {}  # which DeepSpeed's own needs in the loaded state
    options = {key: value for key, value in (adam | {**options}).items() if key != "params"}
    return Group(shapes, options, tuple(kept), once, parts)


def apart(
    pairs: Sequence[tuple[Shapes, Mapping[str, Any]]], parts: Mapping[str, int]
) -> list[tuple[Shapes, Mapping[str, Any], int]]:
    """Param groups with those of experts after the others, as DeepSpeed makes them; none is empty.

    Args:
        pairs: the parameters of each group, and its options.
        parts: among how many ranks the experts of a layer are divided, by `layer_of` its parameters.
    """
    found: list[tuple[Shapes, Mapping[str, Any], int]] = []
    for shapes, options in pairs:
        by_parts: dict[int, dict[str, Sequence[int]]] = {}
        for name, shape in shapes.items():
            by_parts.setdefault(parts[layer_of(name)] if STACK in name else 0, {})[name] = shape
        found += [(own, options, number) for number, own in by_parts.items()]
    return sorted(found, key=lambda group: group[2] > 0)


@dataclass(frozen=True, slots=True)
class RunLayout:
    """How a run is divided into files.

    Attributes:
        dtype: the dtype in which the model computes.
        groups: param groups with trained parameters.
        frozen: parameters that are not trained; None to leave them out.
        shared: other names of parameters, and for each the first name.
        model: the names in the model's state, in order, including other names.
        settings: the part of DeepSpeed's config that decides the layout of the optimizer.
        layers: among how many ranks the experts of each layer are divided, in order, and how many they are, by
            `layer_of` its parameters.
        data_first: whether neighbouring ranks have the same experts.
    """

    stage: int
    ranks: int
    dtype: torch.dtype
    groups: tuple[Group, ...]
    frozen: Shapes | None
    shared: Mapping[str, str]
    model: Sequence[str]
    settings: Mapping[str, Any]
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    data_first: bool = False

    def flat_groups(self) -> list[tuple[int, Shapes]]:
        """The parameters of each flat tensor, and the number of their param group."""
        found: list[tuple[int, Shapes]] = []
        for number, group in enumerate(self.groups):
            if self.stage == 3:
                size = int(self.settings.get("sub_group_size") or SUB_GROUP_SIZE)
                found += [(number, part) for part in sub_groups(group.shapes, self.ranks, size)]
            elif self.settings.get("round_robin_gradients"):
                found.append((number, in_turns(group.shapes, self.ranks)))
            else:
                found.append((number, group.shapes))
        return found

    def model_file(self, rank: int) -> str | None:
        """The name of a rank's file of model states, if it has one."""
        if self.stage == 3:
            return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        return "mp_rank_00_model_states.pt" if rank == 0 else None

    def optim_file(self, rank: int) -> str:
        """The name of a rank's file of optimizer states."""
        prefix = "bf16_" if self.dtype is torch.bfloat16 else ""
        return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def files(self) -> list[str]:
        """The names of all ranks' files."""
        models = [self.model_file(rank) for rank in range(self.ranks)]
        experts = [
            expert_file(layer, number)
            for layer, (_, count) in enumerate(self.layers.values())
            for number in range(count)
        ]
        return [*filter(None, models), *map(self.optim_file, range(self.ranks)), *experts]

    def teams(self, parts: int) -> list[range]:
        """The ranks that have the same parameters: all, or those of each part of the experts."""
        return ranks_by_experts(self.ranks, self.ranks // max(parts, 1), self.data_first)

    def own_experts(self, layer: str, rank: int) -> range:
        """The numbers of the experts of a layer that a rank writes."""
        parts, count = self.layers[layer]
        first = [team[0] for team in self.teams(parts)]
        size = count // parts
        return range(first.index(rank) * size, (first.index(rank) + 1) * size) if rank in first else range(0)

    def in_files(self, number: int, shapes: Shapes) -> Shapes:
        """Some parameters of a param group under the names that they have in a rank's files."""
        parts = self.groups[number].parts
        return numbered(shapes, parts) if parts else shapes


def expert_files(layout: RunLayout, experts: Callable[[str, range], Sequence[Any]], rank: int) -> dict[str, Any]:
    """The contents of the files of experts that a rank writes, by name.

    Args:
        experts: the rows of a stacked parameter for experts of these numbers, in the precision of forward.
    """
    files: dict[str, dict[str, Any]] = {}
    for layer, name in enumerate(layout.layers):
        own = layout.own_experts(name, rank)
        for stack in layout.model:
            if STACK in stack and layer_of(stack) == name:
                for number, row in zip(own, experts(stack, own), strict=True):
                    files.setdefault(expert_file(layer, number), {})[name_of_expert(stack, number)] = row
    return files


class Tensors(Protocol):
    """The tensors of a run. `kind` is `module`, or a key of the optimizer's state such as `exp_avg`."""

    def flat(self, kind: str, placed: Sequence[Placed], rank: int, length: int, dtype: torch.dtype) -> Any:
        """A rank's flat tensor: its runs of each parameter at their positions, zeros elsewhere."""

    def whole(self, name: str, dtype: torch.dtype | None) -> Any:
        """A value of the model's state; parameters are converted to `dtype`."""


def write_file(store: Store, name: str, value: Mapping[str, Any]) -> None:
    """Write a file as `torch.save` does, and make it durable."""
    with new_file(store, name) as file:
        write_archive(file, 0, value)


# ------------------------------------------------------------------ the optimizer


def optim_states(
    layout: RunLayout, tensors: Tensors, rank: int, scaler: Instance, clip: float, config: Mapping[str, Any]
) -> dict[str, Any]:
    """The contents of a rank's file of optimizer states."""
    flat = layout.flat_groups()
    members: list[list[int]] = [[] for _ in layout.groups]
    for index, (number, _) in enumerate(flat):
        members[number].append(index)
    param_groups = [{**group.options, "params": indices} for group, indices in zip(layout.groups, members, strict=True)]
    state = {
        "zero_stage": layout.stage,
        "loss_scaler": scaler,
        "dynamic_loss_scale": bool(scaler.attributes["dynamic"]),
        "overflow": False,
        **_cut(layout, flat, tensors, rank, param_groups),
    }
    if layout.stage < 3:
        state |= {"clip_grad": clip, "ds_version": VERSION}
    return {"optimizer_state_dict": state, "ds_config": config, "ds_version": VERSION}


def _cut(
    layout: RunLayout,
    flat: Sequence[tuple[int, Shapes]],
    tensors: Tensors,
    rank: int,
    param_groups: list[dict[str, Any]],
) -> dict[str, Any]:
    states, weights, paddings, counts, fragments = {}, [], [], [], []
    for index, (number, shapes) in enumerate(flat):
        group = layout.groups[number]
        if layout.stage == 3:
            placed = list(one_by_one(shapes.items(), layout.ranks))
            partition = lean = sum(-(-prod(shape) // layout.ranks) for shape in shapes.values())
        else:
            teams = layout.teams(group.parts)
            [team] = [team for team in teams if rank in team]
            named = layout.in_files(number, shapes)
            total = sum(map(prod, named.values()))
            partition = -(-total // (_ALIGNMENT * len(team))) * _ALIGNMENT
            lean = max(min(total - team.index(rank) * partition, partition), 0)
            line = list(in_one_line(named.items(), partition))
            placed = stacked([line] * len(teams), teams) if group.parts else line
            paddings.append(partition - lean)
            counts.append(len(team))
            fragments.append(OrderedDict(_fragments(line, team.index(rank))))
        weights.append(tensors.flat("module", placed, rank, lean, torch.float32))
        states[index] = {
            **group.once,
            **{key: tensors.flat(key, placed, rank, partition, torch.float32) for key in group.kept},
        }
    kept = {"state": states, "param_groups": param_groups}
    if layout.stage == 3:
        return {"optimizer_state_dict": kept, "fp32_flat_groups": weights, "partition_count": layout.ranks}
    return {
        "base_optimizer_state": kept,
        "single_partition_of_fp32_groups": weights,
        "group_paddings": paddings,
        "partition_count": counts,
        "param_slice_mappings": fragments,
    }


def _fragments(placed: Sequence[Placed], rank: int) -> list[tuple[str, Instance]]:
    """The positions of each parameter's elements in a rank's partition."""
    kind = ("deepspeed.utils.tensor_fragment", "fragment_address")
    return [
        (where.name, Instance(kind, {"numel": run.length, "start": run.start}))
        for where in placed
        for run in where.runs
        if run.rank == rank
    ]


def loss_scaler(state: Mapping[str, Any], fp16: Mapping[str, Any]) -> Instance:
    """DeepSpeed's loss scaler, from the state of the run's one and the config's section."""
    module = "deepspeed.runtime.fp16.loss_scaler"
    scale = float(state.get("cur_scale", 1.0))
    if not fp16.get("enabled") or fp16.get("loss_scale"):
        return Instance((module, "LossScaler"), {"cur_scale": scale, "dynamic": False})
    hysteresis = int(fp16.get("hysteresis", 2))
    attributes = {
        "cur_scale": scale,
        "dynamic": True,
        "cur_iter": int(state.get("cur_iter", 0)),
        "last_overflow_iter": int(state.get("last_overflow_iter", -1)),
        "scale_factor": 2.0,
        "scale_window": int(fp16.get("loss_scale_window", 1000)),
        "min_scale": float(fp16.get("min_loss_scale", 1.0)),
        "delayed_shift": hysteresis,
        "cur_hysteresis": int(state.get("cur_hysteresis", hysteresis)),
        "consecutive_hysteresis": bool(fp16.get("consecutive_hysteresis", False)),
        "raise_error_at_min_scale": True,
        "dtype": torch.float16,
    }
    return Instance((module, "DynamicLossScaler"), attributes)


# ------------------------------------------------------------------ the model


def model_states(layout: RunLayout, tensors: Tensors, rank: int, rest: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a rank's file of model states.

    Args:
        rest: counters, the scheduler's state, the config and the client state.
    """
    trained = {name for group in layout.groups for name in group.shapes}
    frozen = layout.frozen or {}
    module: OrderedDict[str, Any] = OrderedDict()
    for name in layout.model:
        if STACK in name:  # experts have files of their own
            continue
        parameter = layout.shared.get(name, name)
        if parameter not in trained and parameter not in frozen:
            module[name] = tensors.whole(name, None)
        elif layout.stage == 3:  # trained parameters are in the partitions
            module[name] = torch.empty(0, dtype=layout.dtype, device="cpu")
        else:
            module[name] = tensors.whole(parameter, layout.dtype)
    has_frozen = layout.stage >= 2 and layout.frozen is not None
    return {
        "module": module,
        "optimizer": None,
        "param_shapes": [_sizes(layout.in_files(*flat)) for flat in layout.flat_groups()],
        "frozen_param_shapes": _sizes(frozen) if has_frozen else None,
        "shared_params": dict(pair for names in layout.shared.items() for pair in _in_files(layout, *names)),
        "frozen_param_fragments": _frozen_fragments(layout, tensors, rank, module) if has_frozen else None,
        "data_sampler": None,
        "random_ltd": None,
        "dp_world_size": layout.ranks,
        "mp_world_size": 1,
        "ds_version": VERSION,
        **({"num_experts": [count for _, count in layout.layers.values()]} if layout.layers else {}),
        **rest,
    }


def _in_files(layout: RunLayout, other: str, first: str) -> list[tuple[str, str]]:
    """Two names of a parameter; of a stacked one, those of a rank's experts."""
    if STACK not in other:
        return [(other, first)]
    parts, count = layout.layers[layer_of(other)]
    return [(name_of_expert(other, n), name_of_expert(first, n)) for n in range(count // parts)]


def _frozen_fragments(
    layout: RunLayout, tensors: Tensors, rank: int, module: Mapping[str, Any]
) -> OrderedDict[str, Any]:
    """The parameters that are not trained: whole, or in stage 3 a rank's slice of each."""
    fragments: OrderedDict[str, Any] = OrderedDict()
    for name, shape in (layout.frozen or {}).items():
        if layout.stage < 3:
            fragments[name] = module[name]
            continue
        placed = list(one_by_one([(name, shape)], layout.ranks))
        fragments[name] = tensors.flat("module", placed, rank, -(-prod(shape) // layout.ranks), layout.dtype)
    return fragments


def _sizes(shapes: Shapes) -> OrderedDict[str, torch.Size]:
    return OrderedDict((name, torch.Size(shape)) for name, shape in shapes.items())
