"""Replace damaged local files by other hosts' copies.

When reading has failed, every host reads its files of the checkpoint and compares them with their checksums. A damaged
file of which another host has an intact copy is removed first, so that it is not read, copied or shared, and then
fetched from there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final

import msgspec

from terrazzo.checkpoint.manager.committing import do_together, reduce_over
from terrazzo.checkpoint.manager.copying import copy_file
from terrazzo.checkpoint.manager.hosts import HostsStore, needed_files
from terrazzo.checkpoint.native.commit import read_manifest
from terrazzo.checkpoint.native.verify import verify_store
from terrazzo.checkpoint.stores.local import LocalStore
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointException

LOGGER: Final = logging.getLogger("terrazzo.checkpoint")


class Found(msgspec.Struct, frozen=True):
    """The damage that was found.

    Attributes:
        mended: whether any file was replaced.
        lost: the damaged or missing files of which no host has an intact copy: by name, what is wrong.
    """

    mended: bool
    lost: dict[str, str]


class _Look(msgspec.Struct, array_like=True, frozen=True):
    """The intact and the damaged files of a checkpoint on a host."""

    whole: list[str]
    damaged: dict[str, str]
    needed: list[str]


class _Told(msgspec.Struct, array_like=True, frozen=True):
    replaced: list[str]
    lost: dict[str, str]


def may_be_damage(error: CheckpointException) -> bool:
    """Whether damaged files may be the cause of an error."""
    return any(isinstance(each, CheckpointCorruptError | OSError | EOFError) for each, _ in error.failures.values())


def mend(
    store: HostsStore, leads: bool, doing: str, process_group: Any = None, timeout: timedelta | None = None
) -> Found:
    """Verify all files of a checkpoint, and replace damaged ones that are intact on another host. Collective.

    Args:
        store: the checkpoint's store.
        leads: whether this rank is the first one of its host.
        doing: what is being done, for error messages.
    """
    mine: dict[str, str] = {}

    def look() -> bytes:
        if not leads:
            return b""
        here = _look(store)
        mine.update(here.damaged)
        return msgspec.msgpack.encode(here)

    told = msgspec.msgpack.decode(reduce_over(doing, look, _judged, process_group, timeout), type=_Told)
    replaced = {name: what for name, what in mine.items() if name in told.replaced}
    if told.replaced:
        # All are removed before the first is fetched, so that only intact files can be fetched.
        do_together(doing, partial(store.hosts.own.delete, list(replaced)), process_group, timeout)
        do_together(doing, partial(_fetch, store, replaced), process_group, timeout)
    return Found(bool(told.replaced), told.lost)


def _look(store: HostsStore) -> _Look:
    own = store.hosts.own
    needed = sorted({name for name, _ in needed_files(read_manifest(store))})
    here = {entry.key for entry in own.list()} & set(needed)
    damaged: dict[str, str] = {}
    for damage in verify_store(store, only=here):
        if damage.file in here:
            damaged.setdefault(damage.file, f"{_where(own, damage.file)}: {damage.what}")
    return _Look(sorted(here - set(damaged)), damaged, needed)


def _judged(parts: list[bytes]) -> bytes:
    looks = [msgspec.msgpack.decode(part, type=_Look) for part in parts if part]
    whole = {name for each in looks for name in each.whole}
    damaged = {name: what for each in looks for name, what in each.damaged.items()}
    needed = {name for each in looks for name in each.needed}
    lost = {name: damaged.get(name, f"no host has {name}") for name in sorted(needed - whole)}
    return msgspec.msgpack.encode(_Told(sorted(set(damaged) & whole), lost))


def _fetch(store: HostsStore, names: Mapping[str, str]) -> None:
    own = store.hosts.own
    for name, what in names.items():
        LOGGER.warning("%s; it was replaced by another host's copy", what)
        try:
            copy_file(store.holder(name), own, name)
        except (CheckpointError, OSError) as error:  # it will be read from the other host
            LOGGER.warning("%s could not be fetched from the host that has it: %s", _where(own, name), error)


def _where(own: LocalStore, name: str) -> str:
    return f"{own.location}/{name}"
