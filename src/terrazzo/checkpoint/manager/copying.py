"""Copy a checkpoint from the local folders of a run's hosts to the root: each host sends its files.

The files are copied unchanged. The manifest is written last and makes the copy a checkpoint, as in a save. A copy that
was interrupted is continued: files that exist at the target are complete.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing, suppress
from functools import partial

from terrazzo._threads import results_of
from terrazzo.checkpoint.manager.hosts import HostsStore, needed_files
from terrazzo.checkpoint.manager.peers import PeerStore
from terrazzo.checkpoint.native.commit import Commit, remove_leftovers
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.root import Root
from terrazzo.checkpoint.stores import Store
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.comm.serving import PIECE
from terrazzo.errors import CheckpointIOError


def copy_checkpoint(source: HostsStore, target: Store) -> None:
    """Copy the checkpoint of a step. A checkpoint at the target is valid until the copy is complete."""
    data, _ = source.get(MANIFEST)
    manifest = Root(data, source.location)
    files = dict(needed_files(manifest))
    target.prepare()
    commit = Commit(target, MANIFEST)
    commit.begin()
    remove_leftovers(target)
    commit.hold(manifest.head.save_id)
    try:
        work: dict[LocalStore | PeerStore, list[str]] = defaultdict(list)
        loads: dict[LocalStore | PeerStore, int] = defaultdict(int)
        host: LocalStore | PeerStore
        for key, holders in source.holders(sorted(files, key=lambda key: -files[key])).items():
            host = min(holders, key=loads.__getitem__)  # the host with the fewest bytes to send
            loads[host] += files[key]
            work[host].append(key)
        results_of([partial(_send, host, target, keys) for host, keys in work.items()], len(work), "terrazzo-copy")
        there = {entry.key: entry.size for entry in target.list()}
        missing = [key for key, size in files.items() if there.get(key) != size]
        if missing:
            raise CheckpointIOError(f"{target.location}: {missing[0]} was copied, but is missing or has another size")
        commit.put(memoryview(data))
    finally:
        commit.release()
    remove_leftovers(target)


def _send(host: LocalStore | PeerStore, target: Store, keys: list[str]) -> None:
    for key in keys:
        if isinstance(host, PeerStore):
            host.send_on(key)
        else:
            copy_file(host, target, key)


def copy_file(source: Store, target: Store, key: str) -> None:
    """Copy a file unless the target has it."""
    with closing(source.open(key)) as file:
        with suppress(FileNotFoundError):
            if target.stat(key).size == file.size:
                return
        upload = target.stream(key)
        try:
            for start in range(0, file.size, PIECE):
                piece = bytearray(min(PIECE, file.size - start))
                file.read_into(start, [memoryview(piece)])
                upload.write(start, [memoryview(piece)])
        except BaseException:
            upload.abort()
            raise
        upload.finish()
