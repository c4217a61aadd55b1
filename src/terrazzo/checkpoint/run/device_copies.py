"""Copies from accelerators to host memory, beside what training has queued.

Each device's copies run on a stream of their own, which begins when the stream that is current has done what is queued
on it, and the host waits for an event on that stream alone: never for all that the device does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Accelerator(Protocol):
    """What copies need of an accelerator; tests have a double of it."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that devices copy to by themselves."""
        ...

    def beside(self, device: torch.device) -> AbstractContextManager[object]:
        """What is queued inside runs after what is queued now, on a stream of its own."""
        ...

    def wait(self, device: torch.device) -> None:
        """Return when what was queued `beside` is done."""
        ...


class ThisAccelerator:
    """The one that PyTorch has."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ThisAccelerator, ()  # streams belong to this process

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def beside(self, device: torch.device) -> AbstractContextManager[object]:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device=device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        return stream

    def wait(self, device: torch.device) -> None:
        self._streams[device].record_event().synchronize()


def copy_from_devices(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], accelerator: Accelerator
) -> None:
    """Copy each source to its target in host memory; complete when this returns, also if a copy cannot be queued."""
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
        for number in by_device.get(torch.device("cpu"), []):  # while the devices copy
            targets[number].copy_(sources[number])
    finally:
        for device in queued:
            accelerator.wait(device)
