"""The local folders of all hosts of a run as one store.

Every rank writes to its own host. Each file is also sent to the next host (a replica) before it counts as written; the
manifest is on all hosts. A rank reads a file from its own host if it is there, else from a host that has it. So if a
host is lost, any number of ranks on any hosts can load the checkpoint.

A host may come back with an empty disk, or with files of an older run. So a manifest is valid only if all files that it
names exist on some host; of several valid ones, the one that was committed last is used.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Final

import msgspec

from terrazzo.checkpoint.manager.committing import AllRanks
from terrazzo.checkpoint.manager.peers import PeerStore, SendOn, serve_folder
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.run.coordination import find_team
from terrazzo.checkpoint.stores import LARGEST, Absent, Entry, Lease, Request, Store, Upload, Version
from terrazzo.checkpoint.stores.base import version_of
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.comm.addresses import own_address
from terrazzo.comm.serving import Address, Client, Server
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointManagerError

_MARK: Final = "host-"
_PATIENCE: Final = 60.0  # seconds without a message from another host


class HostsStore(Store):
    """The local folders of all hosts as one store.

    Attributes:
        own: the folder of this rank's host.
        others: the folders of the other hosts, the next one first.
        leads: whether this rank is the first one of its host.
    """

    caps = LocalStore.caps

    def __init__(
        self,
        own: LocalStore,
        others: tuple[PeerStore, ...],
        replicas: int,
        *,
        leads: bool,
        server: Server | None = None,
    ) -> None:
        """`replicas` is the number of other hosts that get a copy of each file, `server` that of this host."""
        self.own = own
        self.others = others
        self.leads = leads
        self._replicas = replicas
        self._server = server
        self._folder = ""
        # By folder: this host's manifest, if all its files were found. They stay, as hosts do not leave during a run.
        self._known: dict[str, Entry] = {}

    def close(self) -> None:
        """Close the connections and the server."""
        if self._server is not None:
            self._server.close()
        for other in self.others:
            other.close()

    @property
    def all(self) -> tuple[LocalStore | PeerStore, ...]:
        """All hosts' folders, this rank's host first."""
        return (self.own, *self.others)

    def holders(self, keys: Iterable[str]) -> dict[str, list[LocalStore | PeerStore]]:
        """The hosts that have each file."""
        there = [(host, {entry.key for entry in host.list()}) for host in self.all]
        return {key: [host for host, names in there if key in names] for key in keys}

    @property
    def location(self) -> str:
        return self.own.location

    def prepare(self) -> None:
        self.own.prepare()

    def beneath(self, name: str) -> HostsStore:
        store = copy.copy(self)
        store.own, store.others = self.own.beneath(name), tuple(other.beneath(name) for other in self.others)
        store._folder = name
        return store

    def folders(self) -> Sequence[str]:
        return sorted({name for host in self.all for name in host.folders()})

    def upload(self, key: str, size: int) -> Upload:
        def replicate() -> None:
            for other in self.others[: self._replicas]:
                other.send(key, self.own.path / key)

        upload = self.own.upload(key, size)
        upload.then = replicate
        return upload

    def list(self, prefix: str = "") -> list[Entry]:
        found: dict[str, Entry] = {}
        for host in self.all:
            for entry in host.list(prefix):
                known = found.get(entry.key)
                if known is None or known.modified < entry.modified:
                    found[entry.key] = entry
        return list(found.values())

    def stat(self, key: str) -> Entry:
        if key != MANIFEST:
            return self.holder(key).stat(key)
        with suppress(FileNotFoundError):
            entry = self.own.stat(MANIFEST)
            if self._known.get(self._folder) == entry:
                return entry
        host = self._whole()[0]
        entry = host.stat(MANIFEST)
        if host is self.own:
            self._known[self._folder] = entry
        return entry

    def holder(self, key: str) -> LocalStore | PeerStore:
        """The first host that has a file."""
        found = next((host for host in self.all if host.exists(key)), None)
        if found is None:
            raise FileNotFoundError(f"no host has {self._folder}/{key}")
        return found

    def get(self, key: str, most: int = LARGEST) -> tuple[bytes | bytearray, Version]:
        if key == MANIFEST:
            data = self._whole()[1]
        else:
            data = self.holder(key).get(key, most)[0]
        return data, version_of(data)

    def _whole(self) -> tuple[LocalStore | PeerStore, bytes | bytearray]:
        """The valid manifest, and a host that has it."""
        found: list[tuple[float, str, LocalStore | PeerStore, bytes | bytearray]] = []
        files: set[tuple[str, int]] | None = None
        errors: list[CheckpointCorruptError] = []
        for host in self.all:
            try:
                data = host.get(MANIFEST)[0]
                manifest = Root(data, host.location)
            except FileNotFoundError:
                continue
            except CheckpointCorruptError as error:  # on this host; of another release it is on none
                errors.append(error)
                continue
            if files is None:
                files = {(entry.key, entry.size) for each in self.all for entry in each.list()}
            if manifest.files.items() <= files:
                found.append((manifest.head.created, manifest.head.save_id, host, data))
        if found:
            newest = max(found, key=lambda each: each[:2])
            return newest[2], newest[3]
        if errors:
            raise errors[0]
        raise FileNotFoundError(f"no host has a complete checkpoint in {self._folder or self.location}")

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:
        self._check_version(key, only_if)
        self.own.put(key, data)
        for other in self.others:
            other.put(key, data)
        return version_of(data)

    def delete(self, keys: Iterable[str]) -> None:
        named = list(keys)
        for host in self.all if named else ():
            host.delete(named)

    def delete_ended(self, keys: Iterable[str]) -> None:
        named = list(keys)
        for host in self.all if named else ():
            host.delete_ended(named)

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
        known: dict[str, LocalStore | PeerStore] = {}

        def host_of(request: Request) -> LocalStore | PeerStore:
            if request.key not in known:
                known[request.key] = self.holder(request.key)
            return known[request.key]

        for host, several in groupby(requests, host_of):
            yield from host.read(several)

    def lease(self, key: str) -> Lease:
        self.own.prepare()  # the files may be on other hosts
        return self.own.lease(key)

    def renew_lease(self, key: str) -> None:
        self.own.renew_lease(key)

    def lease_ended(self, key: str, last_sign: float) -> bool:
        return all(host.lease_ended(key, last_sign) for host in self.all if host.exists(key))

    def adopt(self, other: Store, key: str, name: str) -> str | None:
        if not isinstance(other, HostsStore):
            return None
        found = None
        for here, there in zip(self.all, other.all, strict=True):
            if there.exists(key):
                here.prepare()
                found = here.adopt(there, key, name) or found
        return found


# ------------------------------------------------------------------ connecting the hosts


def connect(own: LocalStore, send_on: SendOn, replicas: int, ranks: AllRanks) -> HostsStore:
    """Connect the hosts of a run. Ranks that see the same folder are on the same host. Collective.

    Args:
        own: the folder of this rank's host.
        send_on: copies files of a step's folder to the root.
        replicas: the number of other hosts that get a copy of each file.
    """
    if not 0 <= replicas:
        raise CheckpointManagerError(f"replicas must be a number of other hosts, 0 or more, not {replicas}")
    rank = find_team(ranks.group, alone=True).rank
    name = f"{_MARK}{uuid.uuid4().hex[:12]}"
    doing = f"looking for the other hosts of {own.location}"
    home = rank  # the first rank of this host
    server: Server | None = None

    def mark() -> bytes:
        own.prepare()
        own.put(name, b"")
        return name.encode()

    def look() -> bytes:
        nonlocal home, server
        seen = {entry.key for entry in own.list(_MARK)}
        home = min(position for position, mark in enumerate(marks) if mark in seen)
        if home == rank:
            own.delete(seen - set(marks))  # left by runs that were killed
            if not seen.issuperset(marks):
                server = serve_folder(own, own_address(), _PATIENCE, send_on)
        return msgspec.msgpack.encode((home, None if server is None else server.address))

    try:
        told = ranks.team(doing).reduce(mark, msgspec.msgpack.encode)
        marks = [each.decode() for each in msgspec.msgpack.decode(told, type=list[bytes])]
        told = ranks.team(doing).reduce(look, msgspec.msgpack.encode)
    except BaseException:
        if server is not None:
            server.close()
        raise
    finally:
        own.delete([name])
    homes = [msgspec.msgpack.decode(each, type=tuple[int, Address | None]) for each in msgspec.msgpack.decode(told)]
    addresses = [address for _, address in (*homes[home + 1 :], *homes[:home])]  # the next host's first
    others = tuple(PeerStore(Client(address, _PATIENCE)) for address in addresses if address is not None)
    return HostsStore(own, others, replicas, leads=home == rank, server=server)
