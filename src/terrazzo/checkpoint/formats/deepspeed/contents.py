"""What a DeepSpeed checkpoint holds, under the names that terrazzo's engine gives the same things.

module.<name>                    float32 weights, from the optimizer's partitions; others as the model has them
optimizer.state.<name>.<key>     the optimizer's state, by parameter instead of by partition
optimizer.param_groups.<i>.<key>
global_steps, lr_scheduler.<key>, ...  and the client state, under its own names
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from terrazzo.checkpoint.formats.deepspeed.files import Files, JoinedTensor, OpenFile, Part, find_files
from terrazzo.checkpoint.formats.deepspeed.partitions import Placed, in_one_line, one_by_one
from terrazzo.checkpoint.formats.torch_archive import StoredTensor, replace_tensors
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError

# Of the model's files: what is taken apart here, and so is not handed out as it is.
_TAKEN_APART: Final = frozenset(
    {
        "module",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "lr_scheduler",
        "checkpoint_parallel_dimensions",
    }
)


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor as it lies in one file."""

    file: OpenFile
    stored: StoredTensor


@dataclass
class Contents:
    """Everything in a checkpoint, by flat name.

    Attributes:
        values: a `JoinedTensor`, a `WholeTensor`, a tensor, or any other value.
        paths: where in a nested state dict each name belongs.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def add(self, path: tuple[Any, ...], value: Any) -> None:
        """Put a value at a path."""
        name = ".".join(map(str, path))
        if isinstance(value, JoinedTensor):
            value.check(name)
        self.values[name] = value
        self.paths[name] = path


def read_contents(folder: Path) -> Contents:
    """The contents of the checkpoint in a tag's folder."""
    files = find_files(folder)
    models = [OpenFile(folder, name) for name in files.model]
    optims = [OpenFile(folder, name) for name in files.optim]
    contents = Contents()
    partitions = _Partitions.of(models, optims) if optims else None
    _add_model(contents, models, partitions)
    if partitions is not None:
        _add_optimizer(contents, partitions)
    _add_rest(contents, models[0])
    _check_ranks(folder, files, models[0].value)
    return contents


def _check_ranks(folder: Path, files: Files, model: Mapping[str, Any]) -> None:
    saved = model.get("dp_world_size")
    if files.optim and saved is not None and saved != len(files.optim):
        raise CheckpointCorruptError(
            f"{folder}: saved by {saved} data-parallel ranks, but there are optimizer states of {len(files.optim)}"
        )


# ------------------------------------------------------------------ partitions


@dataclass(frozen=True)
class _Group:
    """Parameters that share flat tensors: their layout, their float32 weights, and what the optimizer keeps of them."""

    placed: tuple[Placed, ...]
    weights: tuple[tuple[OpenFile, StoredTensor], ...]  # by rank
    states: tuple[Mapping[str, Any], ...]  # by rank
    param_group: int


@dataclass(frozen=True)
class _Partitions:
    optims: Sequence[OpenFile]
    groups: tuple[_Group, ...]
    param_groups: Sequence[Mapping[str, Any]]
    scaler: Mapping[str, Any] | None

    @staticmethod
    def of(models: Sequence[OpenFile], optims: Sequence[OpenFile]) -> _Partitions:
        shapes = models[0].value.get("param_shapes")
        states: list[Any] = [file.value.get("optimizer_state_dict") for file in optims]
        if not isinstance(shapes, list) or not all(isinstance(state, dict) for state in states):
            raise CheckpointFormatError(f"{models[0].where}: no param_shapes, or no optimizer states of ZeRO")
        build = _cut_one_by_one if states[0].get("zero_stage") == 3 else _cut_in_one_line
        groups, param_groups = build(shapes, optims, states)
        return _Partitions(optims, tuple(groups), param_groups, states[0].get("loss_scaler"))


def _cut_in_one_line(
    shapes: Sequence[Mapping[str, Any]], optims: Sequence[OpenFile], states: Sequence[Mapping[str, Any]]
) -> tuple[list[_Group], Sequence[Mapping[str, Any]]]:
    first = states[0]
    base = [state["base_optimizer_state"] for state in states]
    elastic = not isinstance(base[0], dict)
    groups = []
    for number, named in enumerate(shapes):
        weights = [state["single_partition_of_fp32_groups"][number] for state in states]
        # Where the padding has been taken off the weights, it has to be counted.
        padding = first["group_paddings"][number] if "zero_stage" in first else 0
        between = first.get("param_alignment_paddings")
        placed = in_one_line(named.items(), weights[0].shape[0] + padding, None if not between else between[number])
        kept = [part[number] if elastic else part["state"].get(number, {}) for part in base]
        groups.append(_Group(tuple(placed), tuple(zip(optims, weights, strict=True)), tuple(kept), number))
    if elastic:
        step = first.get("base_optimizer_state_step")
        return groups, [{} if step is None else {"step": step} for _ in shapes]
    return groups, base[0]["param_groups"]


