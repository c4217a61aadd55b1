"""Streams and marks of an accelerator. On CPU there are none: the host computes, and waits for results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from terrazzo.comm import wire
from terrazzo.fsdp.plan.operations import COLLECTIVES, WRITTEN, Mark, Operation, Stream


class Streams:
    """The streams of `device` on which communication runs beside its current stream, which computes; and the marks on
    all of them. The process's current device may be another one.

    A mark is the last event of its name, and memory that communication has allocated may be freed by a program that
    computes on several streams. So where there are several, what runs beside waits for all of them but the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = torch.get_device_module(device.type), device.index
        # High priority: what waits for room on the device beside computation begins first.
        self._beside: dict[Stream, Any] = {
            stream: self._device.Stream(device, priority=-1) for stream in Stream if stream is not Stream.COMPUTE
        }
        self._computing: list[Any] = []  # the streams that have been the current one
        self._marks: dict[Mark, Any] = {}

    def on_stream(self, operation: Operation, call: Callable[[], bool | None] | None) -> Callable[[], bool | None]:
        """`call` on the operation's stream, after waiting for its marks, and before recording its own mark, unless the
        call returns False."""
        device, marks = self._device, self._marks
        waits, records = operation.waits, operation.records
        beside = self._beside.get(operation.stream)
        starts = operation.kind in COLLECTIVES
        if call is not None and beside is None and not waits and records is None:
            return call  # most operations of a rank alone: to ask for the current stream takes microseconds

        def run() -> None:
            stream = self._current() if beside is None else self._behind_others(beside)
            for mark in waits:
                event = marks.get(mark)
                if event is not None:
                    stream.wait_event(event)
            found = None
            if call is not None:
                if beside is None:
                    found = call()
                else:
                    with device.stream(beside), wire.OnThisStream() if starts else nullcontext():
                        found = call()
            if records is not None and found is not False:
                marks[records] = self.mark_of(stream)

        return run

    @contextmanager
    def on(self, stream: Stream) -> Iterator[Any]:
        """Queue on this stream, which is given, instead of the current one, collectives too."""
        beside = self._behind_others(self._beside[stream])
        with self._device.stream(beside), wire.OnThisStream():
            yield beside

    def _current(self) -> Any:
        """The current stream, which computes."""
        stream = self._device.current_stream(self._index)
        if stream not in self._computing:
            self._computing.append(stream)
        return stream

    def _behind_others(self, beside: Any) -> Any:
        """This stream, which now waits for what other streams than the current one have computed."""
        if len(self._computing) > 1:
            current = self._current()
            for other in self._computing:
                if other != current:
                    beside.wait_stream(other)
        return beside

    def mark_of(self, stream: Any = None) -> Any:
        """An event after everything that is queued on a stream; by default on the device's current one."""
        event = self._device.Event()
        event.record(self._current() if stream is None else stream)
        return event

    def wait_for(self, stream: Stream) -> None:
        """Have the host wait for everything that is queued on a stream beside."""
        self.mark_of(self._beside[stream]).synchronize()

    def join(self) -> None:
        """Have the device's current stream wait for all others, so that what they use may be dropped, or used with
        other streams."""
        current = self._current()
        for stream in self._beside.values():
            current.wait_stream(stream)

    def begin_step(self, stepped: Any) -> None:
        """Record what the gather stream waits for: the user's event, or everything queued so far if it is None."""
        self._marks[WRITTEN] = self.mark_of() if stepped is None else stepped
