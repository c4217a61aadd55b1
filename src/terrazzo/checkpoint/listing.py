"""What a checkpoint holds, said without tensors: for looking at it, where PyTorch is not needed."""

from __future__ import annotations

import abc
from collections.abc import Container, Iterable, Mapping, Set
from functools import cache
from typing import Any, Final

import msgspec

from terrazzo.layout.box import Box

_LONGEST_NUMBER: Final = 20  # digits


class Listed(msgspec.Struct, frozen=True, gc=False):
    """What a listing knows of a value: of a tensor all fields, of any other value none.

    `parts` is the number of boxes in which the tensor is stored.
    """

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    nbytes: int | None = None
    parts: int | None = None

    def row(self, name: str) -> dict[str, Any]:
        """The row that commands and pages print for it.

        >>> Listed("float32", (3, 4), 48, 1).row("w")
        {'name': 'w', 'dtype': 'float32', 'shape': [3, 4], 'bytes': 48, 'parts': 1}
        """
        shape = None if self.shape is None else list(self.shape)
        return {"name": name, "dtype": self.dtype, "shape": shape, "bytes": self.nbytes, "parts": self.parts}


class Listing(abc.ABC):
    """The table of contents of a checkpoint, and what little of its values is shown with it."""

    @property
    @abc.abstractmethod
    def entries(self) -> Mapping[str, Listed]:
        """The entry of each name; tensors with equal entries share one object."""

    @property
    def names(self) -> Set[str]:
        """All names."""
        return self.entries.keys()

    def entry(self, name: str) -> Listed | None:
        """The entry of a name; None if the checkpoint has no such value."""
        return self.entries.get(name)

    @abc.abstractmethod
    def about(self) -> dict[str, Any]:
        """What is known of the save as a whole."""

    @abc.abstractmethod
    def boxes_of(self, name: str) -> list[Box]:
        """The boxes in which a tensor is stored."""

    @abc.abstractmethod
    def files_of(self, name: str) -> list[str | None]:
        """The file of each of these boxes; None where the format does not say."""

    @abc.abstractmethod
    def first(self, name: str, count: int) -> list[Any]:
        """The first numbers of a tensor's first row, or fewer if it is shorter; complex numbers are text."""

    @abc.abstractmethod
    def value(self, name: str) -> Any:
        """A value that is not a tensor."""

    @abc.abstractmethod
    def digests(self) -> dict[str, bytes]:
        """The digest of each value for which the checkpoint has one: see `Checkpoint.digests`."""

    def total_bytes(self, names: Container[str] | None = None) -> int:
        """The bytes of all tensors together, or of those with these names."""
        return sum(entry.nbytes or 0 for name, entry in self.entries.items() if names is None or name in names)


def corner(shape: tuple[int, ...], count: int) -> Box:
    """The first elements, of the first row.

    >>> corner((4, 3), 8)
    Box(offsets=(0, 0), lengths=(1, 3))
    """
    return Box((0,) * len(shape), (*(1 for _ in shape[:-1]), *(min(n, count) for n in shape[-1:])))


def in_order(names: Iterable[str]) -> list[str]:
    """Names sorted as people sort: `layers.2` before `layers.10`."""
    ordered = cache(_ordered)  # names share most parts
    return sorted(names, key=lambda name: [*map(ordered, name.split("."))])


def _ordered(part: str) -> tuple[bool, int | str]:
    """What a part of a name is ordered by: numbers come first, by their size."""
    is_number = part.isdecimal() and len(part) < _LONGEST_NUMBER
    return not is_number, int(part) if is_number else part
