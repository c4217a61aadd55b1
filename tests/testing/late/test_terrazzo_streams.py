"""What `terrazzo.fsdp` does with the device's streams and memory, and when the host waits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from late_ranks import run_late
from terrazzo.comm import flat, pending, wire
from terrazzo.fsdp import MixedPrecisionPolicy, fully_shard
from testing.late.test_terrazzo_fsdp import batch, sharded, train

pytestmark = pytest.mark.long

# ------------------------------------------------------------------ collectives


def check_streams_of_collectives(device):
    """They run on fully_shard's own streams, in order with what it queues there: there is no work to wait for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending, "wait_for", lambda work, kind, axis: pytest.fail(f"{kind} on a stream of the backend"))
        for sizes in (None, (2, 2)):
            model = sharded(device, sizes=sizes)
            tokens = batch(device, 0, 0)
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


def test_collectives_run_on_the_streams_of_fully_shard():
    run_late(4, check_streams_of_collectives, modes=("needed", "random"))


def check_sections(device):
    """Gradients are reduced in sections of 128 bytes, with room for the elements that say which parameters have one."""
    seen, packed = [], []

    def reduce_scatter(axis, out, buffer, op, plain=wire.reduce_scatter):
        seen.append((out.nbytes, buffer.data_ptr()))
        return plain(axis, out, buffer, op)

    def by_cat(rows, dim, ranks, out):
        packed.append(out)
        return torch.cat([row.to(out.dtype) for row in rows], 1, out=out)

    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "reduce_scatter", reduce_scatter)
        train(sharded(device, unused=True), device)
        found = train(sharded(device, mp_policy=half), device)
        patch.setattr(flat, "chunk_cat", by_cat)
        assert torch.equal(train(sharded(device, mp_policy=half), device)["parameters"], found["parameters"])
    assert len(seen) >= 24 and all(nbytes % 128 == at % 128 == 0 for nbytes, at in seen), seen
    assert len(packed) >= 8


def test_sections_of_reductions_are_aligned():
    run_late(2, check_sections)


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
