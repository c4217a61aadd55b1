"""Reading chunks: which bytes to ask a store for, together; and what to do with them when they are there.

All that reads data files goes this way. Runs that are near one another in a file become one request; requests are
made as the store can take them, so what is held at once is bounded; what has arrived is compared with its
checksums while it is in the cache, and copied to where it belongs.

A store of files is read by as many threads as make it faster, which is measured while they read: one is enough for two
processors and a disk of their own, sixteen are not too many for a file system behind a network. An object store, which
takes its time for each answer, is read by several from the beginning. Threads end with the read.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, Final

import msgspec
import torch
from torch.autograd.graph import increment_version

from terrazzo._threads import streams_of_this_thread
from terrazzo.checkpoint.native.finding import reading, room_for
from terrazzo.checkpoint.native.format import checksum, decode_frame
from terrazzo.checkpoint.native.root import FileEntry
from terrazzo.checkpoint.native.spans import Span, StoredChunk, WantedBox, spans
from terrazzo.checkpoint.native.tensors import OPAQUE, as_bytes, bytes_of, dtype_from_name
from terrazzo.checkpoint.stores.base import Request, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from terrazzo.layout.box import Box

_MOST_RUNS: Final = 500  # of one request: a system call takes 1024 buffers
_WINDOW: Final = 2 << 20  # bytes with gaps that pass through a buffer at once
_BUFFERS: Final = 64 << 20  # bytes of all buffers of requests that are under way at once
_AT_ONCE: Final = 16 << 20  # bytes of a tensor that one request reads
_ALIGNMENT: Final = 64
_MEASURED: Final = 64 << 20  # bytes that each thread reads, before their speed decides whether there should be more
_GAIN: Final = 1.1  # by how much twice as many threads have to be faster


class _Filling(msgspec.Struct, eq=False):
    """A tensor that is being filled by `left` runs."""

    target: torch.Tensor
    left: int = 1
    in_place: bool = False  # bytes are read into its memory, of which PyTorch does not know
    chunk: StoredChunk | None = None  # if it gets all bytes of a chunk whose CRC-32 is known


class _FileRun(msgspec.Struct, eq=False):
    """Bytes of a file on their way into `memory`: those of a chunk from `low` on, or (without a chunk) the header."""

    file: FileEntry
    start: int  # in the file
    nbytes: int
    chunk: StoredChunk | None = None
    low: int = 0
    filling: _Filling | None = None
    memory: memoryview | None = None  # where the bytes belong, if they can be read there
    span: Span | None = None  # what the elements are, if not
    part: Box | None = None  # of the target, unless it is all of it
    frames: Sequence[int] | None = None  # the stored bytes of each block, if they have to be decompressed
    staged: torch.Tensor | None = None  # the elements, in a buffer


class _Buffer:
    """Memory that requests are read into, one after the other."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.empty(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device="cpu")
        self._elements: dict[str, torch.Tensor] = {}
        self.memory = bytes_of(self._bytes)

    def elements(self, dtype: str) -> torch.Tensor:
        found = self._elements.get(dtype)
        if found is None:
            found = self._elements[dtype] = self._bytes.view(dtype_from_name(dtype))
        return found


class _Batch(msgspec.Struct, eq=False):
    """What one request brings: its runs, the buffer that some of them are read into, and its checks, if any."""

    runs: list[_FileRun]
    buffer: _Buffer | None
    checks: Generator[bool, int, None] | None


