"""The list of versions in a store: what each is based on, and which are removed.

Each version is a checkpoint in a folder of its own, as a run's steps are, and is never changed. Folders are numbered
in the order in which they are made (`global_step12` is the 12th), whatever the versions' numbers. A full version has
all tensors; others have the changes since the version before. The file `published.json` lists the published versions.
A publisher replaces it only if it is still the file that the publisher read or wrote last. So a version is published
by one operation, and if two publishers use one folder, one of them gets a `ConflictError`.

If a publisher dies before it replaces the list, its version is not listed, and the folder is never used again; if it
dies later, the version is published. A receiver holds the versions that it reads, as readers of a run's checkpoints
do. Versions that the list does not need are removed when no receiver holds them.

A publisher removes only folders with lower numbers than its own newest version. So a publisher that another one has
replaced, and that does not know it yet, cannot remove new versions.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import msgspec

from terrazzo.checkpoint.manager.records import Catalog, held, remove
from terrazzo.checkpoint.native.commit import Commit, ended, read_manifest, temporary_of
from terrazzo.checkpoint.native.names import name_of_step
from terrazzo.checkpoint.stores import SMALL, Absent, Place, Store
from terrazzo.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ConflictError,
    PublishValueError,
)
from terrazzo.publish.parts import RESERVED

LOGGER: Final = logging.getLogger("terrazzo.publish")

LIST: Final = "published.json"
_FORMAT: Final = 1
_TRIES: Final = 5


class Version(msgspec.Struct, frozen=True):
    """A published version.

    Attributes:
        number: the number that the publisher gave it.
        place: the number of its folder; later versions have higher ones.
        id: the id of the save, which no other checkpoint has.
        base: the `place` of the version to which its changes apply; None: it is full.
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
    """The contents of `published.json`: the published versions, the oldest first."""

    versions: tuple[Version, ...] = ()
    publisher: str = ""
    format: int = _FORMAT

    @property
    def newest(self) -> Version | None:
        return self.versions[-1] if self.versions else None

    def needed_for(self, version: Version | None, held: Version | None = None) -> tuple[Version, ...]:
        """The versions that a receiver that has `held` must read to get `version`, in order; none, if it has that.

        >>> full, delta = Version(10, 1, "a", None, 8, 8), Version(20, 2, "b", 1, 2, 8)
        >>> published = Published((full, delta))
        >>> [version.number for version in published.needed_for(delta)]
        [10, 20]
        >>> [version.number for version in published.needed_for(delta, full)]
        [20]
        """
        known = {each.place: each for each in self.versions}
        needed: list[Version] = []
        at = version
        while at is not None and at != held:
            needed.append(at)
            if at.base is None:
                break
            at = known.get(at.base)
            if at is None or at.place >= needed[-1].place:
                raise CheckpointFormatError(
                    f"{LIST} does not list the version on which version {needed[-1].number} is based, before it"
                )
        return tuple(reversed(needed))

    def with_newest(self, version: Version, keep: int) -> Published:
        """The list with one more version; only the last `keep` stay, and the versions on which they are based."""
        longer = msgspec.structs.replace(self, versions=(*self.versions, version))
        needed = {each.place for last in longer.versions[-keep:] for each in longer.needed_for(last)}
        return msgspec.structs.replace(longer, versions=tuple(each for each in longer.versions if each.place in needed))


