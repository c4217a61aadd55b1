"""Large collectives on CPU as messages between pairs, against the collectives of torch.distributed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from terrazzo.comm import add_observer, remove_observer
from terrazzo.comm.axis import axis_over
from terrazzo.fsdp.run import direct
from terrazzo.fsdp.run.direct import FIRST_TAG, start_gather, start_reduce


def check(uneven: bool, dtype: torch.dtype) -> None:
    direct._SMALL, before = 0, direct._SMALL
    world, rank = dist.get_world_size(), dist.get_rank()
    axis = axis_over(tuple(range(world)), "cpu")
    sizes = [5, 0, 3, 2][:world] if uneven else [6] * world
    wholes = [(torch.arange(sum(sizes)) % 7 + r).to(dtype) for r in range(world)]
    events: list[object] = []
    add_observer(events.append)
    try:
        part = wholes[0].split(sizes)[rank]
        first = start_gather(part, axis, sizes, FIRST_TAG)
        second = start_gather(part * 2, axis, sizes, FIRST_TAG + 2)  # two under way, waited for in the other order
        assert torch.equal(second.wait(), wholes[0] * 2) and torch.equal(first.wait(), wholes[0])
        total = torch.stack(wholes).float().sum(0).split(sizes)[rank]
        for op, expected in (("sum", total), ("avg", total / world)):
            reduced = start_reduce(wholes[rank], axis, sizes, op, FIRST_TAG + 1).wait()
            torch.testing.assert_close(reduced, expected.to(dtype))
    finally:
        remove_observer(events.append)
        direct._SMALL = before
    nbytes = (world - 1) * sum(sizes) * dtype.itemsize // world
    assert [(e.kind, e.bytes) for e in events] == [("all_gather", nbytes)] * 2 + [("reduce_scatter", nbytes)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_messages_do_what_collectives_do(world, uneven, dtype):
    run_ranks(world, check, uneven, dtype)