def _cut_one_by_one(
    shapes: Sequence[Mapping[str, Any]], optims: Sequence[OpenFile], states: Sequence[Mapping[str, Any]]
) -> tuple[list[_Group], Sequence[Mapping[str, Any]]]:
    param_groups = states[0]["optimizer_state_dict"]["param_groups"]
    of_group = {index: number for number, group in enumerate(param_groups) for index in group["params"]}
    groups = []
    for number, named in enumerate(shapes):
        weights = [state["fp32_flat_groups"][number] for state in states]
        placed = one_by_one(named.items(), len(optims))
        kept = [state["optimizer_state_dict"]["state"].get(number, {}) for state in states]
        groups.append(_Group(tuple(placed), tuple(zip(optims, weights, strict=True)), tuple(kept), of_group[number]))
    return groups, param_groups


def _joined(placed: Placed, by_rank: Sequence[tuple[OpenFile, Any]]) -> JoinedTensor:
    parts = []
    for run in placed.runs:
        if run.rank >= len(by_rank) or not isinstance(by_rank[run.rank][1], StoredTensor):
            raise CheckpointCorruptError(f"{placed.name}: the partition of data-parallel rank {run.rank} is missing")
        file, stored = by_rank[run.rank]
        parts.append(Part(file, stored, run.start, run.length))
    dtype = parts[0].stored.dtype if parts else torch.float32
    return JoinedTensor(dtype, placed.shape, tuple(parts))


# ------------------------------------------------------------------ the model


def _add_model(contents: Contents, models: Sequence[OpenFile], partitions: _Partitions | None) -> None:
    model = models[0].value
    if model.get("module") is None:
        raise CheckpointFormatError(f"{models[0].where}: the model is in other files, which is not supported")
    shared = model.get("shared_params") or {}
    trained: set[str] = set()
    for group in partitions.groups if partitions is not None else ():
        for placed in group.placed:
            contents.add(("module", placed.name), _joined(placed, group.weights))
            trained.add(placed.name)
    fragments = dict(_frozen(models))
    for name, tensor in fragments.items():
        contents.add(("module", name), tensor)
    for name, value in model["module"].items():
        if name in trained or name in shared or name in fragments:
            continue
        if isinstance(value, StoredTensor):
            contents.add(("module", name), WholeTensor(models[0], value))
        else:
            contents.add(("module", name), replace_tensors(value, models[0].archive.tensor))


def _frozen(models: Sequence[OpenFile]) -> Iterator[tuple[str, Any]]:
    """Parameters that were not trained: whole in stage 2, each rank's slice in stage 3."""
    model = models[0].value
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        stored = [file.value["frozen_param_fragments"][name] for file in models]
        if tuple(stored[0].shape) == tuple(shape):
            yield name, WholeTensor(models[0], stored[0])
        else:
            (placed,) = one_by_one([(name, shape)], len(models))
            yield name, _joined(placed, list(zip(models, stored, strict=True)))


# ------------------------------------------------------------------ the optimizer


def _add_optimizer(contents: Contents, partitions: _Partitions) -> None:
    names: dict[int, list[str]] = {}
    for group in partitions.groups:
        options = partitions.param_groups[group.param_group]
        for placed in group.placed:
            names.setdefault(group.param_group, []).append(placed.name)
            path = ("optimizer", "state", placed.name)
            for key, value in _state_of(placed, group, partitions.optims, options):
                contents.add((*path, key), value)
    for number, options in enumerate(partitions.param_groups):
        for key, value in options.items():
            if key not in ("params", "step"):
                contents.add(("optimizer", "param_groups", number, key), value)
        contents.add(("optimizer", "param_groups", number, "params"), names.get(number, []))
    if partitions.scaler is not None:
        contents.add(("loss_scaler",), dict(partitions.scaler))


def _state_of(
    placed: Placed, group: _Group, optims: Sequence[OpenFile], options: Mapping[str, Any]
) -> Iterable[tuple[str, Any]]:
    """A parameter's part of what the optimizer keeps of its group."""
    steps = options.get("step")
    for key, value in group.states[0].items():
        if key == "step":
            steps = value
        elif isinstance(value, StoredTensor) and len(value.shape) == 1:
            yield key, _joined(placed, [(f, s.get(key)) for f, s in zip(optims, group.states, strict=True)])
        else:
            yield key, replace_tensors(value, optims[0].archive.tensor)
    if steps is not None:
        # Some of DeepSpeed's optimizers count in a number, and some once for a whole group; PyTorch's, in a tensor.
        count = optims[0].archive.tensor(steps) if isinstance(steps, StoredTensor) else torch.tensor(float(steps))
        yield "step", count.reshape(()).float()


# ------------------------------------------------------------------ the rest


def _add_rest(contents: Contents, file: OpenFile) -> None:
    model = file.value
    contents.add(("param_shapes",), [_pairs(named) for named in model.get("param_shapes") or []])
    frozen = model.get("frozen_param_shapes")
    contents.add(("frozen_param_shapes",), [] if frozen is None else _pairs(frozen))
    scheduler = model.get("lr_scheduler")
    if isinstance(scheduler, dict) and scheduler:
        for key, value in scheduler.items():
            contents.add(("lr_scheduler", key), replace_tensors(value, file.archive.tensor))
    else:
        contents.add(("lr_scheduler",), None)
    for name, value in model.items():
        if name not in _TAKEN_APART:
            plain = sorted(value) if isinstance(value, set) else value
            contents.add((name,), replace_tensors(plain, file.archive.tensor))


def _pairs(named: Mapping[str, Sequence[int]]) -> list[list[Any]]:
    return [[name, list(shape)] for name, shape in named.items()]
