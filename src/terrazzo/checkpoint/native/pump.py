"""Writing rows into a data file: checksummed while they are in the cache, in few large writes, with little memory.

CPU tensors are written from where they are. What is not contiguous, or lives on an accelerator, passes through two
small buffers (pinned for an accelerator), of which one is filled while the other is written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import xxhash

from terrazzo.checkpoint.native.codec import encode_frame
from terrazzo.checkpoint.native.datafile import row_major_windows
from terrazzo.checkpoint.native.dtypes import as_bytes
from terrazzo.checkpoint.native.format import BLOCK, checksum
from terrazzo.checkpoint.native.memory import bytes_of
from terrazzo.checkpoint.native.root import TENSOR
from terrazzo.checkpoint.native.rows import Form, Row
from terrazzo.checkpoint.stores.base import Upload
from terrazzo.errors import CheckpointError

# One write: large enough that its cost does not matter, small enough to stay in the cache between checksum and write.
_PIECE: Final = 4 * BLOCK
# The same beside a main thread that computes: after each write a thread waits for the interpreter's lock, 5 ms if the
# main thread does not release it, so writes have to be few.
_PIECE_BESIDE: Final = 256 * BLOCK
_FRAMES: Final = 32 * BLOCK  # compressed bytes, which need memory, that are written at once
_HASHED_AT_ONCE: Final = 64 << 10  # xxhash releases the lock, too, for more than 100 kB
_MAX_BUFFERS: Final = 1000


class Pump:
    """Writes rows that follow one another in a file; one per thread.

    Afterwards `starts` has where each row begins, `stored` how many bytes it has there, `sums` the checksums of all
    blocks, and `frames` the stored bytes of the blocks of rows that have a codec.
    """

    def __init__(self, file: Upload, start: int, buffer_bytes: int) -> None:
        self._file = file
        beside = threading.current_thread() is not threading.main_thread()
        self._piece = _PIECE_BESIDE if beside else _PIECE
        self._checksum = _checksum_beside if beside else checksum
        self._written = start
        self._waiting: list[tuple[memoryview, int]] = []  # and how many bytes of each have one checksum
        self._waiting_bytes = 0
        self._kept: list[object] = []  # what owns the waiting memory
        self._buffer_bytes = max(buffer_bytes // BLOCK, 1) * BLOCK
        self.starts: list[int] = []
        self.stored: list[int] = []
        self.sums: list[int] = []
        self.frames: list[int] = []

    def write(self, rows: Sequence[Row]) -> None:
        """Write the data of the rows, one after the other."""
        start = self._written + self._waiting_bytes
        for row in rows:
            self.starts.append(start)
            data = row.data()
            if row.kind == TENSOR:
                self._add_tensor(row, data)
            else:
                self._add(memoryview(data), data, row.form)
            end = self._written + self._waiting_bytes
            self.stored.append(end - start)
            start = end
        self.flush()

    def _add_tensor(self, row: Row, tensor: Any) -> None:
        form = row.form
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != form.dtype or tensor.shape != form.box.lengths:
            raise _broken_promise(row, tensor)
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            self._add(bytes_of(tensor), tensor, form)
        else:
            self._add_through_buffers(as_bytes(tensor), form)

    def _add(self, data: memoryview, owner: object, form: Form) -> None:
        nbytes, block = len(data), form.block
        if form.codec:
            for start in range(0, nbytes, block):
                self._add_frame(data[start : start + block], form)
        elif 0 < nbytes <= self._piece:
            self._queue(data, owner, block)
        else:
            for start in range(0, nbytes, self._piece):
                self._queue(data[start : start + self._piece], owner, block)

    def _add_frame(self, data: memoryview, form: Form) -> None:
        frame = encode_frame(data, form.dtype.itemsize)
        self.frames.append(len(frame))
        self._queue(memoryview(frame), frame, len(frame))
        if self._waiting_bytes >= _FRAMES:
            self.flush()

    def _queue(self, data: memoryview, owner: object, block: int) -> None:
        self._waiting.append((data, block))
        self._kept.append(owner)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= self._piece or len(self._waiting) >= _MAX_BUFFERS:
            self.flush()

    def flush(self) -> None:
        """Write the pieces that wait in the buffer.

        Their checksums are all computed now, not while the pieces are gathered: many of PyTorch's functions release the
        interpreter's lock, too, and often have to wait for it if the main thread wants it.
        """
        if self._waiting:
            for data, block in self._waiting:
                if len(data) <= block:
                    self.sums.append(self._checksum(data))
                else:
                    for start in range(0, len(data), block):
                        self.sums.append(self._checksum(data[start : start + block]))
            self._file.give(self._written, [data for data, _ in self._waiting])
            self._written += self._waiting_bytes
            self._waiting, self._kept, self._waiting_bytes = [], [], 0

    def _add_through_buffers(self, tensor: torch.Tensor, form: Form) -> None:
        if form.codec:
            frame = bytearray()
            for piece in self._through_buffers(tensor):
                frame += piece
                while len(frame) >= form.block:
                    self._add_frame(memoryview(bytes(frame[: form.block])), form)
                    del frame[: form.block]
            if frame:
                self._add_frame(memoryview(bytes(frame)), form)
            return
        sums = BlockSums(form.block)
        self.flush()
        for piece in self._through_buffers(tensor):
            sums.update(piece)
            self._file.write(self._written, [piece])  # the buffer will be used again
            self._written += len(piece)
        self.sums += sums.finish()

    def _through_buffers(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The tensor's elements in row-major order as pieces of host memory, each good until two pieces later."""
        limit = self._buffer_bytes // tensor.dtype.itemsize
        windows = _flat_windows(tensor, limit)
        on_device = tensor.device.type != "cpu"
        size = min(max(window.numel() for window in windows), limit)
        buffers = [
            torch.empty(size, dtype=tensor.dtype, pin_memory=on_device, device="cpu")
            for _ in range(min(2, len(windows)))
        ]
        ahead: tuple[torch.Tensor, torch.Event | None] | None = None
        for i, window in enumerate(windows):
            target = buffers[i % 2][: window.numel()]
            target.view(window.shape).copy_(window, non_blocking=on_device)
            # Not `torch.Event(device).record()`: that is recorded on the current device, whatever the tensor's is.
            event = torch.accelerator.current_stream(tensor.device).record_event() if on_device else None
            if ahead is not None:
                yield _arrived(*ahead)
            ahead = (target, event)
        if ahead is not None:
            yield _arrived(*ahead)


