"""What a load asks of a storage reader beyond PyTorch's interface: the one protocol between sessions and readers.

A reader that has a `load_side()` takes part as what that returns.  Any other one, also one built on PyTorch's classes,
takes part as a `PlainSide`.
"""

from __future__ import annotations

from typing import Any, Protocol

from terrazzo.checkpoint.metadata import Metadata
from terrazzo.checkpoint.native.plans import ReadPlan, Receiver
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.errors import CheckpointError


class LoadSide(Protocol):
    """A reader as a load sees it."""

    @property
    def plans_alone(self) -> bool:
        """Whether ranks need not send their plans to the coordinator for this reader's sake."""
        ...

    @property
    def bytes_read(self) -> int:
        """How many bytes have been read, as far as that is known."""
        ...

    @property
    def takes_roots(self) -> bool:
        """Whether one rank can read the checkpoint's root for all of them."""
        ...

    def root(self) -> bytes:
        """The root of the checkpoint that is there now; asked only if it `takes_roots`."""
        ...

    def use_root(self, data: bytes) -> Metadata:
        """The metadata of the checkpoint of this root, which is then read, and no later one."""
        ...

    @property
    def takes_read_plans(self) -> bool:
        """Whether `read` carries out plans in the library's own form."""
        ...

    def read(self, plan: ReadPlan, receiver: Receiver) -> None:
        """Carry out a plan; asked only if it `takes_read_plans`."""
        ...


class PlainSide:
    """Any reader that knows PyTorch's interface only; it may say `plans_alone`, and count `bytes_read`."""

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
    """How a reader takes part in a load."""
    own: Any = getattr(reader, "load_side", None)
    side: LoadSide = PlainSide(reader) if own is None else own()
    return side
