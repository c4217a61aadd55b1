"""What the fork server of `ranks.py` imports before it forks the first rank.

Ranks are born with it: each of these would otherwise be imported by every rank.  None may start a thread, which a fork
would not take along.
"""

from __future__ import annotations

import gc
import os

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.tensor
import torch.testing  # noqa: F401

import rank_process  # noqa: F401
import terrazzo.checkpoint.state_dict
import terrazzo.deepspeed
import terrazzo.engine
import terrazzo.fsdp
import terrazzo.tensor.debug
import terrazzo.tensor.parallel  # noqa: F401

# So that it found this module; ranks and what they start need not.
_, _, before = os.environ["PYTHONPATH"].partition(os.pathsep)
if before:
    os.environ["PYTHONPATH"] = before
else:
    del os.environ["PYTHONPATH"]

# All of it stays for ever.  Without it a collection takes next to no time, and does not make each rank copy the memory.
gc.collect()
gc.freeze()
