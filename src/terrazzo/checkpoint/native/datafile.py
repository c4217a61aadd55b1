"""Data files: valid safetensors files whose data begins at a page boundary; how rows are placed in one, and written.

A safetensors file is the length of a JSON header, the header, and the tensors' bytes without gaps. The header
is padded with spaces up to the page boundary. Chunks that fill whole pages come first, so all of them lie on
page boundaries; the rest follow by falling item size, so that every chunk is aligned for its dtype.

Rows are checksummed while they are in the cache, and written in few large writes, with little memory. CPU tensors are
written from where they are. What is not contiguous, or lives on an accelerator, passes through two small buffers
(pinned for an accelerator), of which one is filled while the other is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any, Final

import msgspec
import torch
import xxhash

from terrazzo.checkpoint.native.commit import read_manifest
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.format import BLOCK, PAGE, VERSION, adopted_name, checksum, chunk_suffix, encode_frame
from terrazzo.checkpoint.native.names import MARKER
from terrazzo.checkpoint.native.root import TENSOR, FileEntry
from terrazzo.checkpoint.native.rows import Row
from terrazzo.checkpoint.native.spans import StoredChunk
from terrazzo.checkpoint.native.tensors import as_bytes, bytes_of, dtype_name, safetensors_form
from terrazzo.checkpoint.run.events import LOGGER
from terrazzo.checkpoint.stores.base import Store, Upload
from terrazzo.errors import CheckpointNotFoundError
from terrazzo.layout.box import row_major_windows


@dataclass(frozen=True, slots=True)
class DataFileLayout:
    """A data file before it is written: its header, and where each row will begin.

    With a codec these are upper bounds, because the compressed sizes are not known yet.
    """

    header: bytes
    rows: tuple[Row, ...]
    starts: tuple[int, ...]
    size: int


def lay_out(rows: Sequence[Row], save_id: str) -> DataFileLayout:
    """Order the rows and place them in a file."""
    ordered = tuple(sorted(rows, key=lambda row: (row.form.nbytes % PAGE != 0, -row.form.dtype.itemsize)))
    sizes = [row.form.nbytes for row in ordered]
    header = file_header(ordered, sizes, save_id)
    *starts, end = accumulate(sizes, initial=len(header))
    return DataFileLayout(header, ordered, tuple(starts), end)


def file_header(rows: Sequence[Row], stored: Sequence[int], save_id: str, size: int | None = None) -> bytes:
    """The header of a file in which the rows have so many bytes; padded to a page, or to `size`."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "terrazzo": str(VERSION), "save_id": save_id}}
    position = 0
    said: dict[int, tuple[str, list[int], str]] = {}  # by form, which many rows share
    for row, nbytes in zip(rows, stored, strict=True):
        form = row.form
        known = said.get(id(form))
        if known is None:
            offsets, lengths = form.box.offsets, form.box.lengths
            suffix = chunk_suffix(offsets, lengths, form.shape)
            known = said[id(form)] = (*safetensors_form(form.dtype, lengths), suffix)
        code, shape, suffix = known
        if form.codec:
            code, shape, suffix = "U8", [nbytes], suffix + "#zstd"
        key = row.name + suffix
        if key in entries:  # a tensor may be named like a slice of another
            key = next(free for number in count(2) if (free := f"{key}#{number}") not in entries)
        entries[key] = {"dtype": code, "shape": shape, "data_offsets": (position, position + nbytes)}
        position += nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-(len(text) + 8) % PAGE if size is None else size - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


# ------------------------------------------------------------------ writing one


# One write: large enough that its cost does not matter, small enough to stay in the cache between checksum and write.
_PIECE: Final = 4 * BLOCK
# The same beside a main thread that computes: after each write a thread waits for the interpreter's lock, 5 ms if the
# main thread does not release it, so writes have to be few.
_PIECE_BESIDE: Final = 256 * BLOCK
_FRAMES: Final = 32 * BLOCK  # compressed bytes, which need memory, that are written at once
_HASHED_AT_ONCE: Final = 64 << 10  # xxhash releases the lock, too, for more than 100 kB
_MAX_BUFFERS: Final = 1000