class Versions:
    """The versions in a folder, at a URL or in a store."""

    def __init__(self, root: Place) -> None:
        self._catalog = Catalog(root)
        self._commit = Commit(root.store, LIST)
        self._foreign: set[int] = set()  # folders of which a warning has said that they are no versions

    @property
    def location(self) -> str:
        return str(self._catalog.root)

    def store_of(self, place: int) -> Store:
        """The store of a version's folder."""
        return self._catalog.store_of(place)

    def free_place(self, published: Published) -> int:
        """A number for a folder that has not been used."""
        return max([-1, *(version.place for version in published.versions), *self._catalog.steps()]) + 1

    def read(self) -> Published:
        """The list as it is now."""
        data = None
        with suppress(NotADirectoryError):
            data = self._commit.begin(most=SMALL)
        if data is None:
            return Published()
        try:
            published = msgspec.json.decode(bytes(data), type=Published)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointFormatError(f"{self.location}: {LIST} cannot be read: {error}") from error
        if published.format != _FORMAT:
            raise CheckpointFormatError(
                f"{self.location}: {LIST} has format {published.format}, which this release cannot read: update "
                "terrazzo"
            )
        return published

    def write(self, published: Published) -> None:
        """Replace the list if it is still the one that was read or written last."""
        data = msgspec.json.encode(published)
        try:
            self._commit.put(data)
        except ConflictError as error:
            raise ConflictError(
                f"{self.location}: another publisher has begun to publish here, so this one cannot go on: close it, or "
                "give each publisher a folder of its own"
            ) from error
        except OSError:  # which it may raise after it took effect: its reply was lost, or its last part failed
            if not self._commit.confirm(data):
                raise

    def take_over(self) -> Published:
        """Replace the list, so that an earlier publisher gets a `ConflictError`."""
        store = self._catalog.root.store
        store.prepare()
        for last in reversed(range(_TRIES)):
            published = msgspec.structs.replace(self.read(), publisher=uuid.uuid4().hex)
            self._check_own_folder()
            try:
                self.write(published)
                break
            except ConflictError:
                if not last:
                    raise
        self._clear_temporary()
        return published

    def _check_own_folder(self) -> None:
        """Raise if there are checkpoints but no list: they are a run's, whose folder can have no versions."""
        steps = self._catalog.steps() if isinstance(self._commit.replacing, Absent) else []
        if steps:
            raise PublishValueError(
                f"{self.location} holds checkpoints of a run ({name_of_step(steps[-1])}), which would be taken for "
                f"versions: publish to a folder of its own"
            )

    def _clear_temporary(self) -> None:
        """Remove temporary files and locks of the list that publishers left when they died."""
        store = self._catalog.root.store
        try:
            store.delete_ended(ended(store, temporary_of(store.list(), [LIST])))
        except OSError as error:
            LOGGER.warning("%s: temporary files of publishers that died could not be removed: %s", self.location, error)

    def clear(self, published: Published) -> None:
        """Remove versions that are not listed any more and that no receiver holds."""
        counted = {version.place for version in published.versions}
        try:
            places = self._catalog.steps()
        except OSError as error:
            LOGGER.warning("%s: cannot list the folders to remove old versions: %s", self.location, error)
            return
        for place in places:
            if place not in counted and place < max(counted, default=0):
                self.discard(place)

    def discard(self, place: int) -> None:
        """Remove a version, unless a receiver holds it. If that fails, a later `clear` tries again.

        A checkpoint that is no version stays, for example a step of a run that is saved to the same folder.
        """
        try:
            if self._may_be_version(place):
                remove(self._catalog, place)
            elif place not in self._foreign:
                self._foreign.add(place)
                LOGGER.warning("%s: %s is not a published version, so it stays", self.location, name_of_step(place))
        except (OSError, CheckpointError) as error:
            LOGGER.warning("%s: %s could not be removed: %s", self.location, name_of_step(place), error)

    def _may_be_version(self, place: int) -> bool:
        try:
            manifest = read_manifest(self.store_of(place))
        except FileNotFoundError:  # left by a publisher that died
            return True
        return any(name.startswith(RESERVED) for name in manifest.names)

    @contextmanager
    def hold_needed(self, known: Version | None) -> Iterator[Sequence[Version]]:
        """The versions that a receiver that has `known` must read, held while the context lasts."""
        with ExitStack() as stack:
            for last in reversed(range(_TRIES)):
                published = self.read()
                needed = published.needed_for(published.newest, known)
                try:
                    for version in needed:
                        stack.enter_context(held(self._catalog, version.place))
                    break
                except CheckpointNotFoundError:  # one was removed after the list was read: read it again
                    stack.close()
                    if not last:
                        raise
            yield needed
