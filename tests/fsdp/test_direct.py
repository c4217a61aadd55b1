"""Collectives as messages between pairs, and those among very many ranks, against what they have to give."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from terrazzo.comm import add_observer, remove_observer
from terrazzo.comm.axis import axis_over
from terrazzo.fsdp.run import direct, flat
from terrazzo.fsdp.run.direct import FIRST_TAG, MessageGather, start_gather, start_reduce
from terrazzo.fsdp.run.flat import FlatPlan


def check(uneven: bool, dtype: torch.dtype) -> None:
    direct._SMALL, before = 0, direct._SMALL
    world, rank = dist.get_world_size(), dist.get_rank()
    axis = axis_over(tuple(range(world)), "cpu")
    plan = FlatPlan([(5 if uneven else 6, 3)], [0], world, rank)
    sizes = plan.sizes
    wholes = [(torch.arange(sum(sizes)) % 7 + r).to(dtype) for r in range(world)]
    events: list[object] = []
    add_observer(events.append)
    try:
        part = wholes[0].split(sizes)[rank]
        first = start_gather(part, axis, plan, FIRST_TAG)
        second = start_gather(part * 2, axis, plan, FIRST_TAG + 2)  # two under way, waited for in the other order
        assert torch.equal(second.wait(), wholes[0] * 2) and torch.equal(first.wait(), wholes[0])
        total = torch.stack(wholes).float().sum(0).split(sizes)[rank]
        for op, expected in (("sum", total), ("avg", total / world)):
            reduced = start_reduce(wholes[rank], axis, plan, op, FIRST_TAG + 1).wait()
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


def check_sums(dtype: torch.dtype, rows: int) -> None:
    flat.MANY, before = 2, flat.MANY
    world, rank = dist.get_world_size(), dist.get_rank()
    axis = axis_over(tuple(range(world)), "cpu")
    try:
        plan = FlatPlan([(rows, 4), (1,)], [0, 0], world, rank, extra=1)
        assert plan.ragged
        values = (torch.randn(plan.total) * 100).to(dtype)
        dist.broadcast(values, 0)
        values[:2] = torch.tensor([-0.0, torch.nan])
        moved: list[int] = []
        observer = lambda event: moved.append(event.bytes)  # noqa: E731
        add_observer(observer)
        first, last = plan.own_start, plan.own_start + plan.own_size
        gathered = start_gather(values[first:last], axis, plan, FIRST_TAG).wait()
        assert torch.equal(gathered.view(torch.uint8), values.view(torch.uint8))  # bit for bit, signs of zeros too
        sections = (torch.arange(plan.total) % 7 + rank).to(dtype)
        sums = torch.stack([(torch.arange(plan.total) % 7 + r).to(dtype) for r in range(world)]).float().sum(0)
        for op, expected in (("sum", sums), ("avg", sums / world)):
            reduced = start_reduce(sections.clone(), axis, plan, op, FIRST_TAG + 1).wait()
            torch.testing.assert_close(reduced, expected[first:last].to(dtype))
        remove_observer(observer)
        assert moved == [plan.moved(dtype.itemsize)] * 3 == [2 * (world - 1) * values.nbytes // world] * 3
        alike = FlatPlan([(world, 3)], [0], world, rank)
        wholes = torch.arange(3 * world).to(dtype)
        assert torch.equal(start_gather(wholes.view(world, 3)[rank], axis, alike, FIRST_TAG).wait(), wholes)
    finally:
        flat.MANY = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sections_of_any_length_among_very_many_ranks(dtype):
    run_ranks(4, check_sums, dtype, 2)


def check_unpacking() -> None:
    """This rank's part is not where all are gathered; who unpacks aligned chunks takes it from where it is."""
    direct._SMALL, before = 0, direct._SMALL
    world, rank = dist.get_world_size(), dist.get_rank()
    axis = axis_over(tuple(range(world)), "cpu")
    try:
        for rows in (2 * world, 2 * world + 1):
            plan = FlatPlan([(rows, 3), (rows,)], [0, 0], world, rank)
            wholes = [torch.randn(rows, 3), torch.randn(rows)]
            for whole in wholes:
                dist.broadcast(whole, 0)
            part = torch.cat([chunk.reshape(-1) for chunk in plan.own_chunks(wholes)])
            found = [torch.full_like(whole, torch.nan) for whole in wholes]
            gathered = start_gather(part, axis, plan, FIRST_TAG)
            assert isinstance(gathered, MessageGather)
            if plan.aligned:
                others = gathered.of_others()
                others[plan.own_start : plan.own_start + plan.own_size] = torch.nan
                plan.unpack(others, plan.pieces(found), gathered.part)
            else:
                plan.unpack(gathered.wait(), plan.pieces(found))
            assert all(map(torch.equal, found, wholes))
    finally:
        direct._SMALL = before


@pytest.mark.parametrize("world", [2, 4])
def test_what_a_rank_has_is_not_copied_to_be_copied(world):
    run_ranks(world, check_unpacking)
