"""Ranks that do not exist: one process plays one rank of a large job.

PyTorch has a process group for that (`init_process_group("fake", rank=..., world_size=...)`), whose collectives return
at once and move nothing, and `FakeTensorMode`, under which tensors have a shape and a device and no memory.  Together
they show the layouts, the bytes on the wire and the memory of one rank of a job of any size, on any device.

What this library has to know as numbers (the ranks of a mesh, keys of random tensors) stays real under that mode, and
what ranks would tell each other is what this one says.
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
    """What a link is to ranks that exist: here all of them say what this one says."""

    broken: str | None = None

    def __init__(self, size: int, index: int) -> None:
        self._size = size
        self._index = index

    def close(self) -> None:
        """Nothing to close."""

    def connected(self, timeout: timedelta) -> Echo:
        """Itself: it cannot break."""
        return self

    living = connected

    def abandon(self, why: str) -> None:
        """Nothing: nobody waits."""

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
    return CommError(f"position {src} is simulated (process group 'fake'), so it has nothing to say")
