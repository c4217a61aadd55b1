"""What `terrazzo.fsdp` does with the device's streams and memory, and when the host waits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from late_ranks import run_late
from terrazzo.fsdp import fully_shard

pytestmark = pytest.mark.long

# ------------------------------------------------------------------ buffers


class Turned(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", table)

    def forward(self, x):
        return self.linear(x) * self.table


def check_shared_buffers(device):
    """Buffers are moved from the CPU; modules that share one still do, also if each is sharded by a call of its own."""
    table = torch.arange(4.0)
    model = nn.Sequential(Turned(table), Turned(table))
    for module in (*model, model):
        fully_shard(module)
    assert model[0].table.device == device and model[0].table is model[1].table
    model[0].table.add_(1)
    assert model[1].table.tolist() == [1, 2, 3, 4]


def test_modules_that_share_a_buffer_still_do():
    run_late(2, check_shared_buffers)
