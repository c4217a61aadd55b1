"""What the fork server of `pool` imports before it forks the first rank.

Ranks are born with it: each of these would otherwise be imported by every rank.  None may start a thread, which a fork
would not take along.
"""

from __future__ import annotations

import gc
import os

import terrazzo.checkpoint.state_dict
import terrazzo.engine
import terrazzo.fsdp
import terrazzo.tensor.debug
import terrazzo.tensor.parallel  # noqa: F401
from terrazzo.testing.process import PYTHONPATH_BEFORE

# So that it found this module; ranks and what they start need not.
before = os.environ.pop(PYTHONPATH_BEFORE, None)
if before:
    os.environ["PYTHONPATH"] = before
elif before is not None:
    del os.environ["PYTHONPATH"]

# All of it stays for ever.  Without it a collection takes next to no time, and does not make each rank copy the memory.
gc.collect()
gc.freeze()
