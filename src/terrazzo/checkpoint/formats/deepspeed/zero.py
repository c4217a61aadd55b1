"""Read checkpoints of ZeRO stages 1, 2 and 3: flat partitions, and the model's files.

Of a pipeline, each layer is in a separate file, `layer_03-model_states.pt`, and in partitions a parameter's name has
the layer's number, `3.weight`. A module that several layers share (`TiedLayerSpec`) has the names
`tied_modules.<key>.weight` there, and is in the file of each of these layers. Here it has the number of the first
layer, as in an `nn.Sequential` that has a module more than once. Stages may share only some parameters of a module, so
values are compared to find the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch

from terrazzo.checkpoint.formats.deepspeed.files import (
    Contents,
    FileTensor,
    OpenFile,
    Shapes,
    checked_shapes,
    count_in,
    entry,
    find_files,
    group_of,
    in_file,
    is_shape,
    layer_files,
    names_by_group,
    shapes_of,
    steps_in,
    tensor_parallel,
)
from terrazzo.checkpoint.formats.deepspeed.partitions import (
    Placed,
    expert_tensors,
    has_experts,
    in_one_line,
    joined,
    one_by_one,
    out_of_turns,
    ranks_by_experts,
    stacked,
    stacked_name,
)
from terrazzo.checkpoint.formats.stored import Asked, read_rows
from terrazzo.checkpoint.formats.torch_archive import StoredTensor
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError
from terrazzo.layout.box import row_major_windows


def read_partitioned(folder: Place) -> Contents:
    """The contents of a tag's folder."""
    layers = {number: OpenFile(folder, name) for number, name in layer_files(folder).items()}
    stages = [_stage_of(folder, models, optims) for models, optims in find_files(folder)]
    _check_model_ranks(folder, stages, layers)
    renamed, shared = tied_names([stage.tied() for stage in stages], layers)
    contents = Contents()
    for stage, names in zip(stages, renamed, strict=True):
        _add_parameters(contents, stage, names)
    _add_param_groups(contents, stages, renamed)
    contents.add_rest([stage.models[0] for stage in stages], renamed)
    if layers:
        add_layers(contents, layers, shared)
    else:
        contents.add_untrained(stages[0].models[0])
    _add_experts(contents, folder)
    return contents


def _add_experts(contents: Contents, folder: Place) -> None:
    """Add what only the experts' files have, and give stacked parameters their shapes."""
    experts = expert_tensors(folder)
    for name, tensor in experts.items():
        if not contents.has(name):
            contents.add(("module", name), tensor)
    if experts:
        shapes = [{stacked_name(name): shape for name, shape in named} for named in contents.values["param_shapes"]]
        for named in shapes:
            named.update((name, list(experts[name].shape)) for name in named if name in experts)
        contents.add(("param_shapes",), [[[name, shape] for name, shape in named.items()] for named in shapes])
        shared = contents.values.get("shared_params") or {}
        names = {stacked_name(name): stacked_name(first) for name, first in shared.items()}
        contents.add(("shared_params",), names)


def _check_model_ranks(folder: Place, stages: Sequence[_Stage], layers: Mapping[int, OpenFile]) -> None:
    """Raise if there are several model ranks that are not the stages of a pipeline, with a file for each layer."""
    cut = stages[0].models[0].value.get("checkpoint_parallel_dimensions")
    ranks = cut.get("tp_degree", 1) if isinstance(cut, dict) else 1
    if ranks != 1 or len(stages) > 1 and not layers:
        raise tensor_parallel(folder)


def _check_ranks(folder: Place, models: Sequence[str], optims: Sequence[str], ranks: Any) -> None:
    """Raise unless every data-parallel rank has a file of optimizer states, and in stage 3 one of model states."""
    if not isinstance(ranks, int):
        return
    of_each_rank = models[0].startswith("zero_pp_rank_")  # in stage 3
    each = {"optimizer states": optims, "model states": models if of_each_rank else ()}
    for what, names in each.items():
        if names and len(names) < ranks:
            raise CheckpointNotFoundError(
                f"{folder}: the files of {what} of data-parallel ranks {len(names)} to {ranks - 1} are missing"
            )
        if len(names) > ranks:
            raise CheckpointCorruptError(f"{folder}: saved by {ranks} data-parallel ranks, but it has {names[ranks]}")


# ------------------------------------------------------------------ partitions


_ALIGNED: Final = 2  # partitions begin at even elements, so the last may have some that are unused


