"""What differs between two checkpoints, for the page: which values, in how many elements, how far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo.checkpoint import Checkpoint
from terrazzo.checkpoint.tools.compare import compare
from terrazzo.checkpoint.tools.lazy import ReaderListing
from terrazzo.view.data.numbers import plain


def diff_data(
    one: Checkpoint,
    other: Checkpoint,
    titles: tuple[str, str],
    *,
    tolerance: float = 0.0,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, Any]:
    """The data of a page about two checkpoints; reads what is not known to be equal by checksums.

    >>> import tempfile, torch
    >>> from terrazzo.checkpoint import save
    >>> paths = [tempfile.mkdtemp(), tempfile.mkdtemp()]
    >>> for step, path in enumerate(paths):
    ...     _ = save({"w": torch.full((3,), float(step)), "same": 7}, checkpoint_id=path)
    >>> data = diff_data(*map(Checkpoint, paths), ("a", "b"))
    >>> [(found["name"], found["differing"], found["largest"]) for found in data["rows"]], data["equal"]
    ([('w', 3, 1.0)], 1)
    """
    rows = []
    a, b = ReaderListing(one).entries, ReaderListing(other).entries
    for found in compare(one, other, tolerance=tolerance, progress=progress):
        entry = a[found.name] if found.name in a else b[found.name]
        rows.append(
            {
                **entry.row(found.name),
                "what": found.what,
                "differing": found.differing,
                "elements": found.elements,
                "largest": plain(found.largest),
                "in": [found.name in one, found.name in other],
            }
        )
    both = sum(name in other for name in one)
    return {
        "kind_of_page": "diff",
        "title": f"{titles[0]} and {titles[1]}",
        "titles": list(titles),
        "tolerance": tolerance,
        "values": [len(one), len(other)],
        "equal": both - sum(all(each["in"]) for each in rows),
        "rows": rows,
    }
