"""What the fork server of `pool` imports before it forks the first rank.

Otherwise every rank would import them. None of them may start a thread, because a fork does not copy threads.
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

# PYTHONPATH was set so that this module is found; ranks and their child processes do not need it.
before = os.environ.pop(PYTHONPATH_BEFORE, None)
if before:
    os.environ["PYTHONPATH"] = before
elif before is not None:
    del os.environ["PYTHONPATH"]

# These objects stay forever. Frozen, they are skipped by collections, and ranks need not copy their memory pages.
gc.collect()
gc.freeze()
