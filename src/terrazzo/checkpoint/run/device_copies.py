"""Copies from accelerators to host memory, while training goes on.

Each device's copies run on a stream of their own, after the work that is queued on the current stream. The host waits
for an event on that stream, not for the whole device.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final

import torch

from terrazzo.checkpoint.run.events import LOGGER

_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for all devices


class ThisAccelerator:
    """What copies need of PyTorch's present accelerator; tests replace it."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ThisAccelerator, ()  # streams belong to this process

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def pin(self, memory: torch.Tensor) -> None:
        """Pin host memory that exists, such as shared memory, if the accelerator can do that."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != "cuda":  # torch has no function for others
            return
        storage = memory.untyped_storage()
        error = int(torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), _PORTABLE))
        if not error:
            weakref.finalize(storage, _unpin, storage.data_ptr(), os.getpid()).atexit = False
            return
        LOGGER.warning(
            "%d bytes of shared memory could not be pinned (CUDA error %d), so copies to it are slower; "
            "StagingOptions(use_shared_memory=False) stages in pinned memory of this process",
            storage.nbytes(),
            error,
        )
        with suppress(RuntimeError):  # CUDA keeps the error until a kernel starts, which then fails
            torch.ones(1, device=accelerator).add_(1)

    def beside(self, device: torch.device) -> AbstractContextManager[object]:
        """While the context lasts, work is queued on a separate stream, after the work that is queued now."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device=device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        return stream

    def wait(self, device: torch.device) -> None:
        """Wait until the work queued in `beside` is done."""
        self._streams[device].record_event().synchronize()


def _unpin(address: int, process: int) -> None:
    if process == os.getpid():  # a forked process has not pinned it, and cannot use CUDA
        torch.cuda.cudart().cudaHostUnregister(address)


def copy_from_devices(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], accelerator: ThisAccelerator
) -> None:
    """Copy each source to its target in host memory, and wait; queued copies are waited for also if one fails."""
    by_device: dict[torch.device, list[int]] = {}
    for number, source in enumerate(sources):
        by_device.setdefault(source.device, []).append(number)
    queued: list[torch.device] = []
    try:
        for device, numbers in by_device.items():
            if device.type == "cpu":
                continue
            queued.append(device)
            with accelerator.beside(device):
                for number in numbers:
                    targets[number].copy_(sources[number], non_blocking=True)
        for number in by_device.get(torch.device("cpu"), []):  # meanwhile the devices copy
            targets[number].copy_(sources[number])
    finally:
        for device in queued:
            accelerator.wait(device)
