"""Values that every rank has its own of: random states, positions in a data set.

A checkpoint holds one value per name, so a value that differs from rank to rank must be declared: either
wrapped in `PerRank`, or named by the `per_rank` patterns of the save planner. Rank r's value of `rng` is
stored under `rng@r`, and each rank gets its own back.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any


class PerRank:
    """A value that is this rank's own.

    To load one, pass a `PerRank` again: a tensor is filled in place, any other value replaces `value`.

    >>> state = {"position": PerRank(12)}
    >>> state["position"].value
    12
    """

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def name_on_rank(name: str, rank: int) -> str:
    """Where rank `rank`'s value of `name` is stored."""
    return f"{name}@{rank}"


def as_pattern(name: str) -> str:
    """The pattern that matches this name alone.

    >>> matches_any("layers[0].mean", [as_pattern("layers[0].mean")])
    True
    """
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether `name` matches one of the shell-style patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
