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
from terrazzo.checkpoint.formats.deepspeed.from_checkpoint import write_deepspeed
from terrazzo.checkpoint.formats.deepspeed.zero import frozen_tensors, read_partitioned
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.formats.stored import StoredBox
from terrazzo.checkpoint.formats.table import TableReader, tensor_entry
from terrazzo.checkpoint.formats.windows import check_file
from terrazzo.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from terrazzo.checkpoint.native.names import LATEST, named_by_latest
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointNotFoundError


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
        write_deepspeed(Source(reader), target, how.stage, how.ranks, how.progress)


def _is_tag(names: Iterable[str]) -> bool:
    """Whether files of these names are those of a tag."""
    return any(name.endswith(("_model_states.pt", "-model_states.pt", "_optim_states.pt")) for name in names)


# ------------------------------------------------------------------ universal checkpoints


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