def _checksum_beside(data: memoryview) -> int:
    """The checksum, without releasing the interpreter's lock."""
    if len(data) <= _HASHED_AT_ONCE:
        return checksum(data)
    state = xxhash.xxh3_64(data[:_HASHED_AT_ONCE])
    for start in range(_HASHED_AT_ONCE, len(data), _HASHED_AT_ONCE):
        state.update(data[start : start + _HASHED_AT_ONCE])
    return state.intdigest()


class BlockSums:
    """The checksums of a chunk's blocks, from pieces of any size."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._sums: list[int] = []
        self._state = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        """The chunk's next bytes."""
        while data:
            part = data[: self._block - self._filled]
            self._state.update(part)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == self._block:
                self._next()

    def finish(self) -> list[int]:
        """The checksums, when all bytes have been seen."""
        if self._filled:
            self._next()
        return self._sums

    def _next(self) -> None:
        self._sums.append(self._state.intdigest())
        self._state.reset()
        self._filled = 0


def _arrived(buffer: torch.Tensor, event: torch.Event | None) -> memoryview:
    if event is not None:
        event.synchronize()
    return bytes_of(buffer)


def _flat_windows(tensor: torch.Tensor, limit: int) -> list[torch.Tensor]:
    """Views of at most `limit` elements whose row-major elements, one after the other, are the tensor's."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return list(tensor.reshape(-1).split(limit)) or [tensor.reshape(-1)]
    return [tensor[box.slices()] for box in row_major_windows(tensor.shape, limit)]


def _broken_promise(row: Row, data: object) -> CheckpointError:
    got = (
        f"a {data.dtype} tensor of shape {tuple(data.shape)}" if isinstance(data, torch.Tensor) else type(data).__name__
    )
    return CheckpointError(
        f"{row.name!r}: the plan promised a {row.form.dtype} tensor of shape {row.form.box.lengths}, but the planner's "
        f"resolve_data gave {got}; a planner that converts data must change the items of its plan as well"
    )
