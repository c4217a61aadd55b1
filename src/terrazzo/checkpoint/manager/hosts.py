"""The local folders of all hosts of a run as one store.

Every rank writes to its own host. Each file is also sent to the next host (a replica) before it counts as written; the
manifest is on all hosts. A rank reads a file from its own host if it is there, else from a host that has it. So if a
host is lost, any number of ranks on any hosts can load the checkpoint.

A host may come back with an empty disk, or with files of an older run. So a manifest is valid only if all files that it
names exist on some host; of several valid ones, the one that was committed last is used.

Each host serves its folder (`comm.serving`) to the ranks of the run, which exchange the servers' addresses and secrets
over the process group. Only folders of steps and plain file names are accepted, so no other files can be reached.
"""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Any, Final

import msgspec

from terrazzo.checkpoint.manager.committing import Teams
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.names import is_plain_name, step_of_name
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.stores import LARGEST, Absent, Entry, Lease, MemoryUpload, Request, Store, Upload, Version
from terrazzo.checkpoint.stores.base import check_size, version_of, write_pieces
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.comm.addresses import listen_at, own_address
from terrazzo.comm.serving import LONGEST, PIECE, Address, Client, Server
from terrazzo.errors import CheckpointCorruptError, CheckpointError

# Copies files of a step's folder, which has this name, to the root, by `copy_intact`.
SendOn = Callable[[str, Sequence[str]], Sequence[str]]
_MARK: Final = "host-"
_PATIENCE: Final = 60.0  # seconds without a message from another host
# The operations of a store that another host carries out as they are.
_PLAIN_CALLS: Final = frozenset("delete delete_ended folders is_link lease_ended list remove_folder stat sync".split())
_RESULTS: Final[dict[str, Any]] = {"list": list[Entry], "stat": Entry}


class _Folder:
    """The operations on a folder of this host, for the others."""

    def __init__(self, store: LocalStore, send_on: SendOn) -> None:
        self._store = store
        self._send_on = send_on

    def close(self) -> None:
        """Do nothing: a connection holds nothing."""

    def answer(self, operation: str, arguments: tuple[Any, ...], follows: Iterable[bytearray]) -> Any:
        """Carry out an operation on the folder, or on that of a step, whose name is the first argument."""
        folder, *rest = arguments
        store = self._step(folder) if folder else self._store
        plain = rest if operation == "list" else [_plain(each) for each in rest]  # which gets a prefix, no name
        match operation, plain:
            case "read", [key, int(start), int(size)]:
                buffer = bytearray(min(size, LONGEST))
                store.read_at(key, start, memoryview(buffer))
                return buffer
            case "get", [key]:
                return bytearray(store.get(key)[0])
            case "file", [key]:
                store.prepare()
                return write_pieces(store, key, follows)
            case "adopt", [other, key, name]:
                store.prepare()
                return store.adopt(self._step(other), key, name)
            case "send_on", [[*keys]]:
                return self._send_on(folder, keys)
        if operation in _PLAIN_CALLS:
            return getattr(store, operation)(*plain)
        raise ValueError(f"there is no operation {operation}{tuple(rest)}")

    def _step(self, name: str) -> LocalStore:
        if step_of_name(name) is None:
            raise ValueError(f"{name!r} is not the folder of a step")
        return self._store.beneath(name)


def _plain(value: Any) -> Any:
    """The value, if the names in it are plain."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, str) and ("/" in value or not is_plain_name(value)):
        raise ValueError(f"{value!r} is not a plain file name")
    return value


def serve_folder(store: LocalStore, host: str, timeout: float, send_on: SendOn) -> Server:
    """Serve a folder of this host."""
    folder = _Folder(store, send_on)
    return Server(listen_at(host), secrets.token_bytes(32), lambda: folder, timeout)


def _there(operation: str) -> Any:
    """A store's operation, as that host carries it out."""

    def call(store: PeerStore, *arguments: Any) -> Any:
        plain = [each if isinstance(each, str | int | float) else list(each) for each in arguments]
        return msgspec.convert(store._call(operation, *plain), _RESULTS.get(operation, Any))

    return call


