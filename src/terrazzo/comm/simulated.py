"""Simulated ranks: one process acts as one rank of a large job, the other ranks do not exist.

PyTorch has a process group for that (`init_process_group("fake", rank=..., world_size=...)`), whose collectives return
at once without moving data, and `FakeTensorMode`, under which tensors have a shape and a device but no memory.
Together they show the layouts, the communicated bytes and the memory of one rank of a job of any size, on any device.

Values that terrazzo itself needs (the ranks of a mesh, keys of random tensors) stay real under that mode. Where other
ranks would send a message, this rank's own message stands in.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from terrazzo._torch.dispatching import real_values
from terrazzo.errors import CommError

__all__ = ["Echo", "is_simulated", "real_values"]


def is_simulated(group: ProcessGroup) -> bool:
    """Whether the other ranks of the group do not exist."""
    return dist.get_backend(group) == "fake"


class Echo:
    """Takes the place of a `Link` for simulated ranks: every rank answers with what this rank sent."""

    broken: str | None = None

    def __init__(self, size: int, index: int) -> None:
        self._size = size
        self._index = index

    def close(self) -> None:
        """Nothing to close."""

    def connected(self, timeout: timedelta) -> Echo:
        """This object: it cannot break."""
        return self

    living = connected

    def abandon(self, why: str) -> None:
        """Does nothing: no rank is waiting."""

    def all_gather(self, data: bytes, timeout: timedelta) -> list[bytes]:
        """The data of every rank."""
        return [data] * self._size

    def broadcast(self, data: bytes | None, src: int, timeout: timedelta) -> bytes:
        """The data of `src`, which has to be this rank."""
        if data is None:
            raise _silent(src)
        return data

    def gather(self, data: bytes, dst: int, timeout: timedelta) -> list[bytes] | None:
        """The data of every rank on `dst`."""
        return [data] * self._size if dst == self._index else None

    def scatter(self, parts: Sequence[bytes] | None, src: int, timeout: timedelta) -> bytes:
        """The part that `src`, which has to be this rank, has for this one."""
        if parts is None:
            raise _silent(src)
        return parts[self._index]


def _silent(src: int) -> CommError:
    return CommError(f"position {src} is simulated (process group 'fake'), so it cannot send data")
