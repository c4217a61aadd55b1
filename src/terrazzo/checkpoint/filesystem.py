"""Checkpoints in folders and behind URLs, in terrazzo's own format: `FileSystemWriter`, `FileSystemReader`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE
from terrazzo.checkpoint.native.storage import NativeReader, NativeWriter
from terrazzo.checkpoint.native.writer import WriteOptions
from terrazzo.checkpoint.run.staging import BlockingAsyncStager
from terrazzo.checkpoint.stores import Store, is_url, store_at
from terrazzo.errors import UnsupportedValueError

__all__ = ["FileSystemReader", "FileSystemWriter"]


class FileSystemWriter(BlockingAsyncStager, NativeWriter):
    """Writes checkpoints into folders, in the native format.

    A folder is one of a file system, or a URL: `s3://bucket/prefix`, `gs://`, `az://` (see docs/stores.md).  It holds
    one checkpoint.  Saving into one that holds a checkpoint replaces it, at the very end and at
    once: until then, and if the save fails or is killed at any point, the old one stays.  With
    `overwrite=False` it is an error.

    Args:
        path: The folder; `save(checkpoint_id=...)` names another.
        single_file_per_rank: One data file per rank, or one per tensor.
        sync_files: Wait until everything is on the disk; without it a loss of power may lose the checkpoint.
        thread_count: Threads that write at once.
        per_thread_copy_ahead: Bytes of buffer for what cannot be written from where it is (accelerator memory).
        cache_staged_state_dict: Keep the memory that `async_save` copies to, for the next time.
        overwrite: Whether a checkpoint that is there may be replaced.
        compression: Store tensors compressed (zstd, after shuffling their bytes): smaller, and slower to write.
    """

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
        *,
        compression: bool = False,
    ) -> None:
        if _extensions:
            raise UnsupportedValueError("the native format has no stream extensions")
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        options = WriteOptions(single_file_per_rank, max(thread_count, 1), per_thread_copy_ahead, compression)
        self._durable = sync_files
        NativeWriter.__init__(self, self._open_store(path), options, overwrite=overwrite)
        self.path = _path(path)

    def _open_store(self, path: str | os.PathLike[str]) -> Store:
        return store_at(path, durable=self._durable)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the next checkpoint goes."""
        return self.path

    def _check_id(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        if checkpoint_id is not None:
            self.path = _path(checkpoint_id)
            self.store = self._open_store(checkpoint_id)

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """A copy of the state dict in host memory: `async_save` writes this one."""
        return super().stage(state_dict)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_place(checkpoint_id)


class FileSystemReader(NativeReader):
    """Reads checkpoints of the native format from folders, and from URLs."""

    def __init__(self, path: str | os.PathLike[str], _extension_registry: Any = None, *, verify: bool = True) -> None:
        super().__init__(store_at(path), verify=verify)
        self.path = _path(path)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is read from."""
        return self.path

    def _check_id(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        if checkpoint_id is not None:
            self.path = _path(checkpoint_id)
            self.store = store_at(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_place(checkpoint_id)


def _path(path: str | os.PathLike[str]) -> str | Path:
    return os.fspath(path) if is_url(path) else Path(path)


def _is_place(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether this names a folder that is there or could be made, or something behind a URL."""
    if is_url(checkpoint_id):
        return True
    path = Path(checkpoint_id)
    return not path.exists() or path.is_dir()  # in this order: another rank may be making it
