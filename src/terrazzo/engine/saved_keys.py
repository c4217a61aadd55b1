"""States of learning-rate schedulers as they were: in checkpoints keys of dicts are text, also those that were numbers.

`MultiStepLR` counts its milestones by step; under keys of text it would find none of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def keyed_like(stored: Any, live: Any) -> Any:
    """What was stored, with dicts of the class, and keys of the kind, that the live value has in the same place.

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
        kept = copy.copy(live)  # a class may need more than its items
        kept.clear()
        kept.update(same)
        return kept
    if isinstance(stored, list) and isinstance(live, list) and len(stored) == len(live):
        return [keyed_like(value, other) for value, other in zip(stored, live, strict=True)]
    return stored
