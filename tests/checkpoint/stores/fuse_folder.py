"""A folder mounted by FUSE, spoken as the kernel does, without a library: what a network file system's client shows.

`mounted` needs a mount namespace of its own (`unshare --mount`) and root. Each mount has caches of its own, like a
host: what another mount of the same folder does is seen when `cached` seconds are over, and its locks never are.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

LARGEST: Final = 1 << 17  # bytes of a write
_HEAD: Final = struct.Struct("<IIQQ")  # of a request: length, operation, number, node
_FLOCKS: Final = 1 << 10  # of the answer to INIT: locks are asked for here, and not kept by the kernel
_SIZE, _MTIME, _MTIME_NOW = 8, 32, 256  # of SETATTR: what is set


class Folder:
    """The folder behind a mount.

    Args:
        path: the folder.
        cached: for how many seconds the kernel may remember names, absent ones too, and what files are like.
        plain: whether it has neither locks nor hard links, and cannot make a folder durable.
        room: bytes that may be written; None: any number.
    """

    def __init__(self, path: str, cached: int = 0, *, plain: bool = False, room: int | None = None) -> None:
        self.cached, self.plain, self.room = cached, plain, room
        self.paths = {1: os.path.abspath(path)}
        self.nodes = {self.paths[1]: 1}

    def serve(self, device: int) -> None:
        """Answer what the kernel asks, until the mount ends."""
        while True:
            try:
                request = os.read(device, LARGEST + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                raise
            length, operation, number, node = _HEAD.unpack_from(request)
            call: Callable[[int, bytes], bytes] | None = getattr(self, _NAMES.get(operation, ""), None)
            if operation in (2, 42, 36):  # FORGET, BATCH_FORGET, INTERRUPT have no answer
                continue
            failed, answer = 0, b""
            try:
                if call is None:
                    raise OSError(errno.ENOSYS, "")
                answer = call(node, request[40:length])
            except OSError as error:
                failed = error.errno or errno.EIO
            os.write(device, struct.pack("<IiQ", 16 + len(answer), -failed, number) + answer)

    # -------------------------------------------------------------- answers

    def _attributes(self, found: os.stat_result) -> bytes:
        times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
        seconds, parts = [t // 10**9 for t in times], [t % 10**9 for t in times]
        rest = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0)
        return struct.pack("<6Q10I", found.st_ino, found.st_size, found.st_blocks, *seconds, *parts, *rest)

    def _entry(self, path: str) -> bytes:
        found = os.lstat(path)
        node = self.nodes.setdefault(path, len(self.paths) + 1)
        self.paths[node] = path
        return struct.pack("<4Q2I", node, 0, self.cached, self.cached, 0, 0) + self._attributes(found)

    def _attr(self, found: os.stat_result) -> bytes:
        return struct.pack("<QII", self.cached, 0, 0) + self._attributes(found)

    def _in(self, node: int, name: bytes) -> str:
        return os.path.join(self.paths[node], os.fsdecode(name.rstrip(b"\0")))

    def _opened(self, fd: int) -> bytes:
        return struct.pack("<QII", fd, 0, 0)

    # -------------------------------------------------------------- operations

    def init(self, node: int, data: bytes) -> bytes:
        major, _, ahead, flags = struct.unpack_from("<4I", data)
        kept = flags & _FLOCKS if self.plain else 0
        return struct.pack("<4I2H2I2H8I", major, 31, ahead, kept, 12, 9, LARGEST, 1, 0, 0, *[0] * 8)

    def lookup(self, node: int, data: bytes) -> bytes:
        try:
            return self._entry(self._in(node, data))
        except FileNotFoundError:
            if self.cached:  # that it is absent is remembered, too
                return struct.pack("<4Q2I", 0, 0, self.cached, 0, 0, 0) + bytes(88)
            raise

    def getattr(self, node: int, data: bytes) -> bytes:
        by_handle, _, fd = struct.unpack_from("<IIQ", data)
        return self._attr(os.fstat(fd) if by_handle & 1 else os.lstat(self.paths[node]))

    def setattr(self, node: int, data: bytes) -> bytes:
        valid, _, _, size, _, _, mtime = struct.unpack_from("<2I5Q", data)
        path = self.paths[node]
        if valid & _SIZE:
            os.truncate(path, size)
        if valid & _MTIME_NOW:
            os.utime(path)
        elif valid & _MTIME:
            os.utime(path, (mtime, mtime))
        return self._attr(os.lstat(path))

    def mkdir(self, node: int, data: bytes) -> bytes:
        path = self._in(node, data[8:])
        os.mkdir(path)
        return self._entry(path)

    def unlink(self, node: int, data: bytes) -> bytes:
        path = self._in(node, data)
        os.unlink(path)
        self.nodes.pop(path, None)  # another file of this name is another node
        return b""

    def rmdir(self, node: int, data: bytes) -> bytes:
        os.rmdir(self._in(node, data))
        self.nodes.pop(self._in(node, data), None)
        return b""

    def rename(self, node: int, data: bytes, skip: int = 8) -> bytes:
        (folder,) = struct.unpack_from("<Q", data)
        old, new = data[skip:].rstrip(b"\0").split(b"\0")
        before, after = self._in(node, old), self._in(folder, new)
        os.replace(before, after)
        moved = self.nodes.pop(before, None)
        self.nodes.pop(after, None)
        if moved is not None:
            self.nodes[after], self.paths[moved] = moved, after
        return b""

    def rename2(self, node: int, data: bytes) -> bytes:
        return self.rename(node, data, 16)

    def link(self, node: int, data: bytes) -> bytes:
        if self.plain:
            raise OSError(errno.EOPNOTSUPP, "")
        (old,) = struct.unpack_from("<Q", data)
        path = self._in(node, data[8:])
        os.link(self.paths[old], path)
        return self._entry(path)

    def open(self, node: int, data: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", data)
        return self._opened(os.open(self.paths[node], flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOCTTY)))

    opendir = open

    def create(self, node: int, data: bytes) -> bytes:
        flags, mode = struct.unpack_from("<2I", data)
        path = self._in(node, data[16:])
        fd = os.open(path, flags, mode & 0o777)
        self.nodes.pop(path, None)
        return self._entry(path) + self._opened(fd)

    def read(self, node: int, data: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<2QI", data)
        return os.pread(fd, size, offset)

    def write(self, node: int, data: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<2QI", data)
        if self.room is not None:
            self.room -= size
            if self.room < 0:
                raise OSError(errno.ENOSPC, "")
        return struct.pack("<II", os.pwrite(fd, data[40 : 40 + size], offset), 0)

    def statfs(self, node: int, data: bytes) -> bytes:
        return struct.pack("<5Q4I", 1 << 30, 1 << 29, 1 << 29, 1 << 20, 1 << 19, 4096, 255, 4096, 0) + bytes(24)

    def release(self, node: int, data: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", data)[0])
        return b""

    releasedir = release

    def fsync(self, node: int, data: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", data)[0])
        return b""

    def flush(self, node: int, data: bytes) -> bytes:
        return b""

    def readdir(self, node: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<2QI", data)
        listed = b""
        for position, name in enumerate([".", "..", *sorted(os.listdir(self.paths[node]))][offset:], offset + 1):
            text = os.fsencode(name)
            entry = struct.pack("<2Q2I", 1, position, len(text), 0) + text
            entry += bytes(-len(entry) % 8)
            if len(listed) + len(entry) > size:
                break
            listed += entry
        return listed

    def fsyncdir(self, node: int, data: bytes) -> bytes:
        if self.plain:
            raise OSError(errno.EINVAL, "")
        return self.fsync(node, data)

    def setlk(self, node: int, data: bytes) -> bytes:
        raise OSError(errno.ENOLCK, "")

    setlkw = getlk = setlk


_NAMES: Final = {
    int(number): name
    for name, _, number in (
        pair.partition(":")
        for pair in (
            "lookup:1 getattr:3 setattr:4 mkdir:9 unlink:10 rmdir:11 rename:12 link:13 open:14 read:15 write:16 "
            "statfs:17 release:18 fsync:20 flush:25 init:26 opendir:27 readdir:28 releasedir:29 fsyncdir:30 getlk:31 "
            "setlk:32 setlkw:33 create:35 rename2:45"
        ).split()
    )
}


@contextmanager
def mounted(folder: str, at: str, **options: Any) -> Iterator[str]:
    """Mount a folder at another one, which is made, and served by a process of its own."""
    os.makedirs(at, exist_ok=True)
    device, libc = os.open("/dev/fuse", os.O_RDWR), ctypes.CDLL(None, use_errno=True)
    settings = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"terrazzo", os.fsencode(at), b"fuse", 0, settings):
        raise OSError(ctypes.get_errno(), "mount", at)
    server = os.fork()
    if server == 0:
        try:
            Folder(folder, **options).serve(device)
        finally:
            os._exit(0)
    os.close(device)
    try:
        yield at
    finally:
        libc.umount2(os.fsencode(at), 2)
        os.waitpid(server, 0)
