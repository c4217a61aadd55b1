"""Checkpoints in folders and at URLs, in terrazzo's format: `FileSystemWriter`, `FileSystemReader`."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from terrazzo.checkpoint.formats.registry import find
from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.native.rows import Target
from terrazzo.checkpoint.native.storage import NativeReader, NativeWriter
from terrazzo.checkpoint.native.writer import WriteOptions
from terrazzo.checkpoint.run.staging import BlockingAsyncStager
from terrazzo.checkpoint.stores import Store, is_url, store_at
from terrazzo.checkpoint.torch_api.file_systems import FileSystem, FileSystemBase, SerializationFormat
from terrazzo.errors import CheckpointNotFoundError, UnsupportedValueError

# The end of the names of data files in PyTorch's format, and its version.
DEFAULT_SUFFIX: Final = ".distcp"
CURRENT_DCP_VERSION: Final = "1.0.0"

__all__ = ["FileSystem", "FileSystemBase", "FileSystemReader", "FileSystemWriter", "SerializationFormat"]


def _option(name: str, lowest: int | None = None) -> Any:
    """One of the writer's options as an attribute; classes built on the writer read and set them."""

    def change(writer: Any, value: Any) -> None:
        value = value if lowest is None else max(value, lowest)
        writer.options = replace(writer.options, **{name: value})

    return property(lambda writer: getattr(writer.options, name), change)


class InFolder:
    """What writers and readers of a folder or a URL have in common."""

    path: str | Path
    store: Store
    _sync_files = True

    def _open_store(self, path: str | os.PathLike[str]) -> Store:
        return store_at(path, durable=self._sync_files)

    def _path(self, path: str | os.PathLike[str]) -> str | Path:
        return os.fspath(path) if is_url(path) else Path(path)

    @property
    def sync_files(self) -> bool:
        """Whether a save waits until everything is on the disk."""
        return self._sync_files

    @sync_files.setter
    def sync_files(self, value: bool) -> None:
        self._sync_files = value
        self.store = self._open_store(self.path)

    @cached_property
    def fs(self) -> Any:
        """PyTorch's view of the folder, for classes built on this one; ours uses `store`."""
        return FileSystem()

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is, or goes."""
        return self.path

    def _check_id(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        if checkpoint_id is not None:
            self.path, self.store = self._path(checkpoint_id), self._open_store(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a URL, or the path of a folder that exists or can be created."""
        if is_url(checkpoint_id):
            return True
        path = Path(checkpoint_id)
        return not path.exists() or path.is_dir()  # in this order, because another rank may create it in between


class FileSystemWriter(BlockingAsyncStager, InFolder, NativeWriter):
    """Writes checkpoints into folders, in terrazzo's format.

    A folder is a path, or a URL: `s3://bucket/prefix`, `gs://`, `az://` (see docs/stores.md). It has one checkpoint. A
    save replaces an existing checkpoint by one operation at the end; until then, and if the save fails or is killed at
    any point, the old checkpoint stays. With `overwrite=False` an existing checkpoint is an error.

    Args:
        path: The folder. `save(checkpoint_id=...)` replaces it.
        single_file_per_rank: Whether a rank writes one data file, or one for each tensor.
        sync_files: Wait until everything is on the disk. If False, a power failure may lose the checkpoint.
        thread_count: The number of threads that write.
        per_thread_copy_ahead: Bytes of buffer for tensors that have to be copied first (accelerator memory).
        cache_staged_state_dict: Keep the memory to which `async_save` copies for the next save.
        overwrite: Whether an existing checkpoint may be replaced.
        serialization_format: Ignored; for compatibility: data files are safetensors files.
        compression: Compress tensors (zstd, after shuffling their bytes): smaller files, slower saves.
    """

    single_file_per_rank = _option("single_file_per_rank")
    thread_count = _option("threads", lowest=1)
    per_thread_copy_ahead = _option("buffer_bytes")

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
        *,
        compression: bool = False,
    ) -> None:
        if _extensions:
            raise UnsupportedValueError("terrazzo's format has no stream extensions: leave _extensions out")
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        options = WriteOptions(single_file_per_rank, max(thread_count, 1), per_thread_copy_ahead, compression)
        self.serialization_format = serialization_format
        self._sync_files = sync_files
        NativeWriter.__init__(self, self._open_store(path), options, overwrite=overwrite)
        self.path = self._path(path)


class FileSystemReader(InFolder, NativeReader):
    """Reads checkpoints from folders and URLs: in terrazzo's format, and in another that is found there instead.

    Programs for PyTorch name a reader, also for what PyTorch has saved.
    """

    _other: Any = None  # the reader of a checkpoint of another format, of which users may add some

    def __init__(self, path: str | os.PathLike[str], _extension_registry: Any = None, *, verify: bool = True) -> None:
        super().__init__(self._open_store(path), verify=verify)
        self.path = self._path(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._other = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._other is None:
            self._manifest = None
            try:
                return super().read_metadata()
            except CheckpointNotFoundError:
                if not self._finds_other():
                    raise
        return self._other.read_metadata()  # which it has read, if `root` has asked before

    def _finds_other(self) -> bool:
        """Find the reader of a checkpoint of another format, if one is there."""
        found = find(self.store)
        if found is None or found[0].name == "native":  # of a run, whose folder this is
            return False
        self._other = found[0].reader(found[1])
        self._other.rank = self.rank
        return True

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator)
        if self._manifest is None and self._other is None:  # a subclass has kept the metadata of an earlier reader
            self._finds_other()
        if self._other is not None:
            self._other.set_up_storage_reader(metadata, is_coordinator)

    def fill(self, targets: Sequence[Target]) -> None:
        if self._other is None:
            super().fill(targets)
        else:
            self._other.fill(targets)
            self.bytes_read = self._other.bytes_read

    def values(self, names: Sequence[str], allow_pickle: bool) -> Iterator[io.BytesIO]:
        return super().values(names, allow_pickle) if self._other is None else self._other.values(names, allow_pickle)

    def digests(self) -> dict[str, bytes]:
        return super().digests() if self._other is None else {}
