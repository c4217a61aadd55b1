"""What ranks report to each other through a store after something failed, when no collective can be trusted.

One rank, the editor, reads the reports of the others, and writes what follows from them in one piece, which each rank
reads. So each rank makes few requests, however many there are: if all read those of all, the store would answer a
thousand ranks in minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from itertools import count
from typing import Final

import msgspec
from torch.distributed import PrefixStore, Store

_SOONEST: Final = 0.01  # seconds between two looks at first
_LATEST: Final = 0.5  # and at most
_READING: Final = 5.0  # seconds that one rank may take to read the reports


def exchange_reports(
    store: Store,
    name: str,
    index: int,
    size: int,
    report: str,
    seconds: float,
    knows_enough: Callable[[Collection[int]], bool] | None = None,
) -> dict[int, str]:
    """The reports of the ranks, by position, as far as they came within a time; this rank's is among them.

    All ranks that come within the time get the same. One that comes later gets those of earlier ranks, too.

    Args:
        store: Of all these ranks.
        name: What they report about; new each time, and equal on all ranks.
        index: This rank's position.
        size: The number of ranks.
        report: That of this rank.
        seconds: How long to wait for the others, unless all have reported.
        knows_enough: Called with the positions that have not reported; True ends the waiting. None: never.
    """
    try:
        store = PrefixStore(name, store)
        write_report(store, index, report)
        for edition in count():
            piece = read_edition(store, edition, index, size, seconds, _all_of_them, knows_enough)
            found = msgspec.json.decode(piece or b"{}", type=dict[int, str])
            if index in found:  # else it was made before this rank came
                return found
    except RuntimeError:  # the rank that hosts the store has ended
        pass
    return {index: report}


def write_report(store: Store, index: int, report: str) -> None:
    """Write what this rank has to report; it need not read what others report."""
    store.set(str(index), report)
    store.add("reports", 1)


def read_edition(
    store: Store,
    edition: int,
    index: int,
    size: int,
    seconds: float,
    conclude: Callable[[dict[int, str]], bytes],
    knows_enough: Callable[[Collection[int]], bool] | None = None,
) -> bytes:
    """What the editor of an edition, the first rank to ask for it, has concluded from the reports; empty: it has ended.

    Args:
        store: Where the ranks have called `write_report`; other arguments are those of `exchange_reports`.
        edition: A number, from 0. The next one has another editor, and later reports.
        index: This rank's position.
        size: The number of ranks.
        seconds: How long the editor waits for reports.
        conclude: Called on the editor with the reports by position.
        knows_enough: Called on the editor with the positions that have not reported; True ends the waiting.
    """
    shared = PrefixStore(str(edition), store)
    if shared.check(["all"]):
        return shared.get("all")
    is_editor = shared.compare_set("editor", "", str(index)) == str(index).encode()
    end, pause = time.monotonic() + seconds, _SOONEST
    while not is_editor and time.monotonic() < end + _READING:
        if shared.check(["all"]):
            return shared.get("all")
        time.sleep(pause)
        pause = min(1.5 * pause, _LATEST)
    silent = set(range(size))
    while is_editor:
        if store.add("reports", 0) > size - len(silent):
            silent = {each for each in silent if not store.check([str(each)])}
        if not silent or time.monotonic() >= end or (knows_enough is not None and knows_enough(silent)):
            said = {each: store.get(str(each)).decode(errors="replace") for each in range(size) if each not in silent}
            piece = conclude(said)
            shared.set("all", piece.decode())
            return piece
        time.sleep(pause)
        pause = min(1.5 * pause, _LATEST)
    return b""


def _all_of_them(reports: dict[int, str]) -> bytes:
    return msgspec.json.encode(reports)
