"""What ranks report to each other through a store after something failed, when no collective can be trusted.

One rank reads the reports of the others, and writes all of them in one piece, which each rank reads. So each rank makes
few requests, however many there are: if all read those of all, the store would answer a thousand ranks in minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from itertools import count

import msgspec
from torch.distributed import PrefixStore, Store

_SOONEST, _LATEST = 0.01, 0.5  # seconds between two looks
_READING = 5.0  # seconds that one rank may take to read the reports


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
        store.set(str(index), report)
        store.add("reports", 1)
        for edition in count():
            found = _edition(PrefixStore(str(edition), store), store, index, size, seconds, knows_enough)
            if index in found:  # else it was made before this rank came
                return found
    except RuntimeError:  # the rank that hosts the store has ended
        pass
    return {index: report}


def _edition(
    edition: Store,
    store: Store,
    index: int,
    size: int,
    seconds: float,
    knows_enough: Callable[[Collection[int]], bool] | None,
) -> dict[int, str]:
    """One edition of all reports: what its editor, the first rank to ask for it, has read."""
    if edition.check(["all"]):
        return _decoded(edition.get("all"))
    is_editor = edition.compare_set("editor", "", str(index)) == str(index).encode()
    end, pause = time.monotonic() + seconds, _SOONEST
    while not is_editor and time.monotonic() < end + _READING:
        if edition.check(["all"]):
            return _decoded(edition.get("all"))
        time.sleep(pause)
        pause = min(1.5 * pause, _LATEST)
    silent = set(range(size))
    while is_editor:
        if store.add("reports", 0) > size - len(silent):
            silent = {each for each in silent if not store.check([str(each)])}
        if not silent or time.monotonic() >= end or (knows_enough is not None and knows_enough(silent)):
            found = {each: store.get(str(each)).decode() for each in range(size) if each not in silent}
            edition.set("all", msgspec.json.encode(found).decode())
            return found
        time.sleep(pause)
        pause = min(1.5 * pause, _LATEST)
    return {}  # the editor has ended: the next edition has another one


def _decoded(everything: bytes) -> dict[int, str]:
    return msgspec.json.decode(everything, type=dict[int, str])
