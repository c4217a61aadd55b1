"""Words for messages: which known name an unknown one may be, which ranks, and which signal."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable
from difflib import SequenceMatcher, get_close_matches
from inspect import signature
from pathlib import Path
from signal import Signals
from typing import Any, Final

_MANY: Final = 20_000  # names; to compare more of them takes a second


def meant(name: str, known: Collection[str], otherwise: str = "") -> str:
    """The end of a message about a name that is not known: which one it may be, else `otherwise`.

    >>> meant("bf_16", ["bf16", "fp16"])
    '; did you mean bf16?'
    """
    found = get_close_matches(name, known, 3) if len(known) <= _MANY else []
    close = [each for each in found if _differs_little(name, each)]
    return f"; did you mean {close[0]}?" if close else otherwise


def _differs_little(name: str, other: str) -> bool:
    """Whether the components that dotted names do not share are similar: most of long names is shared by many.

    >>> _differs_little("model.layers.3.wieght", "model.layers.3.weight"), _differs_little("layers.w", "model.layers.w")
    (True, True)
    >>> _differs_little("model.layers.3.weight", "model.layers.3.bias")
    False
    """
    rest, others = name.split("."), other.split(".")
    for end in (0, -1):
        while rest and others and rest[end] == others[end]:
            del rest[end], others[end]
    return not rest or not others or SequenceMatcher(None, ".".join(rest), ".".join(others)).ratio() >= 0.6


def meant_beside(path: str | os.PathLike[str]) -> str:
    """The end of a message about a path of this machine: if it does not exist, which name in its folder it may be."""
    if os.path.lexists(path):
        return ""
    try:
        return meant(os.path.basename(path), os.listdir(os.path.dirname(path) or "."))
    except OSError:
        return ""


def refused(error: BaseException) -> str:
    """The end of a message about an error of the system that has refused something: who may not do what, and where.

    Empty for all others, errors of terrazzo among them, which name no file.
    """
    if not isinstance(error, OSError) or not isinstance(error.filename, str | bytes):
        return ""
    path = Path(os.path.abspath(os.fsdecode(error.filename)))
    closed = [folder for folder in reversed(path.parents) if not _allows(folder, os.X_OK)]
    there = closed[0] if closed else path if os.path.lexists(path) else path.parent
    if error.errno == errno.EROFS:
        return f": the file system of {there} is mounted read-only; use another place"
    if error.errno not in (errno.EACCES, errno.EPERM) or not os.path.lexists(there):
        return ""
    is_folder = there.is_dir()
    if closed:
        verb, right = "look into", "x"
    elif not _allows(there, os.R_OK):
        verb, right = "list" if is_folder else "read", "r"
    elif not _allows(there, os.W_OK):
        verb, right = "write in" if is_folder else "write", "w"
    else:
        return ""
    found = there.stat()
    user, owner = _user(os.geteuid()), _user(found.st_uid)
    end = f"chmod u+{right} allows it" if user == owner else "use another place, or ask the owner"
    return f": user {user} may not {verb} {there}, which belongs to {owner} ({stat.filemode(found.st_mode)}); {end}"


def _allows(path: Path, right: int) -> bool:
    return os.access(path, right, effective_ids=True)


def _user(number: int) -> str:
    import pwd  # late: for messages only

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def counted(number: int, what: str) -> str:
    """
    >>> counted(1, "value"), counted(2000, "value")
    ('1 value', '2,000 values')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def taken(function: Callable[..., Any]) -> str:
    """The end of a message about arguments that do not fit: the names of those that a config may give.

    >>> taken(lambda optimizer, lr, *, eps=0: None)
    '; it takes lr, eps'
    """
    return "; it takes " + ", ".join(list(signature(function).parameters)[1:])


def named(ranks: Iterable[int]) -> str:
    """Ranks in few words.

    >>> named([3]), named([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    found = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(spans) > 1 or spans[0][0] != spans[0][1] else ''} {found}"


def by_text(texts: Iterable[tuple[int, str]]) -> list[str]:
    """What each rank has to say, as one line for all ranks that say the same.

    >>> by_text([(0, "no space"), (1, "no space"), (2, "late")])
    ['ranks 0-1: no space', 'rank 2: late']
    """
    return [f"{named(ranks)}: {text}" for text, ranks in alike(texts).items()]


def alike(texts: Iterable[tuple[int, str]]) -> dict[str, set[int]]:
    """Each text, with the ranks that have it."""
    found: dict[str, set[int]] = {}
    for rank, text in texts:
        found.setdefault(text, set()).add(rank)
    return found


def plain_text(text: str) -> str:
    """A text that can be sent and printed: halves of surrogate pairs, as in paths that are no UTF-8, as their codes.

    >>> plain_text(chr(0xD83D))
    '\\\\ud83d'
    """
    return text.encode(errors="backslashreplace").decode()


def signal_name(number: int) -> str:
    """The name of the signal by which a process was killed.

    >>> signal_name(9), signal_name(40)  # most real-time signals have none
    ('SIGKILL', 'signal 40')
    """
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