class WrittenRow(msgspec.Struct, eq=False, gc=False):
    """A row where it lies: `nbytes` from `start` on in a file, and the checksum of each block.

    `frames` has the stored bytes of each block, if the row has a codec.
    """

    row: Row
    start: int
    nbytes: int
    sums: list[int]
    frames: list[int]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A data file that is complete, and its rows; of a file that another checkpoint has, too, those of this one."""

    entry: FileEntry
    rows: list[WrittenRow]


class Pump:
    """Writes rows that follow one another in a file; one per thread. `written` has them afterwards."""

    def __init__(self, file: Upload, start: int, buffer_bytes: int) -> None:
        self._file = file
        beside = threading.current_thread() is not threading.main_thread()
        self._piece = _PIECE_BESIDE if beside else _PIECE
        self._checksum = _checksum_beside if beside else checksum
        self._end = start
        # With how many bytes of each have one checksum, where these go, and what owns the memory.
        self._waiting: list[tuple[memoryview, int, list[int], object]] = []
        self._buffer_bytes = max(buffer_bytes // BLOCK, 1) * BLOCK
        self.written: list[WrittenRow] = []

    def write(self, rows: Sequence[Row]) -> None:
        """Write the data of the rows, one after the other."""
        end, waiting = self._end, 0
        for row in rows:
            written = WrittenRow(row, end, 0, [], [])
            self.written.append(written)
            limit = min(self._piece, _FRAMES) if row.form.codec else self._piece
            for data, owner, block in self._pieces(written):
                if owner is None:
                    self._flush(self._file.give)
                self._waiting.append((data, block, written.sums, owner))
                end, waiting = end + len(data), waiting + len(data)
                if owner is None or waiting >= limit or len(self._waiting) >= _MAX_BUFFERS:
                    self._flush(self._file.write if owner is None else self._file.give)
                    waiting = 0
            written.nbytes = end - written.start
        self._flush(self._file.give)

    def _flush(self, put: Callable[[int, Sequence[memoryview]], None]) -> None:
        """Write the pieces that wait.

        Their checksums are all computed now, not while the pieces are gathered: many of PyTorch's functions release the
        interpreter's lock, too, and often have to wait for it if the main thread wants it.
        """
        if self._waiting:
            for data, block, sums, _ in self._waiting:
                if len(data) <= block:
                    sums.append(self._checksum(data))
                else:
                    for start in range(0, len(data), block):
                        sums.append(self._checksum(data[start : start + block]))
            pieces = [data for data, _, _, _ in self._waiting]
            put(self._end, pieces)
            self._end += sum(map(len, pieces))
            self._waiting = []

    def _pieces(self, written: WrittenRow) -> Iterator[tuple[memoryview, object, int]]:
        """The bytes of a row: pieces of memory, what owns it (None: it will be used again), and a block's length."""
        row, form = written.row, written.row.form
        data = row.tensor() if row.kind == TENSOR else row.data()
        owner: object = data
        pieces: Iterable[Any] = [data]
        if row.kind == TENSOR:
            if data.is_cpu and data.is_contiguous() and not data.is_conj() and not data.is_neg():
                pieces = [bytes_of(data)]
            else:
                owner, pieces = None, self._through_buffers(as_bytes(data), form.block)
        for piece in pieces:
            piece = memoryview(piece)
            if form.codec:
                for start in range(0, len(piece), form.block):
                    frame = encode_frame(piece[start : start + form.block], form.dtype.itemsize)
                    written.frames.append(len(frame))
                    yield memoryview(frame), frame, len(frame)
            elif owner is None:
                if piece:  # it may be less than a block, which comes with the next one
                    yield piece, None, form.block
            else:
                for start in range(0, len(piece), self._piece):
                    yield piece[start : start + self._piece], owner, form.block

    def _through_buffers(self, tensor: torch.Tensor, block: int) -> Iterator[memoryview]:
        """The tensor's elements in row-major order as pieces of host memory, each good until two pieces later.

        All but the last have whole blocks: the bytes that are left of a piece come at the beginning of the next one.
        """
        windows = _flat_windows(tensor, self._buffer_bytes // tensor.dtype.itemsize)
        on_device = tensor.device.type != "cpu"
        size = block + max(window.nbytes for window in windows)
        buffers = [
            torch.empty(size, dtype=torch.uint8, pin_memory=on_device, device="cpu")
            for _ in range(min(2, len(windows)))
        ]
        left = b""
        ahead: tuple[torch.Tensor, int, torch.Event | None] | None = None
        for i, window in enumerate(windows):
            buffer = buffers[i % 2]
            target = buffer[block : block + window.nbytes].view(tensor.dtype)
            target.view(window.shape).copy_(window, non_blocking=on_device)
            # Not `torch.Event(device).record()`: that is recorded on the current device, whatever the tensor's is.
            event = torch.accelerator.current_stream(tensor.device).record_event() if on_device else None
            if ahead is not None:
                piece = _arrived(*ahead, block, left)
                left = bytes(piece[len(piece) // block * block :])
                yield piece[: len(piece) - len(left)]
            ahead = (buffer, window.nbytes, event)
        if ahead is not None:
            yield _arrived(*ahead, block, left)


def _checksum_beside(data: memoryview) -> int:
    """The checksum, without releasing the interpreter's lock."""
    if len(data) <= _HASHED_AT_ONCE:
        return checksum(data)
    state = xxhash.xxh3_64(data[:_HASHED_AT_ONCE])
    for start in range(_HASHED_AT_ONCE, len(data), _HASHED_AT_ONCE):
        state.update(data[start : start + _HASHED_AT_ONCE])
    return state.intdigest()


def _arrived(buffer: torch.Tensor, nbytes: int, event: torch.Event | None, block: int, left: bytes) -> memoryview:
    """The bytes that have been copied into a buffer behind the room of a block, after those that were left before."""
    if event is not None:
        event.synchronize()
    memory, start = bytes_of(buffer), block - len(left)
    memory[start:block] = left
    return memory[start : block + nbytes]


def _flat_windows(tensor: torch.Tensor, limit: int) -> list[torch.Tensor]:
    """Views of at most `limit` elements whose row-major elements, one after the other, are the tensor's."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return list(tensor.reshape(-1).split(limit)) or [tensor.reshape(-1)]
    return [tensor[box.slices()] for box in row_major_windows(tensor.shape, limit)]


# ------------------------------------------------------------------ what is stored already


# A file is not adopted if less than this part of it is still used: its used chunks are written again.
_WORTH_KEEPING: Final = 0.25


class _Nowhere(Upload):
    """An upload that discards its bytes, for computing checksums only."""

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""

    def abort(self) -> None:
        """Nothing."""


def find_unchanged(
    rows: Sequence[Row], store: Store, base: Store, buffer_bytes: int, save_id: str
) -> tuple[list[Row], list[WrittenFile]]:
    """Which of the rows have to be written; and files of the base that `store` has adopted, with the others.

    The save's id is for the adopted files' names.
    """
    try:
        root = read_manifest(base)
    except FileNotFoundError as error:
        if base.exists(MARKER):  # as a save without base= under install(), with which an incremental series begins
            LOGGER.warning("base: %s is in PyTorch's format, so its files are not shared", base.location)
            return [*rows], []
        raise CheckpointNotFoundError(f"base: there is no committed checkpoint at {base.location}") from error
    stored = PartIndexes(root, base).by_box((row.name, row.form.box) for row in rows)
    candidates: list[tuple[Row, StoredChunk]] = []
    for row in rows:
        found = stored.get((row.name, row.form.box))
        if found is not None and _is_same(row, found, buffer_bytes):
            candidates.append((row, found))
    adopted = _adopted([found for _, found in candidates], store, base, save_id)
    settled: set[int] = set()
    for row, found in candidates:
        file = adopted.get(found.file.name)
        if file is not None:
            file.rows.append(WrittenRow(row, found.start, found.nbytes, *_numbers(found)))
            settled.add(id(row))
    return [row for row in rows if id(row) not in settled], [*adopted.values()]


def _is_same(row: Row, stored: StoredChunk, buffer_bytes: int) -> bool:
    form = row.form
    alike = (dtype_name(form.dtype), form.nbytes, form.block, form.codec) == (
        stored.dtype,
        stored.nbytes,
        stored.block,
        stored.codec,
    )
    if not alike or form.nbytes == 0:
        return False
    pump = Pump(_Nowhere(), 0, buffer_bytes)
    pump.write([row])
    (written,) = pump.written
    return (written.sums, written.frames) == _numbers(stored)


def _adopted(found: Sequence[StoredChunk], store: Store, base: Store, save_id: str) -> dict[str, WrittenFile]:
    """The files that are worth keeping and that the store has adopted, yet without rows, by their names in the base."""
    files = {each.file.name: each.file for each in found}
    used = dict.fromkeys(files, 0)
    for each in found:
        used[each.file.name] += each.nbytes
    adopted: dict[str, WrittenFile] = {}
    for name, file in files.items():
        if used[name] >= _WORTH_KEEPING * (file.size - file.header_size) and _has_its_size(base, file):
            key = store.adopt(base, name, adopted_name(save_id, name))
            if key is not None:
                adopted[name] = WrittenFile(msgspec.structs.replace(file, name=key), [])
    return adopted


def _has_its_size(base: Store, file: FileEntry) -> bool:
    """Whether a file of the base is there with the size that was written. Its bytes are not read: that would take as
    long as a load, and `verify` does it."""
    try:
        return base.stat(file.name).size == file.size
    except FileNotFoundError:
        return False


def _numbers(stored: StoredChunk) -> tuple[list[int], list[int]]:
    """The checksums and stored lengths of a chunk's blocks."""
    sums = stored.sums[stored.first_sum :][: stored.blocks].tolist()
    frames = stored.frames[stored.first_frame :][: stored.blocks].tolist() if stored.codec else []
    return sums, frames
