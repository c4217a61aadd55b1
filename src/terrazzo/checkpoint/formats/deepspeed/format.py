"""DeepSpeed's checkpoints, whatever the number of ranks that saved them and that read them; one of the formats.

Universal checkpoints, of its `ds_to_universal`, have a folder per parameter, without partitions:

zero/<name>/{fp32,exp_avg,exp_avg_sq}.pt     whole tensors; of stage 3 flat, in row-major order
zero/<name>/step.pt                          of stages 1 and 2; of stage 3 in the next
zero/optimizer_state.pt                      what the optimizer has besides
*_model_states.pt                            the files that it was made from; the first has buffers and counters
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from terrazzo.checkpoint.formats.deepspeed.files import (
    Contents,
    FileTensor,
    OpenFile,
    alone_in_file,
    entry,
    group_of,
    model_files,
    names_by_group,
    shapes_of,
    step_of,
    steps_in,
    understood,
)
from terrazzo.checkpoint.formats.deepspeed.new_folder import NewFolder, new_save
from terrazzo.checkpoint.formats.deepspeed.partitions import Placed, refuse_experts
from terrazzo.checkpoint.formats.deepspeed.writing import (
    RunLayout,
    loss_scaler,
    model_states,
    optim_states,
    param_group,
    write_file,
)
from terrazzo.checkpoint.formats.deepspeed.zero import add_frozen, read_partitioned
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.formats.stored import StoredBox
from terrazzo.checkpoint.formats.table import TableReader, tensor_entry
from terrazzo.checkpoint.formats.torch_save import UnwrittenTensor
from terrazzo.checkpoint.formats.windows import check_file
from terrazzo.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from terrazzo.checkpoint.native.names import LATEST, named_by_latest
from terrazzo.checkpoint.native.tensors import bytes_of
from terrazzo.checkpoint.plan.flatten import set_element
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    UnsupportedValueError,
)


class DeepSpeedReader(TableReader):
    """Reads what DeepSpeed saved in ZeRO stages 1, 2 and 3, and universal checkpoints, under terrazzo's engine's names.

    Weights are `module.<name>`, in float32 where the optimizer has them so; its state is
    `optimizer.state.<name>.<key>`.

    Args:
        path: The folder of a tag, or one with a file `latest` or `latest_universal` that names a tag.
    """

    _contents: Contents

    def _described(self) -> Metadata:
        folder = tag_folder(self.place)
        self.files_at(folder.store)
        with understood(folder, "DeepSpeed's"):
            contents = read_universal(folder) if is_universal(folder) else read_partitioned(folder)
        self._contents = contents
        entries = {
            name: tensor_entry(value.dtype, value.shape)
            if isinstance(value, FileTensor | torch.Tensor)
            else BytesStorageMetadata()
            for name, value in contents.values.items()
        }
        return Metadata(dict(entries), planner_data=contents.paths, storage_meta=StorageMeta(str(self.place)))

    def value(self, name: str) -> Any:
        self.read_metadata()
        return self._contents.values.get(name)

    def rows_of(self, name: str) -> list[StoredBox] | torch.Tensor:
        value = self.value(name)
        if isinstance(value, torch.Tensor):
            return value
        if not isinstance(value, FileTensor):
            raise CheckpointCorruptError(f"{name}: the checkpoint holds no tensor of this name")
        return value.rows()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Place(checkpoint_id).is_dir()


def tag_folder(path: Place) -> Place:
    """The folder with the files: `path` itself, or the one that its `latest` or `latest_universal` names."""
    named = named_by_latest(path)
    if not named:
        return path
    for folder in named:
        if folder.is_dir():
            return folder
    raise CheckpointNotFoundError(f"{path / LATEST[0]} names {named[0].name!r}, and there is no such folder")


class DeepSpeed(Format):
    """The folder of a tag; or of a run, whose `latest` or `latest_universal` names one."""

    name = "deepspeed"
    options = frozenset({"stage", "ranks"})
    replaces = False

    def find(self, found: Found) -> Place | None:
        if _is_tag(found.names):
            return found.place
        named = found.latest if found.names.intersection(LATEST) else []
        # The run's folder, not the tag's: the reader says which tag is missing, and which one it reads.
        return found.place if any(folder.is_dir() and _is_tag(folder.names()) for folder in named) else None

    def reader(self, place: Place) -> StorageReader:
        return DeepSpeedReader(place)

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        checked, folder = Checked(), tag_folder(place)
        folders = [folder]
        if is_universal(folder):
            zero = folder / FOLDER
            folders += [zero, *(zero / name for name in zero.store.folders())]
        for each in folders:
            for file in each.store.list():
                if file.key.endswith(".pt"):
                    check_file(checked, each.store, file.key, progress)
        if not checked.damage:
            DeepSpeedReader(place).read_metadata()  # are all files there?
        return checked

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        """Convert a training engine's checkpoint, of any format and any number of ranks."""
        folder = NewFolder(target, new_save())
        if folder.is_taken():
            raise folder.refusal()
        source = Source(reader)
        with understood(source.metadata, "a training engine's"):
            _write(source, folder, how)