class PeerStore(Store):
    """The folder of another host, through its server."""

    delete, delete_ended, remove_folder, sync = map(_there, ("delete", "delete_ended", "remove_folder", "sync"))
    folders, is_link, lease_ended, list, stat = map(_there, ("folders", "is_link", "lease_ended", "list", "stat"))

    def __init__(self, client: Client, folder: str = "") -> None:
        self._client = client
        self.folder = folder

    @property
    def location(self) -> str:
        return f"{self._client.address}/{self.folder}"

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, operation: str, *arguments: Any, **bytes_with_it: Any) -> Any:
        return self._client.call(operation, self.folder, *arguments, **bytes_with_it)

    def beneath(self, name: str) -> PeerStore:
        return PeerStore(self._client, name)

    def get(self, key: str, most: int = LARGEST) -> tuple[bytearray, Version]:
        check_size(self, key, self.stat(key).size, most)
        return self._call("get", key), Version("")  # `put` of that host finds the version itself

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        self._call("file", key, data=[memoryview(data)], follows=len(data))
        return Version("")

    def upload(self, key: str, size: int) -> Upload:
        return MemoryUpload(size, lambda data: self.put(key, data))

    def send(self, key: str, path: str | os.PathLike[str]) -> None:
        """Send a file of this host there."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            pieces = iter(lambda: memoryview(file.read(PIECE)), memoryview(b""))
            self._call("file", key, data=pieces, follows=size)

    def send_on(self, keys: Sequence[str]) -> Sequence[str]:
        """Make that host copy files to the root; returns what `copy_intact` does there."""
        return msgspec.convert(self._call("send_on", [*keys]), Sequence[str])

    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            position = request.start
            for part in (each[at : at + PIECE] for each in request.buffers for at in range(0, len(each), PIECE)):
                self._call("read", request.key, position, len(part), into=part)
                position += len(part)
            yield request

    def adopt(self, other: Store, key: str, name: str) -> str | None:
        return self._call("adopt", other.folder, key, name) if isinstance(other, PeerStore) else None


def _everywhere(operation: str) -> Any:
    """A removal of files, on all hosts."""

    def call(store: HostsStore, keys: Iterable[str]) -> None:
        named = [*keys]
        for host in store.all if named else ():
            getattr(host, operation)(named)

    return call


@dataclass(eq=False)
class HostsStore(Store):
    """The local folders of all hosts as one store."""

    own: LocalStore  # the folder of this rank's host
    others: tuple[PeerStore, ...]  # those of the other hosts, the next one first
    replicas: int  # how many other hosts get a copy of each file
    leads: bool  # whether this rank is the first one of its host
    server: Server | None = None  # of this host, if this process has it
    folder: str = ""  # the name of the step's folder
    # By folder: this host's manifest, if all its files were found. They stay, as hosts do not leave during a run.
    _known: dict[str, Entry] = field(default_factory=dict)

    caps = LocalStore.caps
    delete, delete_ended = map(_everywhere, ("delete", "delete_ended"))

    def close(self) -> None:
        """Close the connections and the server."""
        for each in (self.server, *self.others):
            if each is not None:
                each.close()

    @property
    def all(self) -> tuple[LocalStore | PeerStore, ...]:
        """All hosts' folders, this rank's host first."""
        return (self.own, *self.others)

    def holders(self, keys: Iterable[str]) -> dict[str, list[LocalStore | PeerStore]]:
        """The hosts that have each file."""
        there = [(host, {entry.key for entry in host.list()}) for host in self.all]
        return {key: [host for host, names in there if key in names] for key in keys}

    def holder(self, key: str) -> LocalStore | PeerStore:
        """The first host that has a file."""
        for host in self.all:
            if host.exists(key):
                return host
        raise FileNotFoundError(f"no host has {self.folder}/{key}")

    @property
    def location(self) -> str:
        return self.own.location

    def prepare(self) -> None:
        self.own.prepare()

    def beneath(self, name: str) -> HostsStore:
        others = tuple(other.beneath(name) for other in self.others)
        return replace(self, own=self.own.beneath(name), others=others, folder=name)

    def folders(self) -> Sequence[str]:
        return sorted({name for host in self.all for name in host.folders()})

    def upload(self, key: str, size: int) -> Upload:
        def replicate() -> None:
            for other in self.others[: self.replicas]:
                other.send(key, self.own.path / key)

        upload = self.own.upload(key, size)
        upload.then = replicate
        return upload

    def list(self, prefix: str = "") -> list[Entry]:
        found = sorted((entry for host in self.all for entry in host.list(prefix)), key=lambda entry: entry.modified)
        return [*{entry.key: entry for entry in found}.values()]

    def stat(self, key: str) -> Entry:
        if key != MANIFEST:
            return self.holder(key).stat(key)
        with suppress(FileNotFoundError):
            entry = self.own.stat(MANIFEST)
            if self._known.get(self.folder) == entry:
                return entry
        host, _ = self._whole()
        entry = host.stat(MANIFEST)
        if host is self.own:
            self._known[self.folder] = entry
        return entry

    def get(self, key: str, most: int = LARGEST) -> tuple[bytes | bytearray, Version]:
        data = self._whole()[1] if key == MANIFEST else self.holder(key).get(key, most)[0]
        return data, version_of(data)

    def _whole(self) -> tuple[LocalStore | PeerStore, bytes | bytearray]:
        """A host that has the valid manifest, and the manifest."""
        found: list[tuple[float, str, LocalStore | PeerStore, bytes | bytearray]] = []
        files: set[tuple[str, int]] | None = None
        none: Exception = FileNotFoundError(f"no host has a complete checkpoint in {self.folder or self.location}")
        for host in self.all:
            try:
                data = host.get(MANIFEST)[0]
                root = Root(data, host.location)
            except FileNotFoundError:
                continue
            except CheckpointCorruptError as error:  # on this host; of another release it is on none
                none = error
                continue
            if files is None:
                files = {(entry.key, entry.size) for each in self.all for entry in each.list()}
            if root.files.items() <= files:
                found.append((root.head.created, root.head.save_id, host, data))
        if not found:
            raise none
        return max(found, key=lambda each: each[:2])[2:]

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        self._check_version(key, only_if)
        for host in self.all:
            host.put(key, data)
        return version_of(data)

    def delete_if(self, key: str, version: Version) -> None:
        self._check_version(key, version)
        self.delete([key])

    def is_link(self, name: str) -> bool:
        return any(host.is_link(name) for host in self.all)

    def remove_folder(self, name: str) -> None:
        if self.is_link(name):
            return
        folder = self.beneath(name)
        with suppress(CheckpointError):  # leave a damaged checkpoint
            if not folder.exists(MANIFEST):  # the manifest may be left if a host with files was lost
                folder.delete([MANIFEST])
        for host in self.all:
            host.remove_folder(name)

    def sync(self) -> None:
        for host in self.all:
            with suppress(FileNotFoundError):  # a host that came back with an empty disk has no such folder
                host.sync()

    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        holder = cache(self.holder)
        for host, several in groupby(requests, lambda request: holder(request.key)):
            yield from host.read(several)

    def lease(self, key: str) -> Lease:
        self.own.prepare()  # the files may be on other hosts
        return self.own.lease(key)

    def renew_lease(self, key: str) -> None:
        self.own.renew_lease(key)

    def leases_expire(self) -> bool:
        return self.own.leases_expire()

    def lease_ended(self, key: str, last_sign: float) -> bool:
        return all(host.lease_ended(key, last_sign) for host in self.all if host.exists(key))

    def adopt(self, other: Store, key: str, name: str) -> str | None:
        if not isinstance(other, HostsStore):
            return None
        pairs = [(here, there) for here, there in zip(self.all, other.all, strict=True) if there.exists(key)]
        if len(pairs) <= min(self.replicas, len(self.others)):  # a host was lost: write it again, with its replicas
            return None
        for here, _ in pairs:
            here.prepare()
        return name if all(here.adopt(there, key, name) for here, there in pairs) else None


def connect(own: LocalStore, send_on: SendOn, replicas: int, ranks: Teams) -> HostsStore:
    """All hosts of a run, `own` of which is this one's. Ranks that see the same folder are on one host. Collective."""
    team = ranks.team(f"looking for the other hosts of {own.location}")
    name = f"{_MARK}{uuid.uuid4().hex[:12]}"
    home = team.rank  # the first rank of this host
    server: Server | None = None

    def mark() -> bytes:
        own.prepare()
        own.put(name, b"")
        return name.encode()

    def look() -> bytes:
        nonlocal home, server
        seen = {entry.key for entry in own.list(_MARK)}
        home = min(position for position, mark in enumerate(marks) if mark in seen)
        if home == team.rank:
            own.delete(seen - set(marks))  # left by runs that were killed
            if not seen.issuperset(marks):
                server = serve_folder(own, own_address(), _PATIENCE, send_on)
        return msgspec.msgpack.encode((home, None if server is None else server.address))

    def of_all(step: Callable[[], bytes]) -> list[bytes]:
        return msgspec.msgpack.decode(team.reduce(step, msgspec.msgpack.encode), type=list[bytes])

    try:
        marks = [each.decode() for each in of_all(mark)]
        homes = [msgspec.msgpack.decode(each, type=tuple[int, Address | None]) for each in of_all(look)]
    except BaseException:
        if server is not None:
            server.close()
        raise
    finally:
        own.delete([name])
    addresses = [address for _, address in (*homes[home + 1 :], *homes[:home])]  # the next host's first
    others = tuple(PeerStore(Client(address, _PATIENCE)) for address in addresses if address is not None)
    return HostsStore(own, others, replicas, home == team.rank, server)
