"""Files for what does not fit into memory, without names: the system frees them when the process ends, however it ends.

Reads and writes are divided into blocks, which a few threads do. Between them the same bytes are seen through memory
maps, whose pages the system reads and drops as it likes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.errors import StateFileError

PAGE = mmap.PAGESIZE
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_..., for which Python has no names
_SMALLEST = 64 << 20  # bytes of a file; each further one is as large as all before, so there are few


@dataclass(frozen=True, eq=False, slots=True)
class Region:
    """Whole pages of one file."""

    file: int
    start: int
    nbytes: int
    pages: mmap.mmap

    def mapped(self) -> Tensor:
        """Its bytes, as they are in the file, and are changed there."""
        return torch.frombuffer(self.pages, dtype=torch.uint8, count=self.nbytes, offset=self.start)


class Scratch:
    """Nameless files in a folder."""

    def __init__(self, folder: str, threads: int, block: int) -> None:
        self.folder = folder
        self._block = -(-block // PAGE) * PAGE
        self._pool = ThreadPoolExecutor(threads, "terrazzo-nvme")
        self._maps: list[mmap.mmap] = []
        self._file, self._used = -1, 0  # the last file, and how much of it is in use
        self._run(lambda: os.makedirs(folder, exist_ok=True), "creating the folder")
        self._run(lambda: tempfile.TemporaryFile(dir=folder).close(), "creating a file")

    def allocate(self, nbytes: int) -> Region:
        """A new region, of at least so many bytes; the disk has the room for them."""
        nbytes = -(-nbytes // PAGE) * PAGE
        if not self._maps or self._used + nbytes > len(self._maps[-1]):
            self._run(lambda: self._add(max(nbytes, _SMALLEST, sum(map(len, self._maps)))), "creating a file")
        region = Region(self._file, self._used, nbytes, self._maps[-1])
        self._run(lambda: os.posix_fallocate(region.file, region.start, nbytes), f"reserving {nbytes} bytes")
        self._used += nbytes
        return region

    def _add(self, nbytes: int) -> None:
        file = tempfile.TemporaryFile(dir=self.folder, buffering=0)
        weakref.finalize(self, file.close)
        self._file, self._used = file.fileno(), 0
        os.ftruncate(self._file, nbytes)  # which takes no room on the disk
        self._maps.append(mmap.mmap(self._file, nbytes))
        try:  # past the system's cache, which would take memory and a copy
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0))
        except OSError:
            pass  # not in every file system

    def read(self, region: Region, memory: Tensor) -> list[Future[None]]:
        """Begin to read a region into memory, which is aligned as `aligned` makes it."""
        return self._blocks(os.preadv, region, memory)

    def write(self, region: Region, memory: Tensor) -> list[Future[None]]:
        """Begin to write it."""
        return self._blocks(os.pwritev, region, memory)

    def _blocks(self, call: Callable[..., int], region: Region, memory: Tensor) -> list[Future[None]]:
        data = memory.numpy().data
        return [
            self._pool.submit(_all_of, call, region.file, data[at : at + self._block], region.start + at)
            for at in range(0, region.nbytes, self._block)
        ]

    def wait(self, begun: Iterable[Future[None]], doing: str) -> None:
        """Wait for reads or writes; raises the first error."""
        for each in begun:
            self._run(each.result, doing)

    def fetch_pages(self, mapped: Tensor, *, for_writing: bool) -> None:
        """Bring the pages of a tensor that `Region.mapped` sees into memory, so that an error of the disk is raised
        here, where later it would be a signal that ends the process."""
        start = mapped.data_ptr()
        for pages in self._maps:
            base = torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr()
            if base <= start < base + len(pages):
                first = (start - base) // PAGE * PAGE
                nbytes = start - base + mapped.nbytes - first
                self._run(partial(_populate, pages, first, nbytes, for_writing), "reading")

    def drop_pages(self) -> None:
        """Let go of the memory in which maps have been read or written; the files keep what is in it."""
        for pages in self._maps:
            pages.madvise(mmap.MADV_DONTNEED)

    def _run(self, call: Callable[[], object], doing: str) -> None:
        try:
            call()
        except OSError as error:
            rank = dist.get_rank() if dist.is_initialized() else 0
            advice = " Free space there, or choose another folder." if error.errno == errno.ENOSPC else ""
            raised = StateFileError(
                f"rank {rank}: {doing} for optimizer state in {self.folder!r} (offload_optimizer.nvme_path) failed: "
                f"{error.strerror or error}.{advice}"
            )
            raised.errno = error.errno
            raise raised from error


def _populate(pages: mmap.mmap, start: int, nbytes: int, for_writing: bool) -> None:
    try:
        pages.madvise(_POPULATE_WRITE if for_writing else _POPULATE_READ, start, nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.14 does not know it
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error


def _all_of(call: Callable[..., int], file: int, data: memoryview, start: int) -> None:
    while data:
        count = call(file, [data], start)
        if not count:
            raise OSError(errno.EIO, "the file is shorter than it was")
        data, start = data[count:], start + count


def aligned(nbytes: int) -> Tensor:
    """New memory that begins with a page."""
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu")
    return memory[-memory.data_ptr() % PAGE :][:nbytes]