def _is_tag(names: Iterable[str]) -> bool:
    """Whether files of these names are those of a tag."""
    return any(name.endswith(("_model_states.pt", "-model_states.pt", "_optim_states.pt")) for name in names)


# ------------------------------------------------------------------ universal checkpoints


FOLDER: Final = "zero"
OPTIMIZER: Final = "optimizer_state.pt"
_END = ".pt"
_WEIGHT, _STEP = f"fp32{_END}", f"step{_END}"


def is_universal(folder: Place) -> bool:
    """Whether a tag's folder has a universal checkpoint."""
    return (folder / FOLDER).is_dir()


def read_universal(folder: Place) -> Contents:
    """The contents of a tag's folder."""
    by_model_rank = [[OpenFile(folder, name) for name in names] for names in model_files(folder)]
    models = [files[0] for files in by_model_rank]
    optimizer = OpenFile(folder / FOLDER, OPTIMIZER)
    groups = optimizer.get("param_groups", list)
    shapes = _merged(models)
    files_of = _checked_files(folder / FOLDER, [name for named in shapes for name in named])
    contents = Contents()
    for number, named in enumerate(shapes):
        options = entry(groups, group_of(groups, number, optimizer.where), dict, optimizer.where)
        for name, shape in named.items():
            own = folder / FOLDER / name
            contents.add(("module", name), alone_in_file(own, _WEIGHT, shape))
            for file in sorted(files_of[name] - {_WEIGHT, _STEP}):
                contents.add(("optimizer", "state", name, file.removesuffix(_END)), alone_in_file(own, file, shape))
            if _STEP in files_of[name]:
                opened = OpenFile(own, _STEP)
                steps: Iterable[tuple[str, Any]] = [("step", step_of(opened.archive.value, opened))]
            else:
                state = optimizer.value.get("optimizer_state_dict", {}).get("state", {})
                steps = steps_in(state.get(number, {}), options, optimizer)
            for key, value in steps:
                contents.add(("optimizer", "state", name, key), value)
    names = names_by_group(shapes, groups, optimizer.where)
    contents.add_param_groups(groups, names, optimizer.value.get("loss_scaler"))
    add_frozen(contents, by_model_rank[0])
    if models[0].value.get("module") is not None:  # for pipelines, ds_to_universal leaves the model's files out
        _refuse_cut(models, contents)
        contents.add_untrained(models[0])
    contents.add_rest(models)
    return contents


def _merged(models: Sequence[OpenFile]) -> list[dict[str, Sequence[int] | None]]:
    """The trained parameters of all model ranks, by group, with their shapes if these are of whole tensors."""
    groups: dict[int, dict[str, Sequence[int] | None]] = {}
    for model in models:
        for number, named in enumerate(shapes_of(model)):
            whole = {name: shape if len(models) == 1 else None for name, shape in named.items()}
            groups.setdefault(number, {}).update(whole)
    return [groups[number] for number in range(len(groups))]


