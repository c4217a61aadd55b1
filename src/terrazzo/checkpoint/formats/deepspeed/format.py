"""DeepSpeed's checkpoints, whatever the number of ranks that saved them and that read them; one of the formats."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from terrazzo.checkpoint.formats.checking import check_file
from terrazzo.checkpoint.formats.deepspeed.contents import Contents
from terrazzo.checkpoint.formats.deepspeed.files import FileTensor
from terrazzo.checkpoint.formats.deepspeed.from_checkpoint import write_deepspeed
from terrazzo.checkpoint.formats.deepspeed.universal import FOLDER, is_universal, read_universal
from terrazzo.checkpoint.formats.deepspeed.zero import read_partitioned
from terrazzo.checkpoint.formats.format import Checked, Format, Found, Writing
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.formats.table import StoredBox, TableReader, tensor_entry
from terrazzo.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from terrazzo.checkpoint.native.names import LATEST, named_by_latest
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, CheckpointNotFoundError


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
        contents = self._contents = _read_contents(folder)
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


def _read_contents(folder: Place) -> Contents:
    try:
        return read_universal(folder) if is_universal(folder) else read_partitioned(folder)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # What the pickles hold can be anything.
        raise CheckpointFormatError(
            f"{folder}: the files hold something else than DeepSpeed's do ({type(error).__name__}: {error})"
        ) from error


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
            for entry in each.store.list():
                if entry.key.endswith(".pt"):
                    check_file(checked, each.store, entry.key, progress)
        if not checked.damage:
            DeepSpeedReader(place).read_metadata()  # are all files there?
        return checked

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        write_deepspeed(Source(reader), target, how.stage, how.ranks, how.progress)


def _is_tag(names: Iterable[str]) -> bool:
    """Whether files of these names are those of a tag."""
    return any(name.endswith(("_model_states.pt", "-model_states.pt", "_optim_states.pt")) for name in names)
