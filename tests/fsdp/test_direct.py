"""Collectives as messages between pairs, and those among very many ranks, against what they have to give."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp.plan_checker import check as check_plan
from fsdp.plan_checker import plan_steps
from ranks import run_ranks
from terrazzo.comm import add_observer, flat, in_place, remove_observer, sections
from terrazzo.comm.axis import axis_over
from terrazzo.comm.flat import FlatPlan
from terrazzo.comm.in_place import InPlace
from terrazzo.comm.sections import FIRST_TAG, start_gather, start_reduce
from terrazzo.fsdp import MixedPrecisionPolicy, explain, fully_shard, report, trace
from terrazzo.fsdp.group import group_of
from terrazzo.fsdp.plan.operations import Kind
from terrazzo.fsdp.run.root import root_of
from terrazzo.tensor import init_device_mesh


def check(uneven: bool, dtype: torch.dtype) -> None:
    sections._SMALL, before = 0, sections._SMALL
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
        sections._SMALL = before
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


def check_in_place(dtype: torch.dtype) -> None:
    """Some tensors travel by themselves, others together, and what is extra with these."""
    kept = sections._SMALL, in_place._LARGE
    sections._SMALL, in_place._LARGE = 0, 20 * dtype.itemsize
    world, rank = dist.get_world_size(), dist.get_rank()
    axis = axis_over(tuple(range(world)), "cpu")
    try:
        for shapes in ([(2 * world,), (4 * world, 7), (world, 3), (world, 2, 30)], [(world, 50)], [(world,)]):
            dims = [0] * len(shapes)
            plan, reduced = (FlatPlan(shapes, dims, world, rank, False, extra) for extra in (0, 2))
            assert InPlace.suits(plan, axis, dtype.itemsize) is (max(plan.own_splits) >= 20), "where a tensor is large"
            torch.manual_seed(0)
            values = [[torch.randint(-9, 9, shape).to(dtype) for shape in shapes] for _ in range(world)]
            part = torch.cat([chunk.reshape(-1) for chunk in plan.own_chunks(values[0])])
            found = [[torch.full_like(whole, 99) for whole in values[0]] for _ in range(2)]
            first, second = [
                InPlace(plan, dtype.itemsize).gather(part * (i + 1), plan.pieces(found[i]), axis, FIRST_TAG + 2 * i)
                for i in range(2)
            ]
            second.wait(), first.wait()
            assert all(map(torch.equal, found[0], values[0]))
            assert all(torch.equal(a, b * 2) for a, b in zip(found[1], values[0], strict=True))
            counts = torch.tensor([rank, 1]).to(dtype)
            mine = [values[rank][0].clone(), *values[rank][1:]]
            for op, divisor in (("sum", 1), ("avg", world)):
                section = InPlace(reduced, dtype.itemsize).reduce(mine, counts, axis, op, FIRST_TAG + 1).wait()
                sums = [torch.stack(each).float().sum(0) / divisor for each in zip(*values, strict=True)]
                expected = [chunk.reshape(-1) for chunk in reduced.own_chunks(sums)]
                expected.append(torch.tensor([sum(range(world)), world]) / divisor)
                assert torch.equal(section, torch.cat(expected).to(dtype)), (shapes, op)
            assert all(map(torch.equal, mine, values[rank])), "gradients are left as they were"
    finally:
        sections._SMALL, in_place._LARGE = kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_sections_that_arrive_where_they_belong(world, dtype):
    run_ranks(world, check_in_place, dtype)


class Even(nn.Module):
    """Whose chunks are alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        self.embed, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, rank: int = -1) -> torch.Tensor:
        x = self.layers(self.embed(x))
        return self.unused(x) if rank == 0 else x + 1  # on one rank's data only


def train_even(in_place_too: bool, accumulate: bool, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    model = Even()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)
    model.set_coalesce_bytes(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with trace(model) as steps:
        for step in range(3):
            model.set_requires_gradient_sync(not accumulate or step != 0)
            x = torch.randn(2 * world, 8)[2 * rank : 2 * rank + 2]
            model(x, rank).float().square().sum().backward()
            if not accumulate or step != 0:
                optimizer.step()
                optimizer.zero_grad()
        handle = model.layers[0].unshard(async_op=True)
        model.layers[0].reshard()  # which nobody waited for
        handle.wait()
        model(torch.ones(1, 8))
    # A gather in place writes the parameters, and has memory for them.
    found = {
        any(buffer.kind == "unsharded" for buffer in each.writes)
        for each in steps.operations
        if each.kind is Kind.GATHER and each.reads[0].kind == "shard"
    }
    assert found == {in_place_too}
    check_plan(steps.operations, root_of(group_of(model)).spec())
    x = torch.ones(1, 8, dtype=dtype)
    model(x).sum().backward()
    with trace(model) as steps:
        model(x).sum().backward()
    planned = explain(model)
    assert [str(e) for e in steps.operations] == [str(e) for e in planned.operations if e.kind is not Kind.WRITE]
    assert planned.moved == report(model).moved == steps.total_bytes()
    spec = dataclasses.replace(root_of(group_of(model)).spec(), overlapped=0)
    check_plan(plan_steps(spec, 2).operations, spec, bound=report(model).peak - report(model).held)
    return [value.full_tensor() for value in model.state_dict().values()]


def check_training() -> None:
    kept = sections._SMALL, in_place._LARGE
    ways: list[tuple[bool, torch.dtype, dict[str, Any]]] = [
        (False, torch.float32, {}),
        (True, torch.float32, {"reshard_after_forward": True}),
        (False, torch.bfloat16, {"reshard_after_forward": False}),
    ]
    if dist.get_world_size() == 4:
        ways += [
            (True, torch.float32, {"mesh": init_device_mesh("cpu", (2, 2))}),
            (False, torch.float32, {"reshard_after_forward": 2}),
        ]
    for accumulate, dtype, options in ways:
        usual = train_even(False, accumulate, dtype, **options)
        try:
            sections._SMALL, in_place._LARGE = 0, 128 // dist.get_world_size()  # of a weight in bfloat16
            found = train_even(True, accumulate, dtype, **options)
        finally:
            sections._SMALL, in_place._LARGE = kept
        assert all(map(torch.equal, usual, found)), "bit for bit"


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_training_with_groups_that_travel_in_place(world):
    run_ranks(world, check_training)