_Weights = Sequence[tuple[OpenFile, StoredTensor]]  # a flat tensor's partitions, by rank


@dataclass(frozen=True)
class _FlatGroup:
    """Parameters that share flat tensors: their layout, their float32 weights, and their optimizer state."""

    placed: Sequence[Placed]
    weights: _Weights
    states: Sequence[Mapping[str, Any]]  # by rank
    options: Mapping[str, Any]


@dataclass(frozen=True)
class _Stage:
    """The open files of a model rank, and the optimizer states in those of its data-parallel ranks, if it has any."""

    models: Sequence[OpenFile]
    groups: Sequence[_FlatGroup] = ()
    param_groups: Sequence[Mapping[str, Any]] = ()
    names: Sequence[Sequence[str]] = ()  # by param group
    scaler: Any = None

    def tied(self) -> dict[str, FileTensor]:
        """The weights of modules that several layers of a pipeline share."""
        return {
            placed.name: joined(placed, group.weights)
            for group in self.groups
            for placed in group.placed
            if placed.name.startswith(TIED)
        }


def _stage_of(folder: Place, model_files: Sequence[str], optim_files: Sequence[str]) -> _Stage:
    models = [OpenFile(folder, name) for name in model_files]
    model = models[0]
    _check_ranks(folder, model_files, optim_files, model.value.get("dp_world_size"))
    if not optim_files:
        return _Stage(models)
    optims = [OpenFile(folder, name) for name in optim_files]
    shapes = shapes_of(model)
    states = [file.get("optimizer_state_dict", dict) for file in optims]
    given = model.value.get("ds_config")
    config = given if isinstance(given, dict) else {}  # not if an engine was constructed with a path
    data_first = bool(config.get("use_data_before_expert_parallelism"))
    groups, param_groups = _flat_groups(shapes, optims, states, data_first)
    _check_same_save(groups, optims, states)
    names = names_by_group(shapes, param_groups, optims[0].where)
    zero = config.get("zero_optimization")
    in_turns = isinstance(zero, dict) and zero.get("round_robin_gradients")
    if in_turns and states[0].get("zero_stage") in (1, 2):
        if any(has_experts(members) for members in names):
            raise CheckpointFormatError(f"{model.where}: round_robin_gradients with experts cannot be read")
        names = [out_of_turns(members, len(optims)) for members in names]
    names = [list(dict.fromkeys(map(stacked_name, members))) for members in names]
    return _Stage(models, groups, param_groups, names, states[0].get("loss_scaler"))


def _check_same_save(
    groups: Sequence[_FlatGroup], optims: Sequence[OpenFile], states: Sequence[Mapping[str, Any]]
) -> None:
    """Raise if a rank's file is of another save, because values that are equal on all ranks differ in it."""
    first, *others = [_in_common(file, rank, states[rank], groups) for rank, file in enumerate(optims)]
    for file, other in zip(optims[1:], others, strict=True):
        for what, value in other.items():
            if value != first.get(what):
                raise CheckpointCorruptError(
                    f"{file.where} is of another checkpoint than {optims[0].where}: {what} is {value!r} in the first "
                    f"and {first.get(what)!r} in the second"
                )


def _in_common(file: OpenFile, rank: int, state: Mapping[str, Any], groups: Sequence[_FlatGroup]) -> dict[str, Any]:
    common = {key: state.get(key) for key in ("ds_version", "zero_stage", "partition_count")}
    scaler = state.get("loss_scaler")
    if isinstance(scaler, dict):
        common |= {f"loss_scaler.{key}": value for key, value in scaler.items() if isinstance(value, int | float)}
    for number, group in enumerate(groups):
        for _, step in steps_in(group.states[rank], {}, file):
            common[f"the number of steps of group {number}"] = step.item()
    return common


