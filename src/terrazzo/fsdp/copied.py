"""Containers of a module's inputs that were copied because tensors in them were replaced.

A module may change a list, dict or dataclass that it is given, for example to collect losses or a cache in it. The
caller has the original, so after forward each copy that was changed is followed by its original.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple


class _Copy(NamedTuple):
    original: Any
    copied: Any
    before: list[tuple[Any, Any]]  # the copy's contents when it was made
    originals: dict[int, Any]  # by the id of a replaced value in the copy


class Copies:
    """The copies that were made for one call.

    >>> losses = [1.0]
    >>> copies, copied = Copies(), [2.0]  # in which something was replaced
    >>> copies.note(losses, copied)
    >>> copied.append(3.0)
    >>> copies.follow()
    >>> losses
    [1.0, 3.0]
    """

    def __init__(self) -> None:
        self._made: list[_Copy] = []

    def note(self, original: Any, copied: Any) -> None:
        """Remember a copy, whose contents are in the order of the original's."""
        before = _contents(copied)
        pairs = zip(before, _contents(original), strict=True)
        originals = {id(new): old for (_, new), (_, old) in pairs if new is not old}
        self._made.append(_Copy(original, copied, before, originals))

    def follow(self) -> None:
        """Change the originals as their copies have been changed since."""
        for each in reversed(self._made):
            now = _contents(each.copied)
            if len(now) != len(each.before) or any(
                key is not old_key or value is not old
                for (key, value), (old_key, old) in zip(now, each.before, strict=True)
            ):
                _fill(each.original, [(key, each.originals.get(id(value), value)) for key, value in now])


def _contents(container: Any) -> list[tuple[Any, Any]]:
    """Keys, or attributes' names, and values; the keys of sequences and sets are None."""
    if isinstance(container, Mapping):
        return list(container.items())
    if isinstance(container, list | deque | set):
        return [(None, value) for value in container]
    return list(getattr(container, "__dict__", {}).items())


def _fill(container: Any, contents: list[tuple[Any, Any]]) -> None:
    values = [value for _, value in contents]
    if isinstance(container, list):
        container[:] = values
    elif isinstance(container, deque | set):
        container.clear()
        container.update(values) if isinstance(container, set) else container.extend(values)
    elif isinstance(container, MutableMapping):
        kept = dict(contents)
        for key in [key for key in container if key not in kept]:
            del container[key]
        for key, value in contents:
            if key not in container or container[key] is not value:
                container[key] = value
    elif not isinstance(container, Mapping):
        kept = dict(contents)
        for name in [name for name in container.__dict__ if name not in kept]:
            delattr(container, name)
        for name, value in contents:
            if container.__dict__.get(name, container) is not value:
                object.__setattr__(container, name, value)


__all__ = ["Copies"]