class Pace:
    """How many threads should read: `first`, then twice as many, up to `most`, for as long as that is faster.

    >>> times = iter([0.0, 1.0, 1.5, 2.5])  # the second thread makes it twice as fast, four are as fast as two
    >>> pace = Pace(16, clock=lambda: next(times))
    >>> pace.begin()
    >>> for nbytes in (_MEASURED, 2 * _MEASURED, 4 * _MEASURED):
    ...     pace.read(nbytes)
    ...     print(pace.threads)
    2
    4
    2
    """

    def __init__(self, most: int, first: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self.threads = first
        self._most = most
        self._clock = clock
        self._settled = most == first
        self._fastest = 0.0  # bytes per second, of half as many threads
        self._nbytes = 0  # since then
        self._since = 0.0

    def begin(self) -> None:
        """A read begins."""
        self._nbytes, self._since = 0, self._clock()

    def read(self, nbytes: int) -> None:
        """So many bytes more have been read, by all threads together."""
        self._nbytes += nbytes
        if self._settled or self._nbytes < _MEASURED * self.threads:
            return
        now = self._clock()
        speed = self._nbytes / max(now - self._since, 1e-9)
        if speed < self._fastest * _GAIN:
            self.threads, self._settled = self.threads // 2, True
        elif 2 * self.threads > self._most:
            self._settled = True
        else:
            self.threads, self._fastest = 2 * self.threads, speed
        self._nbytes, self._since = 0, now


class Requests:
    """Reads chunks of one checkpoint. Of each data file size and header are checked once, if `verify`."""

    def __init__(self, store: Store, *, verify: bool) -> None:
        self._store = store
        self._verify = verify
        self._limit = store.caps.request_bytes
        self._gap = store.caps.gap
        self._direct_limit = max(self._limit, store.caps.direct_bytes or 0)
        self._staged_limit = min(self._limit, _BUFFERS // store.caps.depth)  # of requests that need a buffer
        self._step = max(self._limit, _AT_ONCE)
        self._checked: set[str] = set()
        self._spans: dict[Any, list[Span]] = {}  # the same for all items of one box, shape and dtype
        self._spare: list[_Buffer] = []  # free buffers
        self._skipped = memoryview(bytearray(self._gap))  # memory for the bytes between runs, which are discarded
        self._pace = Pace(store.caps.readers, min(store.caps.depth, store.caps.readers))
        self._turn = threading.Lock()  # of the threads that read, to take a request and to count what has been read
        self.bytes_read = 0

    def read(self, wanted: Iterable[WantedBox]) -> None:
        """Read what is wanted, sorted by file and by offset in the file."""
        requests = self._requests(self._runs(wanted))
        others: list[threading.Thread] = []
        errors: list[BaseException] = []
        self._pace.begin()

        def own(number: int) -> Iterator[Request]:
            """What a thread carries out: the next request, until there are none or the thread is one too many. For the
            requests after it another thread begins, if there may be more."""
            while number < self._pace.threads and not errors:
                with self._turn:
                    request = next(requests, None)
                    if request is None:
                        return
                    if len(others) + 1 < self._pace.threads:
                        thread = threading.Thread(
                            target=_as_this_thread(), args=(work, len(others) + 1), name="terrazzo-read"
                        )
                        others.append(thread)
                        thread.start()
                yield request

        def work(number: int) -> None:
            try:
                with reading(self._store.location):
                    for request in self._store.read(own(number)):
                        self._take(request)
            except BaseException as error:  # noqa: B036  # raised below
                errors.append(error)

        try:
            work(0)
        finally:
            for thread in others:
                thread.join()
        if errors:
            raise errors[0]

    def _take(self, request: Request) -> None:
        """Check what a request has brought, and put it where it belongs."""
        batch: _Batch = request.owner
        changed: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        staged: list[torch.Tensor] = []
        complete: list[_Filling] = []
        if batch.checks is not None:
            all_checked = batch.checks.send(request.size)
            assert all_checked, "a request ends before its runs do"
        for run in batch.runs:
            if run.frames is not None:
                _decompress(run)
            if run.filling is not None and run.staged is not None:
                target, elements = _of_one_kind(run.filling, run, run.staged)
                targets.append(target)
                staged.append(elements)
        if targets:
            torch._foreach_copy_(targets, staged)
        with self._turn:
            self.bytes_read += request.size
            self._pace.read(request.size)
            if batch.buffer is not None:
                self._spare.append(batch.buffer)
            for run in batch.runs:
                filling = run.filling
                if filling is not None:
                    filling.left -= 1
                    if filling.left == 0 and filling.in_place:
                        complete.append(filling)
        for filling in complete:
            if filling.chunk is not None:
                self._check_crc(filling.chunk, filling.target)
            if not filling.target.is_inference():
                changed.append(filling.target)
        if changed:
            increment_version(changed)

    def release(self) -> None:
        """Give back the memory that is kept between reads."""
        self._spare, self._spans = [], {}

    # ------------------------------------------------- from what is wanted to requests

    def _runs(self, wanted: Iterable[WantedBox]) -> Iterator[_FileRun]:
        file = None
        for want in wanted:
            chunk = want.chunk
            if chunk.file is not file:
                file = chunk.file
                if file.name not in self._checked:
                    yield from self._file_checks(file)
            if chunk.codec:
                yield from self._compressed(want)
                continue
            places = self._spans_of(chunk, want.offsets, want.lengths)
            target, filling = want.memory, _Filling(want.memory)
            first = places[0]
            if (
                len(places) == 1
                and first.in_one_run
                and target.dtype == dtype_from_name(chunk.dtype)
                and target.is_cpu
                and target.is_contiguous()
            ):
                memory = bytes_of(target)
                filling.in_place = True
                if chunk.crc and first.high - first.low == chunk.nbytes:
                    filling.chunk = chunk
                if first.high - first.low <= self._step:
                    yield _FileRun(file, chunk.start + first.low, len(memory), chunk, first.low, filling, memory)
                else:
                    yield from self._in_place(chunk, first, memory, filling)
                continue
            if first.high - first.low > max(self._staged_limit, _WINDOW):  # too much for one buffer
                block = chunk.block if self._verify else 1
                places = self._spans_of(chunk, want.offsets, want.lengths, block)
            filling.left = len(places)
            for span in places:
                part = span.inside if len(places) > 1 else None
                start, nbytes = chunk.start + span.low, span.high - span.low
                yield _FileRun(file, start, nbytes, chunk, span.low, filling, None, span, part)

    def _compressed(self, want: WantedBox) -> Iterator[_FileRun]:
        """Runs of the blocks that have elements of the box; each is read as it is stored."""
        chunk = want.chunk
        places = self._spans_of(chunk, want.offsets, want.lengths, chunk.block)
        filling = _Filling(want.memory, len(places))
        for span in places:
            start, frames = chunk.stored(span.low, span.high)
            memory = room_for(self._store, chunk.file.name, sum(frames))
            yield _FileRun(chunk.file, start, len(memory), chunk, span.low, filling, memory, span, span.inside, frames)

    def _in_place(self, chunk: StoredChunk, span: Span, memory: memoryview, filling: _Filling) -> Iterator[_FileRun]:
        """Runs that are read where they belong; a large one in steps."""
        step = max(self._step // chunk.block, 1) * chunk.block
        starts = range(0, max(len(memory), 1), step)
        filling.left = len(starts)
        for start in starts:
            low, piece = span.low + start, memory[start : start + step]
            yield _FileRun(chunk.file, chunk.start + low, len(piece), chunk, low, filling, piece)

    def _spans_of(
        self, chunk: StoredChunk, offsets: Sequence[int], lengths: Sequence[int], block: int = 0
    ) -> list[Span]:
        key = (offsets, lengths, chunk.shape, chunk.strides, chunk.dtype, chunk.block, block)
        found = self._spans.get(key)
        if found is None:
            bounded, block = bool(block), block or (chunk.block if self._verify else 1)
            box, limit = Box(tuple(offsets), tuple(lengths)), max(self._staged_limit, _WINDOW)
            found = spans(chunk, box, block=block, gap=self._gap, limit=limit, bounded=bounded)
            self._spans[key] = found
        return found

    def _file_checks(self, file: FileEntry) -> Iterator[_FileRun]:
        if self._store.caps.in_place:  # asking for the size costs next to nothing
            try:
                size = self._store.stat(file.name).size
            except FileNotFoundError:
                size = file.size  # the request will say more
            if size != file.size:
                raise CheckpointCorruptError(
                    f"{self._store.location}/{file.name} has {size} bytes, it was written with {file.size}"
                )
        if self._verify:
            yield _FileRun(file, 0, file.header_size, memory=room_for(self._store, file.name, file.header_size))
        self._checked.add(file.name)

    def _requests(self, runs: Iterable[_FileRun]) -> Iterator[Request]:
        """Runs that are near one another in a file, together."""
        batch: list[_FileRun] = []
        end, limit = 0, self._direct_limit
        for run in runs:
            in_place = run.memory is not None and run.frames is None
            own_limit = self._direct_limit if in_place else self._staged_limit
            if batch:
                between = run.start - end
                together = run.start + run.nbytes - batch[0].start
                if (
                    run.file is not batch[0].file
                    or not 0 <= between <= self._gap
                    or together > min(limit, own_limit)
                    or len(batch) == _MOST_RUNS
                ):
                    yield self._request(batch)
                    batch, limit = [], self._direct_limit
            batch.append(run)
            limit = min(limit, own_limit)
            end = run.start + run.nbytes
        if batch:
            yield self._request(batch)

    def _request(self, runs: list[_FileRun]) -> Request:
        buffers = []
        buffer, used = None, 0
        room = sum([run.nbytes + _ALIGNMENT for run in runs if run.memory is None])
        if room:
            buffer = self._buffer(room)
        end = runs[0].start
        for run in runs:
            if run.start > end:
                buffers.append(self._skipped[: run.start - end])
            end = run.start + run.nbytes
            if run.memory is None and buffer is not None and run.chunk is not None and run.span is not None:
                run.memory = buffer.memory[used : used + run.nbytes]
                run.staged = _elements(buffer.elements(run.chunk.dtype), used, run.span, run.chunk.itemsize)
                used += -(-run.nbytes // _ALIGNMENT) * _ALIGNMENT
            assert run.memory is not None
            buffers.append(run.memory)
        if not self._verify:
            return Request(runs[0].file.name, runs[0].start, buffers, _Batch(runs, buffer, None))
        checks = self._checks(runs)
        next(checks)
        return Request(runs[0].file.name, runs[0].start, buffers, _Batch(runs, buffer, checks), checks.send)

    def _buffer(self, nbytes: int) -> _Buffer:
        while self._spare:
            buffer = self._spare.pop()
            if len(buffer.memory) >= nbytes:
                return buffer
        return _Buffer(max(nbytes, self._staged_limit + 64 * _ALIGNMENT))

    # ------------------------------------------------- when they are there

    def _checks(self, runs: list[_FileRun]) -> Generator[bool, int, None]:
        """Compare the blocks of a request with their checksums, as they arrive.

        `send` takes how many bytes are there, and returns whether all blocks have been compared. A run begins at a
        block and ends at one or at its chunk's end.
        """
        there = yield False
        begin = runs[0].start
        for run in runs:
            memory, chunk, at = run.memory, run.chunk, run.start - begin
            assert memory is not None
            if run.nbytes == 0:
                continue
            if chunk is None:
                while there < at + run.nbytes:
                    there = yield False
                if checksum(memory) != run.file.header_sum:
                    raise CheckpointCorruptError(
                        f"{self._store.location}/{run.file.name}: the header is not what was saved; the file is damaged"
                    )
                continue
            number = chunk.first_sum + run.low // chunk.block
            start = 0
            for end in _ends_of_blocks(run, chunk):
                while there < at + end:
                    there = yield False
                if checksum(memory[start:end]) != chunk.sums.item(number):
                    raise self._damage(run, chunk, start, end - start, number)
                start, number = end, number + 1
        while True:
            yield True

    def _damage(self, run: _FileRun, chunk: StoredChunk, start: int, nbytes: int, number: int) -> CheckpointError:
        """The error for a block whose sum has this number."""
        begin = run.start + start
        if run.filling is not None and run.filling.in_place:
            again = room_for(self._store, run.file.name, nbytes)
            self._store.read_at(run.file.name, begin, again)
            if checksum(again) == chunk.sums.item(number):
                return _overwritten(chunk)
        return CheckpointCorruptError(
            f"{chunk.name!r}: bytes {begin} to {begin + nbytes} of {self._store.location}/{run.file.name} are not what "
            f"was saved; the checkpoint is damaged (terrazzo verify lists all damage)"
        )

    def _check_crc(self, chunk: StoredChunk, data: torch.Tensor) -> None:
        crc = zlib.crc32(bytes_of(data))
        if crc != chunk.crc:
            piece, again = memoryview(bytearray(min(chunk.nbytes, _WINDOW))), 0
            for at in range(0, chunk.nbytes, _WINDOW):
                part = piece[: chunk.nbytes - at]
                self._store.read_at(chunk.file.name, chunk.start + at, part)
                again = zlib.crc32(part, again)
            if again == chunk.crc:
                raise _overwritten(chunk)
            raise CheckpointCorruptError(
                f"{self._store.location}/{chunk.file.name}: the bytes of {chunk.name!r} are not the bytes that were "
                f"written (CRC-32 {crc:08x}, expected {chunk.crc:08x})"
            )


def _overwritten(chunk: StoredChunk) -> CheckpointMismatchError:
    """The error for memory that does not hold what was read into it, where the file has the right bytes."""
    return CheckpointMismatchError(
        f"{chunk.name!r}: its memory was written to while it was read, so another value of the state dict has the same "
        f"memory, and other bytes in the checkpoint, or another thread writes there. Load each into a tensor of its "
        f"own; the checkpoint is not damaged"
    )


def _as_this_thread() -> Callable[..., None]:
    """What calls a function on another thread as here: with the same streams, and recording as little for autograd."""
    take_streams = streams_of_this_thread()
    with_grad, for_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def call(function: Callable[..., None], *arguments: Any) -> None:
        take_streams()
        with torch.inference_mode(for_inference), torch.set_grad_enabled(with_grad):
            function(*arguments)

    return call


def _ends_of_blocks(run: _FileRun, chunk: StoredChunk) -> Iterable[int]:
    """Where the blocks of a run end in its memory."""
    if run.frames is not None:
        return accumulate(run.frames)
    return chain(range(chunk.block, run.nbytes, chunk.block), (run.nbytes,))


def _decompress(run: _FileRun) -> None:
    chunk, span, stored = run.chunk, run.span, run.memory
    assert chunk is not None and span is not None and stored is not None and run.frames is not None
    raw = _Buffer(span.high - span.low)
    memory, at, position = raw.memory, 0, 0
    for size in run.frames:
        nbytes = min(chunk.block, span.high - span.low - position)
        memory[position : position + nbytes] = decode_frame(stored[at : at + size], nbytes, chunk.itemsize)
        at, position = at + size, position + nbytes
    run.staged = _elements(raw.elements(chunk.dtype), 0, span, chunk.itemsize)


def _of_one_kind(filling: _Filling, run: _FileRun, staged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a run fills, and its elements, in dtypes that torch can copy."""
    target = filling.target if run.part is None else filling.target[run.part.slices()]
    if target.dtype in OPAQUE or staged.dtype in OPAQUE:
        return as_bytes(target), as_bytes(staged)
    return target, staged


def _elements(whole: torch.Tensor, start: int, span: Span, itemsize: int) -> torch.Tensor:
    """The elements of a span whose bytes are in a buffer, from byte `start` on."""
    return whole.as_strided(span.geometry.lengths, span.geometry.strides, (start + span.first) // itemsize)
