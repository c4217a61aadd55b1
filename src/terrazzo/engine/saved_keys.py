"""Restoring dict keys in the states of learning-rate schedulers: a checkpoint turns numbers as keys into text.

`MultiStepLR` looks up its milestones by step number, and would find none of them under text keys.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def keyed_like(stored: Any, live: Any) -> Any:
    """The stored value, with the dict classes and key types that the live value has in the same places.

    >>> from collections import Counter
    >>> keyed_like({"milestones": {"2": 1, "4": 1}, "last_epoch": 3}, {"milestones": Counter([7]), "last_epoch": 0})
    {'milestones': Counter({2: 1, 4: 1}), 'last_epoch': 3}
    """
    if isinstance(stored, Mapping) and isinstance(live, Mapping):
        if live and all(type(key) is int for key in live):
            stored = {int(key): value for key, value in stored.items()}
        same = {key: keyed_like(value, live.get(key)) for key, value in stored.items()}
        if type(live) is dict or not isinstance(live, dict):
            return same
        kept = copy.copy(live)  # a dict subclass may have more than its items
        kept.clear()
        kept.update(same)
        return kept
    if isinstance(stored, list) and isinstance(live, list) and len(stored) == len(live):
        return [keyed_like(value, other) for value, other in zip(stored, live, strict=True)]
    return stored
