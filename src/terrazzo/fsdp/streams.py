"""The stream on which an accelerator gathers, so that gathering overlaps with computation. On CPU there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class GatherStream:
    """A stream beside the current one.

    A gather's buffers are allocated on this stream and read on the current one.  They may be reused only when that is
    done, so the stream waits for the last copy out of such a buffer before it gathers again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.get_device_module(device.type)
        self._stream = self._device.Stream(device)
        self._last_copy: Any = None

    def wait_for_current(self) -> None:
        """Gather nothing before what was queued up to now is done: the optimizer writes the shards."""
        self._stream.wait_stream(self._device.current_stream())

    def wait_for(self, event: Any) -> None:
        """Gather nothing before the event."""
        self._stream.wait_event(event)

    def start(self, gather: Callable[[], object]) -> Any:
        """Start a gather here; the event after which what it converted is ready."""
        with self._device.stream(self._stream):
            if self._last_copy is not None:
                self._stream.wait_event(self._last_copy)
            gather()
            event = self._device.Event()
            event.record()
        return event

    def finish(self, event: Any, copy_out: Callable[[], None]) -> None:
        """Copy the result of a gather out, on the current stream."""
        self._device.current_stream().wait_event(event)
        copy_out()
        self._last_copy = self._device.Event()
        self._last_copy.record()