def _flat_groups(
    shapes: Sequence[Shapes], optims: Sequence[OpenFile], states: Sequence[Mapping[str, Any]], data_first: bool
) -> tuple[list[_FlatGroup], Sequence[Mapping[str, Any]]]:
    """The parameters of each flat tensor, and the options of the param groups."""
    where, is_stage3 = optims[0].where, states[0].get("zero_stage") == 3
    key = "fp32_flat_groups" if is_stage3 else "single_partition_of_fp32_groups"
    inner, kind = ("optimizer_state_dict", dict) if is_stage3 else ("base_optimizer_state", object)
    base = [entry(state, inner, kind, file.where) for state, file in zip(states, optims, strict=True)]
    elastic = not isinstance(base[0], dict)
    if elastic:
        step = states[0].get("base_optimizer_state_step")
        shared_step = {} if step is None else {"step": step}
        param_groups = [{**shared_step, "params": [number]} for number in range(len(shapes))]
    else:
        param_groups = entry(base[0], "param_groups", list, where)
    groups = []
    for number, named in enumerate(shapes):
        weights = _flat_tensors(key, number, optims, states)
        if is_stage3:
            placed = list(one_by_one(named.items(), len(optims)))
        else:
            placed = _in_one_line(number, named, weights, states, data_first)
        kept = tuple(
            entry(part, number, dict, file.where) if elastic else entry(part, "state", dict, file.where).get(number, {})
            for part, file in zip(base, optims, strict=True)
        )
        options = entry(param_groups, group_of(param_groups, number, where), dict, where)
        groups.append(_FlatGroup(placed, weights, kept, options))
    return groups, param_groups


