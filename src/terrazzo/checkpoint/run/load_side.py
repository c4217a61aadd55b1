"""The interface between a load and a storage reader, beyond PyTorch's interface.

A reader may have a `load_side()`, which returns an object with this interface. For other readers, including those built
on PyTorch's classes, `PlainSide` is used.
"""

from __future__ import annotations

from typing import Any, Protocol

from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.native.plans import ReadPlan, Receiver
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.errors import CheckpointError


class LoadSide(Protocol):
    """A reader, as a load uses it."""

    @property
    def plans_alone(self) -> bool:
        """Whether this reader does not need the global step."""
        ...

    @property
    def bytes_read(self) -> int:
        """The number of bytes read, if it is known."""
        ...

    @property
    def takes_roots(self) -> bool:
        """Whether one rank can read the checkpoint's root for all ranks."""
        ...

    def root(self) -> bytes:
        """The root of the present checkpoint; called only if the reader `takes_roots`."""
        ...

    def use_root(self, data: bytes) -> Metadata:
        """The metadata of the checkpoint with this root; `read` then reads this checkpoint, not a later one."""
        ...

    @property
    def takes_read_plans(self) -> bool:
        """Whether `read` carries out plans in the library's own form."""
        ...

    def read(self, plan: ReadPlan, receiver: Receiver) -> None:
        """Carry out a plan; called only if the reader `takes_read_plans`."""
        ...


class PlainSide:
    """A reader with PyTorch's interface only; it may have `plans_alone` and `bytes_read`."""

    takes_roots = False
    takes_read_plans = False

    def __init__(self, reader: StorageReader) -> None:
        self._reader = reader

    @property
    def plans_alone(self) -> bool:
        return getattr(self._reader, "plans_alone", False)

    @property
    def bytes_read(self) -> int:
        return getattr(self._reader, "bytes_read", 0)

    def root(self) -> bytes:
        raise CheckpointError("this storage reader has no root")

    def use_root(self, data: bytes) -> Metadata:
        raise CheckpointError("this storage reader has no root")

    def read(self, plan: ReadPlan, receiver: Receiver) -> None:
        raise CheckpointError("this storage reader reads items")


def side_of(reader: StorageReader) -> LoadSide:
    """The interface of a reader for a load."""
    own: Any = getattr(reader, "load_side", None)
    side: LoadSide = PlainSide(reader) if own is None else own()
    return side
