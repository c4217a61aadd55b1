"""`FileSystemWriter` and `FsspecWriter` under `terrazzo.install()`: PyTorch's format, in files with PyTorch's names.

A program for PyTorch's checkpoints may know their files: Composer asserts that its rank's `__0_0.distcp` is there, and
uploads it with the `.metadata`; other tools look for `*.distcp`. So such a program gets these files, and not terrazzo's
format.

PyTorch's names are those of ranks, and the same in every save. Written to them at once, a save would destroy the
checkpoint that is there while it is still valid, and two saves would mix their files. So data are written under names
of this save, as by `DCPWriter`, and get PyTorch's names by a link:

- if no checkpoint is there, before the commit, and only if no file has one of the names: a program that waits for the
  `.metadata` finds all of its files;
- else after the commit, when the files of the old checkpoint have been removed. The metadata are committed once more,
  with the new names.

Where that cannot be (a store has no links, another save goes on beside this one) the files keep their first names.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Final

from torch.futures import Future

from terrazzo.checkpoint._fsspec_filesystem import WriterOfFsspec
from terrazzo.checkpoint.filesystem import SerializationFormat
from terrazzo.checkpoint.formats.dcp import SUFFIX, DCPWriter, files_named
from terrazzo.checkpoint.formats.dcp_metadata import METADATA, prefix_of_torch, transforms_of_torch
from terrazzo.checkpoint.formats.registry import check_is_found
from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.native.rows import Row
from terrazzo.checkpoint.planner import SavePlan, SavePlanner
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.run.staging import BlockingAsyncStager
from terrazzo.checkpoint.storage import WriteResult, done
from terrazzo.checkpoint.stores import Place
from terrazzo.checkpoint.stores.base import ABSENT
from terrazzo.checkpoint.torch_api.items import rows_of
from terrazzo.errors import CheckpointError, CheckpointExistsError, UnsupportedValueError

__all__ = ["FileSystemWriter", "FsspecWriter"]

_FILE: Final = re.compile(r"__(?P<rank>[0-9]+)_(?P<save>[0-9a-f]{12})_(?P<number>[0-9]+)\.distcp")


class FileSystemWriter(BlockingAsyncStager, DCPWriter):
    """Writes checkpoints as PyTorch's writer of this name: `.metadata`, and `__0_0.distcp` and so on.

    A save over an existing checkpoint is one atomic operation, as in terrazzo's own format. With
    `save(..., use_collectives=False)` each rank has metadata of its own, `__0.metadata` and so on.

    Args:
        path: The folder, or its URL. `save(checkpoint_id=...)` replaces it.
        single_file_per_rank: Whether a rank writes one file (with several threads, one each), or one for each value.
        sync_files: Wait until everything is on the disk.
        thread_count: The number of threads that write.
        per_thread_copy_ahead: Ignored; for compatibility.
        cache_staged_state_dict: Keep the memory to which `async_save` copies for the next save.
        overwrite: Whether an existing checkpoint may be replaced.
    """

    writes_apart = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
    ) -> None:
        if _extensions:
            raise UnsupportedValueError("stream extensions cannot be read by terrazzo: leave _extensions out")
        if serialization_format.value != SerializationFormat.TORCH_SAVE.value:
            raise UnsupportedValueError(
                "PyTorch's FileSystemReader cannot load what its FileSystemWriter writes with "
                "SerializationFormat.SAFETENSORS: leave serialization_format out, or use HuggingFaceStorageWriter"
            )
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        DCPWriter.__init__(self, path, sync_files, overwrite)
        self.single_file_per_rank = single_file_per_rank
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.serialization_format = serialization_format
        self.rank: int | None = None
        self.use_collectives = True

    @property
    def transforms(self) -> Any:
        """What PyTorch's writer does to its streams: nothing. Classes that write files themselves pass it on."""
        return transforms_of_torch()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self._root = METADATA if self.use_collectives else f"__{self.rank}{METADATA}"
        super().set_up_storage_writer(is_coordinator)
        if not self.use_collectives and self.store.exists(METADATA):
            self._commit.release()
            raise CheckpointExistsError(
                f"{self.store.location} holds a checkpoint that all ranks saved together ({METADATA}), which would be "
                f"read instead of what each rank saves by itself: save to another folder"
            )

    def placed(self, plan: SavePlan, arranged: bytes, rank: int) -> SavePlan:
        return (
            plan if plan.storage_data is not None else replace(plan, storage_data=prefix_of_torch(self._prefix(rank)))
        )

    def _prefix(self, rank: int) -> str:
        """The beginning of PyTorch's names for the files of a rank of those that save together."""
        return f"__{rank if self.use_collectives else self.rank}_"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        arranged, rank = self._begun or (self.save_id.encode(), 0)
        if not arranged:
            raise CheckpointError("write_data comes after set_up_storage_writer and prepare_global_plan")
        prefix = getattr(plan.storage_data, "prefix", self._prefix(rank))
        return done(self._write_named(prefix, rows_of(plan.items, planner), arranged, rank))

    def write(self, rows: Sequence[Row], arranged: bytes, rank: int) -> list[WriteResult]:
        return self._write_named(self._prefix(rank), rows, arranged, rank)

    def _write_named(self, prefix: str, rows: Sequence[Row], arranged: bytes, rank: int) -> list[WriteResult]:
        self._name = f"{self._prefix(rank)}{arranged.decode()}"
        files = {f"{self._name}_{number}{SUFFIX}": part for number, part in enumerate(self._in_files(rows))}
        names = {file: f"{prefix}{number}{SUFFIX}" for number, file in enumerate(files)}
        return [
            replace(each, storage_data=replace(at, relative_path=names[at.relative_path], file=at.relative_path))
            for each in self._write_files(files, self.thread_count)
            for at in [each.storage_data]
        ]

    def _in_files(self, rows: Sequence[Row]) -> list[list[Row]]:
        """The rows in files: there is one at least, as PyTorch's ranks have a file even if they write nothing."""
        if not self.single_file_per_rank:
            return [[row] for row in rows]
        parts = [(0, number, list[Row]()) for number in range(max(self.thread_count, 1))]
        for row in rows if len(parts) == 1 else sorted(rows, key=lambda row: -row.form.nbytes):
            size, number, part = parts[0]
            part.append(row)
            heapq.heapreplace(parts, (size + row.form.nbytes, number, part))
        files: list[list[Row]] = []
        for _, _, part in sorted(parts, key=itemgetter(1)):
            files += super()._in_files(part) or [part]
        return files

    def finish(self, metadata: Metadata, results: list[Sequence[WriteResult]]) -> None:
        self._describe(metadata, results)
        named, names = metadata.storage_data, self._names_of(results)
        linked = self._commit.replacing is ABSENT and self._link(names)
        if not linked:
            files = {each.index: getattr(each.storage_data, "file", None) for part in results for each in part}
            metadata.storage_data = {
                index: replace(at, relative_path=files[index] or at.relative_path) for index, at in named.items()
            }
        try:
            self._put(metadata)
        except BaseException:
            if linked and self._commit.is_absent():
                self.store.delete(names)
            raise
        try:
            self.store.delete(self._replaced - files_named(metadata))
            if not linked and self.store.caps.in_place:
                # Files of saves that were killed: the checkpoint that is there now does not have them.
                self.store.delete(names.keys() - files_named(metadata))
                if self._link(names):
                    self._put(replace(metadata, storage_data=named))
                    metadata.storage_data, linked = named, True
            if linked:
                self.store.delete(names.values())
        except (OSError, CheckpointError) as error:  # the checkpoint is valid; the next save removes what is left
            LOGGER.warning("%s: data files do not all have their final names: %s", self.store.location, error)
        finally:
            self._commit.release()
        check_is_found(Place(self.store), "dcp")

    def _names_of(self, results: list[Sequence[WriteResult]]) -> dict[str, str]:
        """PyTorch's names of the files of this save, each with the one under which it was written; none if two files
        would have one name."""
        pairs = {
            (each.storage_data.relative_path, each.storage_data.file)
            for part in results
            for each in part
            if getattr(each.storage_data, "file", None) is not None  # else a subclass has written it itself
        }
        known = {file for _, file in pairs}
        for entry in self.store.list("__"):  # and those without any value
            match = _FILE.fullmatch(entry.key)
            if match is not None and match["save"] == self.save_id and entry.key not in known:
                pairs.add((f"__{match['rank']}_{match['number']}{SUFFIX}", entry.key))
        names = dict(pairs)
        return names if len(names) == len(pairs) else {}

    def _link(self, names: Mapping[str, str]) -> bool:
        """Give all files the names, if there are some, the store has links and no other file has one of them."""
        return (
            self.store.caps.in_place
            and bool(names)
            and all(self.store.adopt(self.store, file, name) == name for name, file in names.items())
        )


class FsspecWriter(WriterOfFsspec, FileSystemWriter):
    """A `FileSystemWriter` for a URL of `fsspec`. Further arguments go to the file system's constructor."""