def _in_one_line(
    number: int, named: Shapes, weights: _Weights, states: Sequence[Mapping[str, Any]], data_first: bool
) -> list[Placed]:
    """The parameters of a flat tensor of stages 1 and 2, whose partitions must have room for them."""
    first, where = states[0], weights[0][0].where
    between = first.get("param_alignment_paddings")
    gaps = [0] * len(named) if between is None else entry(between, number, list, where)
    if len(gaps) != len(named) or not is_shape(gaps):
        raise CheckpointFormatError(f"{where}: param_alignment_paddings[{number}] is not a list of {len(named)} counts")
    used = sum(map(prod, named.values())) + sum(gaps)
    teams = [range(len(states))]
    if has_experts(named):
        same = count_in(first["partition_count"], number, where)
        teams = ranks_by_experts(len(states), same, data_first)
        if not teams:
            raise CheckpointCorruptError(f"{where}: {same} of {len(states)} ranks have the same experts")
    lines = []
    for team in teams:
        file, partition = weights[team[0]]
        unit = _ALIGNED * len(team)
        stored = sum([weights[each][1].shape[0] for each in team])
        if -(-stored // unit) != -(-used // unit):
            raise CheckpointCorruptError(
                f"{file.where}: the partitions of parameters with {used} elements have {stored}"
            )
        # If the padding was removed from the weights, it must be added here.
        paddings = states[team[0]]["group_paddings"] if "zero_stage" in first else {number: 0}
        length = partition.shape[0] + count_in(paddings, number, file.where)
        lines.append(in_one_line(named.items(), length, gaps))
    return stacked(lines, teams) if has_experts(named) else list(lines[0])


def _flat_tensors(key: str, number: int, optims: Sequence[OpenFile], states: Sequence[Mapping[str, Any]]) -> _Weights:
    found = []
    for file, state in zip(optims, states, strict=True):
        flat = entry(entry(state, key, list, file.where), number, StoredTensor, file.where)
        if len(flat.shape) != 1:
            raise CheckpointCorruptError(f"{file.where}: {key}[{number}] is not flat, but of shape {flat.shape}")
        found.append((file, flat))
    return found


# ------------------------------------------------------------------ parameters and their optimizer state


def _add_parameters(contents: Contents, stage: _Stage, names: Mapping[str, str]) -> None:
    """Add the parameters of the partitions, and then their optimizer state.

    A converted checkpoint has them in this order, so that those who load the model alone find it in one piece.
    """
    found = [(names.get(placed.name, placed.name), placed, group) for group in stage.groups for placed in group.placed]
    for name, placed, group in found:
        contents.add(("module", name), joined(placed, group.weights))
    add_frozen(contents, stage.models)
    for name, placed, group in found:
        for key, value in _state_of(placed, group):
            contents.add(("optimizer", "state", name, key), value)


def add_frozen(contents: Contents, models: Sequence[OpenFile]) -> None:
    """Add the parameters that were not trained: whole in stage 2, a slice of each rank in stage 3."""
    key = "frozen_param_shapes"
    for name, shape in checked_shapes(models[0].value.get(key) or {}, key, models[0]).items():
        stored = [entry(file.get("frozen_param_fragments", dict), name, StoredTensor, file.where) for file in models]
        if tuple(stored[0].shape) == tuple(shape):
            contents.add(("module", name), in_file(models[0], stored[0]))
        else:
            (placed,) = one_by_one([(name, shape)], len(models))
            contents.add(("module", name), joined(placed, list(zip(models, stored, strict=True))))


def _add_param_groups(contents: Contents, stages: Sequence[_Stage], renamed: Sequence[Mapping[str, str]]) -> None:
    """Add the param groups; those of a pipeline's stages are joined, with shared parameters once."""
    members: dict[int, dict[str, None]] = {}
    for stage, names in zip(stages, renamed, strict=True):
        for number, group in enumerate(stage.names):
            members.setdefault(number, {}).update(dict.fromkeys(names.get(name, name) for name in group))
    longest = max((stage.param_groups for stage in stages), key=len)
    contents.add_param_groups(longest, [list(members[number]) for number in range(len(members))], stages[0].scaler)


def _state_of(placed: Placed, group: _FlatGroup) -> Iterable[tuple[str, Any]]:
    """A parameter's part of its group's optimizer state."""
    files = [file for file, _ in group.weights]
    for key, value in group.states[0].items():
        if key == "step":
            continue
        if isinstance(value, StoredTensor) and len(value.shape) == 1:
            parts = [(file, state.get(key)) for file, state in zip(files, group.states, strict=True)]
            yield key, joined(placed, parts)
        else:
            yield key, files[0].archive.read(value)
    yield from steps_in(group.states[0], group.options, files[0])


# ------------------------------------------------------------------ stages of a pipeline


TIED = "tied_modules."
_WINDOW = 1 << 20  # elements that are compared at a time


def tied_names(
    stages: Sequence[Mapping[str, FileTensor]], layers: Mapping[int, OpenFile]
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """New names for parameters of modules that layers share, for each stage; and other names of these parameters.

    Args:
        stages: the tied parameters of each stage, by their names in it.
    """
    known: dict[str, list[tuple[str, FileTensor]]] = {}
    renamed: list[dict[str, str]] = []
    shared: dict[str, str] = {}
    for tied in stages:
        names: dict[str, str] = {}
        for key, module in _by_module(tied).items():
            holding = [number for number, layer in sorted(layers.items()) if _holds(layer, module)]
            if not holding:
                continue
            names |= {f"{TIED}{key}.{inner}": f"{holding[0]}.{inner}" for inner in layers[holding[0]].value}
            for inner, tensor in module.items():
                outer, own = f"{TIED}{key}.{inner}", f"{holding[0]}.{inner}"
                first = next((name for name, other in known.get(outer, ()) if _equal(tensor, other)), own)
                if first == own:
                    known.setdefault(outer, []).append((own, tensor))
                names[outer] = first
                shared |= {f"{n}.{inner}": first for n in holding if f"{n}.{inner}" != first}
        renamed.append(names)
    return renamed, shared


def add_layers(contents: Contents, layers: Mapping[int, OpenFile], shared: Mapping[str, str]) -> None:
    """Add values that only the layers' files have: buffers, and parameters that are not trained."""
    for number, layer in sorted(layers.items()):
        for inner, value in layer.value.items():
            name = f"{number}.{inner}"
            if name in shared or contents.has(name):
                continue
            contents.add(("module", name), in_file(layer, value))
    contents.add(("shared_params",), {**(contents.values.get("shared_params") or {}), **shared})


def _by_module(tied: Mapping[str, FileTensor]) -> dict[str, dict[str, FileTensor]]:
    found: dict[str, dict[str, FileTensor]] = {}
    for name, tensor in tied.items():
        key, _, inner = name.removeprefix(TIED).partition(".")
        found.setdefault(key, {})[inner] = tensor
    return found


def _holds(layer: OpenFile, module: Mapping[str, FileTensor]) -> bool:
    """Whether a layer is that module: it has the same parameters with the same values."""
    for name, tensor in module.items():
        stored = layer.value.get(name)
        if not isinstance(stored, StoredTensor) or not _equal(tensor, in_file(layer, stored)):
            return False
    return True


def _equal(tensor: FileTensor, other: FileTensor) -> bool:
    """Whether two tensors are equal in the dtype of the second."""
    if tensor.shape != other.shape:
        return False
    for window in row_major_windows(tensor.shape, _WINDOW):
        one, two = (torch.empty(window.lengths, dtype=source.dtype, device="cpu") for source in (tensor, other))
        for source, target in ((tensor, one), (other, two)):
            read_rows([Asked(TIED, window, source.rows())], [target])
        if not torch.equal(one.to(two.dtype), two):
            return False
    return True
