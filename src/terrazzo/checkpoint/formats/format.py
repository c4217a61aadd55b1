"""What a format of checkpoints is: how it is recognised, read and written.

A format is a subclass of `Format`, in one file. `registry` knows those that come with terrazzo, and takes others.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final

from terrazzo.checkpoint.listing import Listing
from terrazzo.checkpoint.native.names import named_by_latest
from terrazzo.checkpoint.native.verify import Damage
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointFormatError

if TYPE_CHECKING:
    from terrazzo.checkpoint.storage import StorageReader  # of tensors, which a format recognises without

# Called with a tensor's name and the bytes of it that have been copied.
Progress = Callable[[str, int], None]

_START: Final = 32  # bytes that are enough to recognise a file


class Found:
    """What lies at a place; looked at as far as formats ask, and once.

    With `follow=False` only what lies at the place itself, not what its `latest` names.
    """

    def __init__(self, place: Place, *, follow: bool = True) -> None:
        self.place = place
        self._follow = follow

    def has(self, name: str) -> bool:
        """Whether there is a folder with a file of this name."""
        return (self.place / name).is_file()

    @cached_property
    def is_file(self) -> bool:
        """Whether there is a file."""
        return self.place.is_file()

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in a folder; none, if there is a file or nothing."""
        place = self.place
        return frozenset(place.names()) if not self.is_file and self._may_be_folder else frozenset()

    @cached_property
    def latest(self) -> list[Place]:
        """The folders that a file `latest` in this folder names."""
        try:
            return named_by_latest(self.place) if self._follow and self._may_be_folder else []
        except CheckpointFormatError:  # a file of this name that means something else
            return []

    @cached_property
    def start(self) -> tuple[bytes, int]:
        """The first bytes of a file, and its size; nothing, if there is no file."""
        return self.place.start(_START) if self.is_file else (b"", 0)

    @property
    def _may_be_folder(self) -> bool:
        return self.place.local is None or self.place.is_dir()


@dataclass(frozen=True, slots=True)
class Writing:
    """How a checkpoint is written: see `convert`."""

    overwrite: bool = False
    allow_pickle: bool = False
    progress: Progress | None = None
    stage: int | None = None
    ranks: int | None = None
    only: str | None = None


@dataclass(slots=True)
class Checked:
    """What `verify` found.

    Attributes:
        damage: all that is not as it was written.
        unchecked: why more damage may be there; empty if every byte was compared with a checksum.
    """

    damage: list[Damage] = field(default_factory=list)
    unchecked: str = ""


class Format(abc.ABC):
    """A kind of checkpoints.

    Attributes:
        name: what users call it.
        options: those of `stage`, `ranks` and `only` that `write` understands.
        replaces: whether it can be written over a checkpoint that is there.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    replaces: ClassVar[bool] = True

    @abc.abstractmethod
    def find(self, found: Found) -> Place | None:
        """The place of the checkpoint of this format for a user's path: that place, or a folder that it names.

        None if there is none. Whether the checkpoint is whole is for the reader to say.
        """

    @abc.abstractmethod
    def reader(self, place: Place) -> StorageReader:
        """A reader of the checkpoint at a place that `find` returned."""

    def write(self, reader: StorageReader, target: Place, how: Writing) -> None:
        """Copy what a reader reads to `target`, which has all of it at the end, and until then what it had."""
        raise CheckpointFormatError(f"terrazzo reads checkpoints of the format {self.name}, and does not write them")

    def listing(self, place: Place) -> Listing | None:
        """What the checkpoint at a place that `find` returned holds, if that can be said without tensors.

        None if not: then the reader is asked.
        """
        return None

    def verify(self, place: Place, progress: Callable[[int], None]) -> Checked:
        """All damage of the checkpoint at a place that `find` returned, as far as the format allows to find it."""
        raise CheckpointFormatError(
            f"{place}: checkpoints of the format {self.name} have no checksums; `terrazzo seal` writes some beside them"
        )

    def __repr__(self) -> str:
        return f"<format {self.name}>"