def _checked_files(zero: Place, names: Sequence[str]) -> dict[str, set[str]]:
    """The files of each parameter: all have the same, or only the weight if they never got a gradient."""
    files: dict[str, set[str]] = {}
    for name in names:
        if not (zero / name).is_dir():
            raise CheckpointNotFoundError(f"{zero / name}: the folder of this parameter is missing")
        files[name] = {file for file in (zero / name).names() if file.endswith(_END)}
    usual = set().union(*files.values()) | {_WEIGHT}
    for name, found in files.items():
        absent = usual - found
        if absent and found != {_WEIGHT}:
            raise CheckpointNotFoundError(f"{zero / name}: {', '.join(sorted(absent))} of this parameter is missing")
    return files


def _refuse_cut(models: Sequence[OpenFile], contents: Contents) -> None:
    first = models[0]
    others = {name for name in first.get("module", dict) if not contents.has(name)}
    others -= set(first.get("buffer_names", list))
    others -= set(first.value.get("shared_params") or {})
    if len(models) > 1 and others:
        raise CheckpointFormatError(
            f"{first.where}: the model was tensor-parallel, and {min(others)} was not trained: the universal "
            "checkpoint does not say along which dim it is sharded"
        )


# ------------------------------------------------------------------ a training engine's checkpoint, converted


_PIECE: Final = 16 << 20  # bytes in memory at a time
_MOST_RANKS: Final = 1 << 20
# Values without which the order of parameters is unknown.
_NEEDED: Final = ("param_shapes", "shared_params", "global_steps", "dp_world_size", "ds_config")
# Values of an engine's checkpoint that are not copied. Positions in the data are terrazzo's own.
_TAKEN_APART: Final = frozenset(
    {
        "module",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "loss_scaler",
        "data_sampler",
        "random_ltd",
        "dp_world_size",
        "mp_world_size",
        "version",
        "ds_version",
        "ds_config",
    }
)


def _write(source: Source, folder: NewFolder, how: Writing) -> None:
    values = _values(source)
    config = values["ds_config"]
    layout = _layout(source, values, how.stage, values["dp_world_size"] if how.ranks is None else how.ranks)
    scaler = loss_scaler(values.get("loss_scaler") or {}, config.get("fp16") or {})
    zero = {**(config.get("zero_optimization") or {}), "stage": layout.stage}
    config = {**config, "zero_optimization": zero}
    rest = {name: value for name, value in values.items() if name not in _TAKEN_APART}
    tensors = _Streamed(source, how.progress)
    folder.prepare()
    try:
        for rank in range(layout.ranks):
            folder.check()
            clip = float(config.get("gradient_clipping") or 0.0)
            write_file(folder.store, layout.optim_file(rank), optim_states(layout, tensors, rank, scaler, clip, config))
            name = layout.model_file(rank)
            if name is not None:
                states = model_states(layout, tensors, rank, {**rest, "ds_config": config})
                write_file(folder.store, name, states)
        folder.commit(layout.files())
    except BaseException:
        folder.discard()
        raise


def _values(source: Source) -> dict[str, Any]:
    """Everything except the model and the optimizer's state of parameters, nested as it was saved."""
    nested: dict[str, Any] = {}
    for name in source.metadata.state_dict_metadata:
        path = source.paths.get(name, (name,))
        if path[0] == "module" or path[:2] == ("optimizer", "state") or str(path[0]).startswith("rng@"):
            continue
        set_element(nested, path, source.whole(name))
    absent = [name for name in _NEEDED if name not in nested]
    if absent or not nested.get("optimizer", {}).get("param_groups"):
        raise CheckpointFormatError(
            f"not a checkpoint of a training engine (it has no {', '.join(absent) or 'optimizer.param_groups'}), so "
            "the order of parameters in DeepSpeed's partitions is unknown: convert it to another format"
        )
    return nested


