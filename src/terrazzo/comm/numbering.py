"""Numbers that tell apart things of one name, such as the groups of the same ranks that are made one after another.

They go into names of groups and keys of the store, which must be equal on all ranks. So they are counted for each
process group: a process that was in other groups before, which are destroyed, counts from 1 in a new one, as a new
process does.
"""

import threading
import weakref
from collections import Counter

from torch.distributed import ProcessGroup

from terrazzo._torch.groups import default_group

_lock = threading.Lock()
_counted: weakref.WeakKeyDictionary[ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def next_number(name: str, group: ProcessGroup | None = None) -> int:
    """How often this rank has called this with the name in a process group, by default the one of all ranks."""
    group = group or default_group()
    with _lock:
        counted = _counted.setdefault(group, Counter())
        counted[name] += 1
        return counted[name]
