"""Files that cannot be written by several processes: each has one owner, to whom the others send their parts.

A file is made window by window, each a few MB: all ranks send the owner what they have of the window, and the owner
puts it together and sends it on. Ranks do not wait for owners, so the owners of several files send at once.

A rank that fails goes on taking part, with nothing, so that no other waits for it; it raises when all is over.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import torch

from terrazzo.checkpoint.formats.huggingface.layout import About, WeightsLayout, runs_of
from terrazzo.checkpoint.native.rows import Row
from terrazzo.checkpoint.stores import Upload
from terrazzo.comm.control import ControlPlane
from terrazzo.errors import CheckpointError
from terrazzo.layout.box import boxes_of_flat_range

_WINDOW: Final = 8 << 20


def write_streamed(
    layout: WeightsLayout,
    rows: Sequence[Row],
    plane: ControlPlane,
    begin: Callable[[int], Upload],
    keep: Callable[[int, Upload], None],
    show_life: Callable[[], None],
) -> None:
    """Write all files; `begin` opens a file for its owner, and `keep` is given it when all is written.

    `show_life` is called again and again.
    """
    tried = _Tried()
    for first in range(0, len(layout.files), plane.size):
        wave = range(first, min(first + plane.size, len(layout.files)))
        senders = {number: _Sender(layout, number, rows) for number in wave}
        mine = next((number for number in wave if number % plane.size == plane.index), None)
        file: Upload | None = None if mine is None else tried(begin, mine)
        if file is not None and mine is not None:
            tried(file.write, 0, [memoryview(layout.files[mine].header)])
        for start in range(0, max(layout.files[number].data_size for number in wave), _WINDOW):
            show_life()
            for number in wave:
                size = min(layout.files[number].data_size - start, _WINDOW)
                if size <= 0:
                    continue
                begins = len(layout.files[number].header) + start
                part = tried(senders[number].window, begins, begins + size)
                try:
                    received = plane.gather(part or b"", number % plane.size)
                except BaseException:
                    if file is not None:
                        file.abort()
                    raise
                if received is not None and file is not None:
                    tried(_write_window, file, received, begins, size, layout.files[number].names)
        if file is not None and mine is not None:
            tried(keep, mine, file)
            if tried.failure is not None:
                file.abort()
    if tried.failure is not None:
        raise tried.failure


class _Tried:
    """Calls functions until one raises an error, which is raised when all ranks are done: until then they need this
    one."""

    failure: Exception | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.failure is None:
            try:
                return function(*arguments)
            except Exception as error:
                self.failure = error
        return None


class _Sender:
    """What this rank has of a file."""

    def __init__(self, layout: WeightsLayout, number: int, rows: Sequence[Row]) -> None:
        by_name: dict[str, list[Row]] = {}
        for row in rows:
            by_name.setdefault(row.name, []).append(row)
        names = [name for name in layout.files[number].names if name in by_name]
        self._slots = [layout.slots[name] for name in names]
        self._rows = [by_name[name] for name in names]
        self._ends = [slot.start + About(slot.dtype, slot.shape).nbytes for slot in self._slots]
        self._starts = [slot.start for slot in self._slots]
        self._last: tuple[Row, torch.Tensor] | None = None  # with its data: the next window wants it, too

    def window(self, begin: int, end: int) -> bytes:
        """The runs of bytes `begin` to `end` of the file that this rank has."""
        starts: list[int] = []
        lengths: list[int] = []
        payload = bytearray()
        for position in range(bisect_right(self._ends, begin), bisect_left(self._starts, end)):
            slot = self._slots[position]
            itemsize = slot.dtype.itemsize
            low = (max(begin, slot.start) - slot.start) // itemsize
            high = (min(end, self._ends[position]) - slot.start) // itemsize
            wanted = boxes_of_flat_range(slot.shape, low, high)
            for row in self._rows[position]:
                box = row.form.box
                parts = [part for each in wanted if (part := each.intersect(box)) is not None]
                if not parts:
                    continue
                data = self._data(row)
                for part in parts:
                    for start, memory in runs_of(data[part.relative_to(box).slices()], part, slot):
                        starts.append(start)
                        lengths.append(len(memory))
                        payload += memory
        return msgspec.msgpack.encode((starts, lengths, payload)) if starts else b""

    def _data(self, row: Row) -> torch.Tensor:
        if self._last is None or self._last[0] is not row:
            self._last = None
            self._last = row, row.tensor().detach()
        return self._last[1]


def _write_window(file: Upload, received: list[bytes], begin: int, size: int, names: Sequence[str]) -> None:
    """Write what the ranks have sent of `size` bytes, which must be all of them."""
    window = bytearray(size)
    there = 0
    for message in received:
        if not message:
            continue
        starts, lengths, payload = msgspec.msgpack.decode(message, type=tuple[list[int], list[int], bytes])
        position = 0
        for start, length in zip(starts, lengths, strict=True):
            window[start - begin : start - begin + length] = payload[position : position + length]
            position += length
        there += len(payload)
    if there != size:
        raise CheckpointError(
            f"of {size} bytes of a file with {', '.join(names[:3])} and more, the ranks have given {there}: they do "
            f"not have the same model, or one of them failed"
        )
    file.write(begin, [memoryview(window)])
