"""The file systems of PyTorch's writers and readers: terrazzo's own use stores, but classes built on them may ask."""

from __future__ import annotations

import abc
import os
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any

from terrazzo.layout.drawing import ShownAsCall


class SerializationFormat(Enum):
    """How PyTorch's writers store tensors. Data files of terrazzo's format are safetensors files with either."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


class FileSystemBase(ShownAsCall, abc.ABC):
    """What PyTorch's writers and readers ask of a file system."""

    @contextmanager
    @abc.abstractmethod
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[IO[Any], None, None]:
        """A context manager with an open file."""
        yield from ()

    @abc.abstractmethod
    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        """The path of a file in a folder."""

    @abc.abstractmethod
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name; a file of this name is replaced."""

    @abc.abstractmethod
    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """The path as the other methods take it."""

    @abc.abstractmethod
    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Create a folder and those above it, unless they exist."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint with this id may be in such a file system."""

    @abc.abstractmethod
    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether there is a file or a folder."""

    @abc.abstractmethod
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file."""


class FileSystem(FileSystemBase):
    """The file system of this host.

    >>> import tempfile
    >>> fs = FileSystem()
    >>> path = fs.concat_path(tempfile.mkdtemp(), "a")
    >>> with fs.create_stream(path, "w") as file:
    ...     _ = file.write("text")
    >>> fs.exists(path)
    True
    """

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[IO[Any], None, None]:
        with Path(path).open(mode) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> Path:
        return Path(path) / suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        Path(path).rename(new_path)

    def init_path(self, path: str | os.PathLike[str]) -> Path:
        return Path(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        if isinstance(checkpoint_id, Path):
            return True
        above = Path(checkpoint_id).parents
        return "://" not in str(checkpoint_id) and any(each.exists() and os.access(each, os.W_OK) for each in above)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return Path(path).exists()

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink()

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """The paths of what is in a folder."""
        return [str(each) for each in Path(path).iterdir()]


__all__ = ["FileSystem", "FileSystemBase", "SerializationFormat"]
