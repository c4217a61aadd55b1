"""The versions in a store: which there are, which are needed for which, who holds them, which are removed.

Each version is a checkpoint in a folder of its own, as a run's steps are, and is never changed.  Folders are numbered
as they are made (`global_step12` is the 12th), whatever numbers the versions have.  A full one has all tensors; a delta
has what changed since the version before.  One small file, `published.json`, lists the versions that count.  It is
replaced on condition that it is still the one that was read or written before: so a version is published in one act,
and of two publishers one loses and hears of it.

    a publisher dies while it writes:      its version is in no list, and its folder is never used again
    a publisher dies after the list:       the version is published
    a receiver reads what is in the list, and holds it meanwhile, as readers of a run's checkpoints do
    what no list needs any more is removed once nobody holds it

Only folders before that of the publisher's own newest version are removed: so one that has been replaced by another
publisher, and does not know it yet, can remove nothing that is new.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import msgspec

from terrazzo.checkpoint.manager.records import Catalog
from terrazzo.checkpoint.manager.removing import remove, take_to_read
from terrazzo.checkpoint.native.names import name_of_step
from terrazzo.checkpoint.stores import ABSENT, Absent, Place, Store
from terrazzo.checkpoint.stores import Version as StoredVersion
from terrazzo.checkpoint.stores.local import LOCK, TEMPORARY
from terrazzo.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError, ConflictError

LOGGER: Final = logging.getLogger("terrazzo.publish")

LIST: Final = "published.json"
_FORMAT: Final = 1
_TRIES: Final = 5


class Version(msgspec.Struct, frozen=True):
    """A published version.

    Attributes:
        number: what the publisher calls it.
        place: the number of its folder; later ones have higher ones.
        id: what tells what is in the folder from anything else.
        base: the place of the version that it says the changes from; None: it is full.
        nbytes: the bytes of its tensors or changes.
        total: the bytes of all tensors.
    """

    number: int
    place: int
    id: str
    base: int | None
    nbytes: int
    total: int

    @property
    def is_full(self) -> bool:
        return self.base is None


class Published(msgspec.Struct, frozen=True):
    """What `published.json` says: the versions that count, the oldest first."""

    versions: tuple[Version, ...] = ()
    publisher: str = ""
    format: int = _FORMAT

    @property
    def newest(self) -> Version | None:
        return self.versions[-1] if self.versions else None

    def way_to_newest(self, held: Version | None) -> tuple[Version, ...]:
        """What has to be read, in this order, by one who has `held`; nothing, if that is the newest.

        >>> full, delta = Version(10, 1, "a", None, 8, 8), Version(20, 2, "b", 1, 2, 8)
        >>> published = Published((full, delta))
        >>> [version.number for version in published.way_to_newest(None)]
        [10, 20]
        >>> [version.number for version in published.way_to_newest(full)]
        [20]
        """
        return () if self.newest is None else self.way_to(self.newest, held)

    def way_to(self, version: Version, held: Version | None = None) -> tuple[Version, ...]:
        """The same, to any version."""
        known = {each.place: each for each in self.versions}
        way: list[Version] = []
        at: Version | None = version
        while at is not None and at != held:
            way.append(at)
            if at.base is None:
                break
            at = known.get(at.base)
            if at is None:
                raise CheckpointFormatError(f"{LIST}: what version {way[-1].number} is based on is not in the list")
        return tuple(reversed(way))

    def with_newest(self, version: Version, keep: int) -> Published:
        """This list with one more version, of which the last `keep` stay, and whatever these need."""
        longer = msgspec.structs.replace(self, versions=(*self.versions, version))
        needed = {each.place for last in longer.versions[-keep:] for each in longer.way_to(last)}
        return msgspec.structs.replace(longer, versions=tuple(each for each in longer.versions if each.place in needed))


class Versions:
    """The versions in a folder, behind a URL or in a store."""

    def __init__(self, root: Place) -> None:
        self._catalog = Catalog(root)
        self._mark: StoredVersion | Absent = ABSENT

    @property
    def location(self) -> str:
        return str(self._catalog.root)

    def store_of(self, place: int) -> Store:
        """The store of a version's folder."""
        return self._catalog.store_of(place)

    def free_place(self, published: Published) -> int:
        """A folder's number that has not been used."""
        newest = -1 if published.newest is None else published.newest.place
        return max([newest, *self._catalog.steps()]) + 1

    def read(self) -> Published:
        """The list as it is now."""
        try:
            data, self._mark = self._catalog.root.store.get(LIST)
        except (FileNotFoundError, NotADirectoryError):
            self._mark = ABSENT
            return Published()
        try:
            published = msgspec.json.decode(bytes(data), type=Published)
        except (msgspec.MsgspecError, ValueError) as error:
            raise CheckpointFormatError(f"{self.location}: {LIST} cannot be read: {error}") from error
        if published.format != _FORMAT:
            raise CheckpointFormatError(
                f"{self.location}: {LIST} is of format {published.format}, which this release does not know"
            )
        return published

    def write(self, published: Published) -> None:
        """Replace the list, if it is still the one that was read or written last."""
        store = self._catalog.root.store
        try:
            self._mark = store.put(LIST, msgspec.json.encode(published), only_if=self._mark)
        except ConflictError as error:
            raise ConflictError(
                f"{self.location}: another publisher has begun to publish here since this one did: theirs counts, and "
                f"this one has to end"
            ) from error

    def take_over(self) -> Published:
        """Be the publisher from now on: whoever was it before loses."""
        store = self._catalog.root.store
        store.prepare()
        for last in reversed(range(_TRIES)):
            published = msgspec.structs.replace(self.read(), publisher=uuid.uuid4().hex)
            try:
                self.write(published)
                break
            except ConflictError:
                if not last:
                    raise
        self._clear_temporary()
        return published

    def _clear_temporary(self) -> None:
        """Remove files that were to become the list, and locks on it, of publishers that have died."""
        store = self._catalog.root.store
        try:
            left = [entry for entry in store.list(f"{LIST}.") if entry.key.endswith((TEMPORARY, LOCK))]
            store.delete([entry.key for entry in left if store.lease_ended(entry.key, entry.modified)])
        except OSError as error:
            LOGGER.warning("%s: what dead publishers have left stays: %s", self.location, error)

    def clear(self, published: Published) -> None:
        """Remove what is in no list any more, but for what somebody holds."""
        if published.newest is None:
            return
        counted = {version.place for version in published.versions}
        try:
            places = self._catalog.steps()
        except OSError as error:
            LOGGER.warning("%s: what could be removed is not known: %s", self.location, error)
            return
        for place in places:
            if place not in counted and place < published.newest.place:
                self.discard(place)

    def discard(self, place: int) -> None:
        """Remove a version, if nobody holds it; what cannot be removed now will be later."""
        try:
            remove(self._catalog, place)
        except (OSError, CheckpointError) as error:
            LOGGER.warning("%s: %s could not be removed: %s", self.location, name_of_step(place), error)

    @contextmanager
    def held(self, versions: Iterable[Version]) -> Iterator[None]:
        """Hold versions, so that nobody removes them; `CheckpointNotFoundError` if one is being removed."""
        with ExitStack() as stack:
            for version in versions:
                stack.callback(take_to_read(self._catalog, version.place).release)
            yield

    @contextmanager
    def hold_way(self, held: Version | None) -> Iterator[Sequence[Version]]:
        """What one has to read who has `held`, and that it stays while it is read."""
        with ExitStack() as stack:
            for last in reversed(range(_TRIES)):
                way = self.read().way_to_newest(held)
                try:
                    stack.enter_context(self.held(way))
                    break
                except CheckpointNotFoundError:  # the list was older than a removal
                    if not last:
                        raise
            yield way
