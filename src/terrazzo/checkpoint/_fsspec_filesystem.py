"""Checkpoints in file systems of `fsspec`, under PyTorch's names."""

from __future__ import annotations

import os
from typing import Any

from terrazzo.checkpoint.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from terrazzo.checkpoint.stores import Store
from terrazzo.checkpoint.stores.fsspec_store import FsspecStore

__all__ = ["FsspecReader", "FsspecWriter"]


class OfFsspec:
    """What writers and readers of a URL of `fsspec` have in common."""

    _settings: dict[str, Any]

    def _open_store(self, path: str | os.PathLike[str]) -> Store:
        return FsspecStore(os.fspath(path), **self._settings)

    def _path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        if not isinstance(checkpoint_id, str):
            return False
        import fsspec  # type: ignore[import-untyped]  # it has no types

        try:
            fsspec.url_to_fs(checkpoint_id)
        except ValueError:
            return False
        return True


class WriterOfFsspec(OfFsspec):
    """The constructor of writers for URLs of `fsspec`, whatever their format."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Any = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        **kwargs: Any,
    ) -> None:
        self._settings = kwargs
        super().__init__(  # type: ignore[call-arg]  # of the FileSystemWriter beside this class
            path,
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
        )


class FsspecWriter(WriterOfFsspec, FileSystemWriter):
    """A `FileSystemWriter` for a URL of `fsspec`. Further arguments go to the file system's constructor.

    >>> from terrazzo.checkpoint import save
    >>> import torch
    >>> _ = save({"w": torch.ones(2)}, storage_writer=FsspecWriter("memory://an/example"), no_dist=True)
    """


class FsspecReader(OfFsspec, FileSystemReader):
    """Reads checkpoints that an `FsspecWriter` wrote.

    >>> import torch
    >>> from terrazzo.checkpoint import load, save
    >>> _ = save({"w": torch.ones(2)}, storage_writer=FsspecWriter("memory://an/example"), no_dist=True)
    >>> target = {"w": torch.zeros(2)}
    >>> load(target, storage_reader=FsspecReader("memory://an/example"), no_dist=True)
    >>> target["w"]
    tensor([1., 1.])
    """

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        self._settings = kwargs
        super().__init__(path)
