"""The plan of a step: free of races and within its memory, alike on all ranks, and what really runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp.compare import Model, apart, batches, loss_of, mine, shard_blocks
from fsdp.plan_checker import PlanError, check, collectives, plan_steps
from ranks import run_ranks
from terrazzo.errors import FSDPError
from terrazzo.fsdp import MixedPrecisionPolicy, explain, report, trace
from terrazzo.fsdp.group import group_of
from terrazzo.fsdp.plan.operations import HANDED_OVER, Buffer, Kind, Operation, Stream
from terrazzo.fsdp.plan.planner import advance
from terrazzo.fsdp.plan.state import Event, State, Where
from terrazzo.fsdp.plan.step import expected
from terrazzo.fsdp.plan.units import Sizes, Spec, UnitSpec
from terrazzo.fsdp.run.root import root_of
from terrazzo.tensor import init_device_mesh

SIZES = Sizes(
    shard=50,
    gathered=100,
    unsharded=100,
    kept=50,
    gradients=100,
    packed=100,
    reduced=50,
    gather_moves=50,
    kept_moves=25,
    reduce_moves=50,
    all_reduce_moves=50,
)
NAMES = ("root", "a", "b", "c", "d")
SETTINGS: list[dict[str, Any]] = [
    {"reshard_inner": inner, "replicated": replicated, "reshard_after_backward": reshard, "reshard_after_forward": free}
    for inner, replicated, reshard, free in product((False, True), repeat=4)
]


def spec_of(settings: dict[str, Any], streams: bool) -> Spec:
    return Spec(tuple(UnitSpec(name, sizes=SIZES, **settings) for name in NAMES), streams, overlapped=0)


@pytest.mark.parametrize("streams", [False, True])
def test_every_plan_is_free_of_races(streams):
    for settings in SETTINGS:
        for micro_batches in (1, 2):
            spec = spec_of(settings, streams)
            check(plan_steps(spec, 3, micro_batches=micro_batches).operations, spec)


def without(operations: Iterable[Operation], what: str) -> list[Operation]:
    """The operations with nobody waiting for marks of that name."""
    return [
        dataclasses.replace(each, waits=tuple(mark for mark in each.waits if mark.what != what)) for each in operations
    ]


@pytest.mark.parametrize(
    ("what", "settings", "message"),
    [
        ("kept", {"reshard_inner": True}, "kept of . is read while keep .* may write it on stream compute"),
        ("freed", {}, "shard of . is read while free .* may write it"),
        ("gathered", {}, "gathered of . is read while gather .* may write it on stream gather"),
        ("copied", {}, "gathered of . was given back, and its memory is taken while copy out .* may read it"),
        ("written", {}, "shard of . is read while write .* may write it"),
        ("packed", {}, "packed of . is read while pack .* may write it"),
        ("reduced", {}, "reduced of . is read while reduce .* may write it|packed of . was given back"),
        ("all-reduced", {"replicated": True}, "may"),
        ("finished", {}, "result of . is read while finish .* may write it"),
        ("handed over", {}, "result of . was given back, and its memory is taken while hand over .* may read it"),
    ],
)
def test_every_wait_is_needed(what, settings, message):
    """F3 was the first of these: parameters kept over a smaller mesh were gathered before they were copied there."""
    spec = spec_of(settings, streams=True)
    operations = plan_steps(spec, 2).operations
    if what != "all-reduced":
        check(operations, spec)
        with pytest.raises(PlanError, match=message):
            check(without(operations, what), spec)
        return
    # Whoever finishes runs on the stream of the all-reduce, so it is enough that nobody finishes elsewhere.
    elsewhere = [
        dataclasses.replace(each, stream=Stream.REDUCE) if each.kind is Kind.FINISH else each for each in operations
    ]
    check(elsewhere, spec)
    with pytest.raises(PlanError, match=message):
        check(without(elsewhere, what), spec)


def test_replicas_are_reduced_over_in_a_second_stage_on_a_stream_of_its_own():
    spec = spec_of({"replicated": True}, streams=True)
    operations = plan_steps(spec, 2).operations
    stages = (Kind.PACK, Kind.REDUCE, Kind.ALL_REDUCE, Kind.FINISH, Kind.HAND_OVER)
    streams = (Stream.COMPUTE, Stream.REDUCE, Stream.ALL_REDUCE, Stream.ALL_REDUCE, Stream.COMPUTE)
    for unit in range(len(NAMES)):
        mine = [(each.kind, each.stream) for each in operations if each.unit == unit and each.kind in stages]
        assert mine == [*zip(stages, streams, strict=True)] * 2
    # The next reduce-scatter waits for what it reads, and for no all-reduce.
    first, second = [i for i, each in enumerate(operations) if each.kind is Kind.REDUCE][:2]
    assert [mark.what for mark in operations[second].waits] == ["packed"]
    between = [(each.kind, each.unit) for each in operations[first:second]]
    assert (Kind.ALL_REDUCE, operations[first].unit) in between
    assert (Kind.FINISH, operations[first].unit) not in between, "nobody waits for it before the next are packed"


def test_gradients_may_be_read_and_freed_while_reductions_run():
    """With `set_is_last_backward(False)` the next backward takes memory on streams that have not seen these reads."""
    for settings in ({}, {"replicated": True}):
        spec = spec_of(settings, streams=True)
        operations = list(plan_steps(spec, 2, micro_batches=2).operations)
        noted = next(i for i, each in enumerate(operations) if each.kind is Kind.USE and each.records == HANDED_OVER)
        last = max(i for i in range(noted) if operations[i].kind is Kind.HAND_OVER)
        result = Buffer("result", operations[last].unit)
        kept = tuple(buffer for buffer in operations[last].gives if buffer != result)
        operations[last] = dataclasses.replace(operations[last], gives=kept)  # it became `.grad`
        operations.insert(noted, Operation(Kind.USE, result.unit, reads=(result,), gives=(result,)))
        check(operations, spec)
        del operations[noted + 1]
        with pytest.raises(
            PlanError, match="result of . was given back, and its memory is taken while use .* may read"
        ):
            check(operations, spec)


def test_memory_is_bounded_and_nothing_is_used_without():
    spec = spec_of({}, streams=True)
    operations = plan_steps(spec, 2).operations
    peak = check(operations, spec)
    check(operations, spec, bound=peak)
    with pytest.raises(PlanError, match=f"{peak} bytes are in use, but at most {peak - 1} are allowed"):
        check(operations, spec, bound=peak - 1)
    freed = next(i for i, each in enumerate(operations) if each.kind is Kind.FREE)
    with pytest.raises(PlanError, match="unsharded of . has no memory"):
        check([*operations[: freed + 1], Operation(Kind.USE, 1, reads=(Buffer("unsharded", 1),))], spec)


def test_stale_parameters_are_found():
    spec = spec_of({"reshard_after_backward": False}, streams=True)
    operations = plan_steps(spec, 2).operations
    check(operations, spec)
    second = [i for i, each in enumerate(operations) if each.kind is Kind.GATHER and each.epoch == 1]
    late = [each for i, each in enumerate(operations) if i != second[0]]
    kinds = (Kind.GATHER, Kind.COPY_OUT, Kind.FREE)
    stale = [each for each in late if each.kind not in kinds or each.unit != operations[second[0]].unit]
    with pytest.raises(PlanError, match="no memory|but the shards are at epoch 1"):
        check(stale, spec)


@pytest.mark.parametrize("streams", [False, True])
def test_what_backward_begins_with_is_gathered_once(streams):
    for micro, overlapped in product((1, 2), (0, 1000)):
        peaks = []
        for stays in (False, True):
            spec = dataclasses.replace(spec_of({"stays_if_last": stays}, streams), overlapped=overlapped)
            operations = plan_steps(spec, 3, micro_batches=micro).operations
            peaks.append(check(operations, spec))
            gathers = [NAMES[each.unit] for each in operations if each.kind is Kind.GATHER]
            assert [gathers.count(name) for name in NAMES[:-1]] == [2 * 3 * micro] * (len(NAMES) - 1)
            # The first forward knows no order.
            assert gathers.count(NAMES[-1]) == (3 * micro + 1 if stays else 2 * 3 * micro)
        assert peaks[1] == peaks[0]


def test_what_is_awaited_in_backward_is_freed_if_something_else_runs_before():
    spec = spec_of({"stays_if_last": True}, streams=False)
    order, last = tuple(range(len(NAMES))), len(NAMES) - 1
    events = expected(spec, (0, tuple((i, ()) for i in order[1:])))
    forward = events[: [event[0] for event in events].index(Event.FORWARD_ENDS) + 1]

    def after(state: State, *events: tuple[Any, ...]) -> tuple[State, list[Kind]]:
        kinds = []
        for event in events:
            operations, state = advance(spec, order, state, event)
            kinds += [each.kind for each in operations if each.unit == last]
        return state, kinds

    state, kinds = after(State.first(len(NAMES)), *forward)
    assert state.where[last] is Where.AWAITED and kinds[-1] is Kind.REST
    assert after(state, forward[0])[0].where[last] is Where.SHARDED  # another forward
    assert after(state, (Event.ENTER, 1, False))[1] == [Kind.FREE]
    assert after(state, (Event.ENTER, last, False))[1] == [Kind.SHOW, Kind.USE]  # it runs once more
    without = [(*event[:2], False, False) if event[0] is Event.LEAVE else event for event in forward]
    assert after(State.first(len(NAMES)), *without)[0].where[last] is Where.SHARDED  # no backward


# ------------------------------------------------------------------ of real models


def sharded_ways() -> list[dict[str, Any]]:
    if dist.get_world_size() == 4:  # what two ranks cannot do
        return [{"reshard_after_forward": 2}, {"mesh": init_device_mesh("cpu", (2, 2))}]
    return [
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ]


def check_models() -> None:
    for options, bound in product(sharded_ways(), (0, 500, 1 << 20)):  # each alone, root and two blocks, all
        model = shard_blocks(Model(), **options)
        model.set_coalesce_bytes(bound)
        root = root_of(group_of(model))
        x, y = next(batches(1))
        for _ in range(2):
            loss_of(model, mine(x), mine(y)).backward()
        with trace(model) as steps:
            loss_of(model, mine(x), mine(y)).backward()
        planned = explain(model)
        ran = [str(each) for each in steps.operations]
        assert ran == [str(each) for each in planned.operations if each.kind is not Kind.WRITE], options
        assert planned.moved == report(model).moved == steps.total_bytes()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, collectives(steps.operations))
        assert all(each == everyone[0] for each in everyone)
        # Small groups are gathered further ahead, and reduced meanwhile; without that the report's bound is strict.
        spec = dataclasses.replace(root.spec(), overlapped=0)
        check(plan_steps(spec, 2).operations, spec, bound=report(model).peak - report(model).held)


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_planned_is_what_runs(world):
    run_ranks(world, check_models)


def check_text() -> None:
    model = shard_blocks(Model(), reshard_after_forward=True)
    text = str(explain(apart(model)))
    lines = [line.split() for line in text.splitlines()]
    assert lines[0][:3] == ["stream", "what", "group"]
    assert [line[2] for line in lines if line[:2] == ["gather", "gather"]] == [
        *("Model", "blocks.0", "blocks.1", "blocks.2"),
        *("Model", "blocks.2", "blocks.1", "blocks.0"),
    ]
    with pytest.raises(FSDPError, match="Linear is not sharded: explain"):
        explain(nn.Linear(2, 2))


def test_explain():
    run_ranks(2, check_text)
