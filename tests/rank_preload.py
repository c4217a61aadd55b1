"""What ranks of these tests begin with, beside what `terrazzo.testing` imports for every rank."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.tensor
import torch.testing  # noqa: F401

import terrazzo.deepspeed  # noqa: F401


def _let_groups_share_a_device() -> None:
    """Gives all gloo groups of a rank one device, and so one thread that looks for messages.

    Each device's thread wakes up a hundred times a second, whether or not its group is in use.  Ranks live long and
    make many groups: with a device each they took a fifth of the machine, much of it to find nothing.  The device is
    made by a rank's first group: a thread of the fork server's would not be in the ranks.
    """
    gloo: Any = dist.ProcessGroupGloo
    init, devices = gloo.__init__, []

    def with_the_device(self: Any, store: Any, rank: int, size: int, *given: Any, **named: Any) -> None:
        if not given and "options" not in named:
            if not devices:
                devices.append(gloo.create_default_device())
            options = gloo._Options()
            options._devices, options._timeout = devices, named.pop("timeout", timedelta(minutes=30))
            for name, value in named.items():  # what newer versions of PyTorch pass
                setattr(options, name, value)
            given, named = (options,), {}
        init(self, store, rank, size, *given, **named)

    gloo.__init__ = with_the_device


_let_groups_share_a_device()
gc.collect()
gc.freeze()
