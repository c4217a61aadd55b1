"""Universal checkpoints of DeepSpeed's `ds_to_universal`: a folder per parameter, without partitions.

zero/<name>/{fp32,exp_avg,exp_avg_sq}.pt     whole tensors; of stage 3 flat, in row-major order
zero/<name>/step.pt                          of stages 1 and 2; of stage 3 in the next
zero/optimizer_state.pt                      what the optimizer has besides
*_model_states.pt                            the files that it was made from; the first has buffers and counters
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from terrazzo.checkpoint.formats.deepspeed.contents import (
    Contents,
    group_of,
    names_by_group,
    shapes_of,
    step_of,
    steps_in,
)
from terrazzo.checkpoint.formats.deepspeed.files import OpenFile, alone_in_file, entry, model_files
from terrazzo.checkpoint.formats.deepspeed.zero import frozen_tensors
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointFormatError, CheckpointNotFoundError

FOLDER: Final = "zero"
OPTIMIZER: Final = "optimizer_state.pt"
_WEIGHT, _STEP, _END = "fp32", "step", ".pt"


def is_universal(folder: Place) -> bool:
    """Whether a tag's folder has a universal checkpoint."""
    return (folder / FOLDER).is_dir()


def read_universal(folder: Place) -> Contents:
    """The contents of a tag's folder."""
    by_model_rank = [[OpenFile(folder, name) for name in names] for names in model_files(folder)]
    first = by_model_rank[0]
    optimizer = OpenFile(folder / FOLDER, OPTIMIZER)
    groups = optimizer.get("param_groups", list)
    shapes = _merged([files[0] for files in by_model_rank])
    _check_files(folder / FOLDER, [name for named in shapes for name in named])
    contents = Contents()
    for number, named in enumerate(shapes):
        options = entry(groups, group_of(groups, number, optimizer.where), dict, optimizer.where)
        for name, shape in named.items():
            _add_weight(contents, folder, name, shape)
            steps = _steps(folder / FOLDER / name, optimizer, number, options)
            for key, value in (*_moments(folder, name, shape), *steps):
                contents.add(("optimizer", "state", name, key), value)
    contents.add_param_groups(groups, names_by_group(shapes, groups, optimizer.where))
    contents.add_loss_scaler(optimizer.value.get("loss_scaler"))
    known = {name for named in shapes for name in named}
    for name, tensor in frozen_tensors(first):
        contents.add(("module", name), tensor)
        known.add(name)
    if first[0].value.get("module") is not None:  # for pipelines, ds_to_universal leaves the model's files out
        _refuse_cut(by_model_rank, known)
        contents.add_untrained(first[0], known)
    contents.add_rest([files[0] for files in by_model_rank])
    return contents


def _merged(models: Sequence[OpenFile]) -> list[dict[str, Sequence[int] | None]]:
    """The trained parameters of all model ranks, by group, with their shapes if these are of whole tensors."""
    groups: dict[int, dict[str, Sequence[int] | None]] = {}
    for model in models:
        for number, named in enumerate(shapes_of(model)):
            whole = {name: shape if len(models) == 1 else None for name, shape in named.items()}
            groups.setdefault(number, {}).update(whole)
    return [groups[number] for number in range(len(groups))]


def _check_files(zero: Place, names: Sequence[str]) -> None:
    """Raise unless all parameters have the same files, or only the weight if they never got a gradient."""
    files: dict[str, set[str]] = {}
    for name in names:
        if not (zero / name).is_dir():
            raise CheckpointNotFoundError(f"{zero / name}: the folder of this parameter is missing")
        files[name] = {file for file in (zero / name).names() if file.endswith(_END)}
    usual = set().union(*files.values()) | {_WEIGHT + _END}
    for name, found in files.items():
        absent = usual - found
        if absent and found != {_WEIGHT + _END}:
            raise CheckpointNotFoundError(f"{zero / name}: {', '.join(sorted(absent))} of this parameter is missing")


def _refuse_cut(by_model_rank: Sequence[Sequence[OpenFile]], known: set[str]) -> None:
    first = by_model_rank[0][0]
    others = set(first.get("module", dict)) - known - set(first.get("buffer_names", list))
    others -= set(first.value.get("shared_params") or {})
    if len(by_model_rank) > 1 and others:
        raise CheckpointFormatError(
            f"{first.where}: the model was tensor-parallel, and {min(others)} was not trained: the universal "
            "checkpoint does not say along which dim it is sharded"
        )


def _add_weight(contents: Contents, folder: Place, name: str, shape: Sequence[int] | None) -> None:
    contents.add(("module", name), alone_in_file(folder / FOLDER / name, _WEIGHT + _END, shape))


def _moments(folder: Place, name: str, shape: Sequence[int] | None) -> Iterator[tuple[str, Any]]:
    """The optimizer's state for each element of a parameter."""
    for file in sorted((folder / FOLDER / name).names()):
        key = file.removesuffix(_END)
        if file.endswith(_END) and key not in (_WEIGHT, _STEP):
            yield key, alone_in_file(folder / FOLDER / name, file, shape)


def _steps(own: Place, optimizer: OpenFile, number: int, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if (own / f"{_STEP}{_END}").exists():
        file = OpenFile(own, f"{_STEP}{_END}")
        yield _STEP, step_of(file.archive.value, file)
        return
    state = optimizer.value.get("optimizer_state_dict", {}).get("state", {})
    yield from steps_in(state.get(number, {}), options, optimizer)