def _layout(source: Source, values: Mapping[str, Any], stage: int | None, ranks: int) -> RunLayout:
    config = values["ds_config"]
    zero = config.get("zero_optimization") or {}
    stage = max(int(zero.get("stage", 0)), 1) if stage is None else stage
    if stage not in (1, 2, 3) or not 0 < ranks <= _MOST_RANKS:
        raise UnsupportedValueError(
            f"DeepSpeed's layout needs ZeRO stage 1, 2 or 3 and at least one rank, not stage {stage} on {ranks} ranks"
        )
    shapes: dict[str, Sequence[int]] = {name: shape for named in values["param_shapes"] for name, shape in named}
    refuse_experts(shapes)
    kept = _kept(source)
    groups = []
    for options in values["optimizer"]["param_groups"]:
        named = {name: shapes[name] for name in options["params"] if name in shapes}
        if named:
            groups.append(param_group(named, options, kept))
    model = _model(source)
    buffers = set(values.get("buffer_names") or ())
    frozen = {
        name: shape for name, shape in model.items() if shape is not None and name not in shapes and name not in buffers
    }
    left_out = not frozen and values.get("frozen_param_shapes") is None
    shared = values["shared_params"] or {}
    return RunLayout(
        stage=stage,
        ranks=ranks,
        dtype=_dtype(config),
        groups=tuple(groups),
        frozen=None if left_out else frozen,
        shared=shared,
        model=[*model, *(name for name in shared if name not in model)],
        settings=zero,
    )


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype in which the run computes."""
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        if (config.get(key) or {}).get("enabled") is True:
            return dtype
    return torch.float32


def _model(source: Source) -> dict[str, tuple[int, ...] | None]:
    """The names in the model's state, with the shapes of tensors."""
    found: dict[str, tuple[int, ...] | None] = {}
    for name, path in source.paths.items():
        if path[0] == "module":
            entry = source.metadata.state_dict_metadata[name]
            found[str(path[1])] = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
    return found


def _kept(source: Source) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter: tensors without data, and values."""
    kept: dict[str, dict[str, Any]] = {}
    for name, path in source.paths.items():
        if path[:2] != ("optimizer", "state"):
            continue
        _, _, parameter, key = path
        entry = source.metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata) and key != "step":
            value: Any = torch.empty(entry.size, device="meta")
        else:
            value = source.whole(name)
        kept.setdefault(str(parameter), {})[str(key)] = value
    return kept


class _Streamed:
    """The tensors of a checkpoint, which are read while they are written."""

    def __init__(self, source: Source, progress: Callable[[str, int], None] | None) -> None:
        self._source = source
        self._progress = progress

    def flat(self, kind: str, placed: Sequence[Placed], rank: int, length: int, dtype: torch.dtype) -> UnwrittenTensor:
        return UnwrittenTensor(dtype, (length,), lambda: self._flat(kind, placed, rank, length, dtype))

    def whole(self, name: str, dtype: torch.dtype | None) -> Any:
        stored = f"module.{name}"
        entry = self._source.metadata.state_dict_metadata[stored]
        if not isinstance(entry, TensorStorageMetadata):
            return self._source.whole(stored)
        own = entry.properties.dtype
        wanted = dtype if dtype is not None and own.is_floating_point else own
        return UnwrittenTensor(
            wanted, tuple(entry.size), lambda: self._source.pieces(stored, self._progress, dtype=wanted)
        )

    def _flat(
        self, kind: str, placed: Sequence[Placed], rank: int, length: int, dtype: torch.dtype
    ) -> Iterator[memoryview]:
        position, entries = 0, self._source.metadata.state_dict_metadata
        for where in placed:
            stored = f"module.{where.name}" if kind == "module" else f"optimizer.state.{where.name}.{kind}"
            start = 0
            for run in where.runs:
                if run.rank == rank:
                    yield from _zeros(run.start - position, dtype)
                    if isinstance(entries.get(stored), TensorStorageMetadata):
                        elements = (start, start + run.length)
                        yield from self._source.pieces(stored, self._progress, elements, dtype)
                    else:  # optimizer state that does not exist yet
                        yield from _zeros(run.length, dtype)
                    position = run.start + run.length
                start += run.length
        yield from _zeros(length - position, dtype)


def _zeros(count: int, dtype: torch.dtype) -> Iterator[memoryview]:
    limit = _PIECE // dtype.itemsize
    while count > 0:
        data = torch.zeros(min(count, limit), dtype=dtype, device="cpu")
        yield bytes_of(data)
        count -= limit
