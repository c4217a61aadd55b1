"""Which known name an unknown one may be, for messages."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Final

_MANY: Final = 20_000  # names; to compare more of them takes a second


def meant(name: str, known: Collection[str], otherwise: str = "") -> str:
    """The end of a message about a name that is not known: which one it may be, else `otherwise`.

    >>> meant("bf_16", ["bf16", "fp16"])
    '; did you mean bf16?'
    """
    close = get_close_matches(name, known, 1) if len(known) <= _MANY else []
    return f"; did you mean {close[0]}?" if close else otherwise
