"""What only accelerators use, as far as a CPU can show it: streams and events, and padded sections.

A device that writes down what is asked of it stands in for an accelerator. Beside its events stand the accesses of what
was really called, on the stream where that happened; what each touches is said here, not by the plan. So the checker
judges the run itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch

from fsdp.compare import Model, adamw, assert_same_parameters, batches, loss_of, mine, shard_blocks, train_alike
from fsdp.plan_checker import Checker, PlanError, plan_steps
from ranks import run_ranks
from terrazzo.comm.flat import FlatPlan
from terrazzo.fsdp import fully_shard
from terrazzo.fsdp.group import group_of
from terrazzo.fsdp.plan import planner
from terrazzo.fsdp.plan.operations import Buffer, Kind, Operation, Stream
from terrazzo.fsdp.run import bucket, root, streams
from terrazzo.fsdp.run.streams import Streams
from terrazzo.fsdp.run.unit import Unit
from terrazzo.tensor import init_device_mesh

Entry = tuple[Any, ...]


class Recorded:
    """A device module whose streams write down what is asked of them."""

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.now = "compute"
        self.has_results = True  # whether the host finds that events have come
        self.is_available = lambda: False  # asked by PyTorch's optimizers, which compute on the CPU
        recorded = self
        names = cycle([stream.value for stream in Stream if stream is not Stream.COMPUTE])  # for each root

        class Event:
            made = 0

            def __init__(self) -> None:
                Event.made += 1
                self.number = Event.made

            def record(self, stream: Any) -> None:
                recorded.log.append(("record", stream.name, self.number))

            def query(self) -> bool:
                return recorded.has_results

            def synchronize(self) -> None:
                pass

        class Line:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_event(self, event: Any) -> None:
                recorded.log.append(("wait", self.name, getattr(event, "number", event)))

            def __enter__(self) -> None:
                recorded.now = self.name

            def __exit__(self, *error: object) -> None:
                recorded.now = "compute"

        self.Event = Event
        self.computes = Line("compute")
        self.priorities: list[int] = []

        def stream(device: Any, priority: int) -> Line:
            self.priorities.append(priority)
            return Line(next(names))

        self.Stream = stream

    def current_stream(self, index: int | None) -> Any:
        return self.computes

    def stream(self, stream: Any) -> Any:
        return stream


# What each call touches: reads, writes, takes, gives.
TOUCHED: dict[str, tuple[str, str, str, str]] = {
    "gather": ("shard", "gathered", "gathered", ""),
    "gather_kept": ("kept", "gathered", "gathered", ""),
    "copy_out": ("gathered", "unsharded", "unsharded", "gathered kept"),
    "free": ("", "", "", "unsharded kept"),
    "keep": ("unsharded", "kept", "kept", "unsharded"),
    "discard": ("", "", "", "gathered"),
    "pack": ("gradients", "packed", "packed", "gradients"),
    "reduce": ("packed", "reduced", "reduced", ""),
    "all_reduce": ("reduced partial", "reduced", "", ""),
    "store": ("reduced partial", "partial", "partial", "reduced"),
    "release": ("", "", "", "packed"),
    "finish": ("reduced", "reduced result", "result", ""),
    "hand_over": ("result", "shard gradients", "", "packed reduced partial result"),
}


@contextmanager
def recording() -> Iterator[Recorded]:
    """Every root made meanwhile believes that it is on an accelerator."""
    recorded = Recorded()
    before: list[tuple[Any, str, Any]] = [
        (streams.torch, "get_device_module", streams.torch.get_device_module),
        (root, "streams_for", root.streams_for),
    ]
    streams.torch.get_device_module = lambda kind: recorded
    root.streams_for = lambda device: Streams(device)
    before.append((Unit, "save_writes", Unit.save_writes))
    setattr(Unit, "save_writes", logged_write(recorded, Unit.save_writes))  # noqa: B010
    for name in TOUCHED:
        before.append((Unit, name, getattr(Unit, name)))
        setattr(Unit, name, logged(recorded, name, getattr(Unit, name)))
    try:
        yield recorded
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def logged(recorded: Recorded, name: str, method: Any) -> Any:
    def call(self: Unit) -> Any:
        found = method(self)  # which may write to the shards first
        recorded.log.append(("call", recorded.now, name, self.index))
        return found

    return call


def logged_write(recorded: Recorded, method: Any) -> Any:
    def call(self: Unit) -> list[str]:
        written: list[str] = method(self)
        if written:
            recorded.log.append(("call", recorded.now, "write", self.index))
        return written

    return call


def judge(log: list[Entry]) -> None:
    """Raise if what was recorded has a race."""
    checker = Checker()
    for entry in log:
        if entry[0] == "wait":
            checker.wait(entry[1], entry[2])
        elif entry[0] == "record":
            checker.record(entry[1], entry[2])
        else:
            checker.access(entry[1], access_of(entry[2], entry[3]))


def access_of(name: str, unit: int) -> Operation:
    if name in ("write", "step", "forward", "backward"):  # of the user
        touched = {
            "write": ("unsharded", "shard", "", ""),
            "step": ("shard gradients", "shard", "", ""),
            "forward": ("unsharded", "", "", ""),
            "backward": ("unsharded", "gradients", "gradients", ""),
        }[name]
    else:
        touched = TOUCHED[name]
    reads, writes, takes, gives = (tuple(Buffer(kind, unit) for kind in _kinds(kinds) if kind) for kinds in touched)
    return Operation(Kind.USE, unit, reads=reads, writes=writes, takes=takes, gives=gives)


def _kinds(kinds: str) -> list[str]:
    return ["shard gradients"] if kinds == "shard gradients" else kinds.split()


def computes(recorded: Recorded, group: Any, module: Any, args: Any, out: torch.Tensor) -> None:
    """A module of a unit computes now, and will again in backward."""
    recorded.log.append(("call", "compute", "forward", group.unit.index))
    out.register_hook(lambda grad: recorded.log.append(("call", "compute", "backward", group.unit.index)))


def watch_units(recorded: Recorded, model: Any) -> None:
    for outer, inner in [(model, model.embed), *[(block, block.norm) for block in model.blocks]]:
        inner.register_forward_hook(partial(computes, recorded, root.group_of(outer)))


def train_recorded(shard: Callable[[Any], Any], steps: int = 3) -> tuple[list[Entry], Any]:
    """The log of some steps of a model, which computes right besides."""
    with recording() as recorded:

        def watched(model: Any) -> Any:
            shard(model)
            watch_units(recorded, model)
            return model

        def optimizer(model: Any) -> torch.optim.Optimizer:
            made = adamw(model)
            if hasattr(model, "unshard"):
                made.register_step_post_hook(
                    lambda *_: recorded.log.extend([("call", "compute", "step", i) for i in range(4)])
                )
            return made

        model = train_alike(watched, optimizer=optimizer, steps=steps)
    return recorded.log, model


def ways() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"reshard_after_forward": True}, {"reshard_after_forward": False}, {}]
    if torch.distributed.get_world_size() == 4:
        found += [{"reshard_after_forward": 2}, {"mesh": init_device_mesh("cpu", (2, 2))}]
    return found


def check_recorded() -> None:
    for options in ways():
        log, model = train_recorded(lambda model, options=options: shard_blocks(model, **options))
        judge(log)
        # What was called is what the plan says, on the streams that it says.
        spec = root.root_of(root.group_of(model)).spec()
        planned = [
            (each.stream.value, each.unit)
            for each in plan_steps(spec, 3).operations
            if each.kind not in (Kind.USE, Kind.WRITE, Kind.QUEUED, Kind.FOLLOW, Kind.SETTLE, Kind.REST, Kind.SHOW)
        ]
        called = [(entry[1], entry[3]) for entry in log if entry[0] == "call" and entry[2] in TOUCHED]
        assert called == planned, options


@pytest.mark.parametrize("world", [2, 4])
def test_a_recorded_run_is_free_of_races(world):
    run_ranks(world, check_recorded)


def check_race() -> None:
    """F3: without the event after which kept parameters are there, the next gather may be too early."""
    before = planner.Mark

    def forgetful(what: str, unit: int) -> Any:
        return before("nobody records this" if what == "kept" else what, unit)

    log, _ = train_recorded(lambda model: shard_blocks(model, reshard_after_forward=2))
    judge(log)
    planner.Mark = forgetful  # type: ignore[misc,assignment]
    original = planner._Planner._keep

    def keep(self: Any, unit: int) -> None:
        original(self, unit)
        if self.operations:
            last = self.operations[-1]
            if last.kind is Kind.KEEP:
                self.operations[-1] = Operation(
                    last.kind, unit, reads=last.reads, writes=last.writes, takes=last.takes, gives=last.gives
                )

    planner._Planner._keep = keep  # type: ignore[method-assign]
    try:
        with pytest.raises(PlanError, match="kept of . is read while"):
            train_recorded(lambda model: shard_blocks(model, reshard_after_forward=2))
    finally:
        planner.Mark = before  # type: ignore[misc]
        planner._Planner._keep = original  # type: ignore[method-assign]


def test_the_race_of_parameters_kept_over_a_smaller_mesh_is_found():
    run_ranks(4, check_race)


def check_accumulation() -> None:
    """Without all-reduce at first, and with reductions under way between backwards."""
    with recording() as recorded:
        model = Model()
        shard_blocks(model, mesh=init_device_mesh("cpu", (2, 2)))
        watch_units(recorded, model)
        for step in range(2):
            for last in (False, True):
                model.set_requires_all_reduce(last)
                model.set_is_last_backward(last)
                x, y = next(batches(1, seed=step))
                loss_of(model, mine(x), mine(y)).backward()
    names = [entry[2] for entry in recorded.log if entry[0] == "call"]
    assert names.count("store") == 4 and names.count("all_reduce") == 4  # of the root, and of the blocks
    judge(recorded.log)


def test_reductions_that_wait_for_others():
    run_ranks(4, check_accumulation)


def check_event() -> None:
    with recording() as recorded:
        torch.manual_seed(0)
        model = shard_blocks(Model())
        reference = Model()
        reference.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        model.set_post_optim_event("optimizer has stepped")
        for x, y in batches(3):
            loss_of(model, mine(x), mine(y)).backward()
        assert_same_parameters(model, reference, 0)
    assert set(recorded.priorities) == {-1}, "what is waited for does not queue behind what computes"
    waits = [entry for entry in recorded.log if entry == ("wait", "gather", "optimizer has stepped")]
    assert len(waits) == 1, "the event is waited for once"
    # Shards that are written between forward and backward: gathers wait for all that was queued, not for the event,
    # which is for the gathers of the next forward.
    with recording() as recorded:
        model = shard_blocks(Model())
        x, y = next(batches(1))
        loss_of(model, mine(x), mine(y)).backward()
        loss = loss_of(model, mine(x), mine(y))
        with torch.no_grad():
            for param in group_of(model).params:
                param.sharded.mul_(1)
        model.set_post_optim_event("of the next forward")
        recorded.log.clear()
        loss.backward()
        assert recorded.log[:2] == [("record", "compute", recorded.log[0][2]), ("wait", "gather", recorded.log[0][2])]
        assert ("wait", "gather", "of the next forward") not in recorded.log
        loss_of(model, mine(x), mine(y))
        assert ("wait", "gather", "of the next forward") in recorded.log


def test_the_users_event_is_waited_for_once():
    run_ranks(2, check_event)


def check_writes() -> None:
    """What is written in a step to what is unsharded is in the shards before the next gather, on its other stream."""

    def smaller(module: Any, args: Any) -> None:
        module.weight.data.mul_(0.9)

    def run() -> list[Entry]:
        with recording() as recorded:
            torch.manual_seed(0)
            model: Any = Model()
            shard_blocks(model)
            watch_units(recorded, model)
            for module in (model.head, *[block.down for block in model.blocks]):
                module.register_forward_pre_hook(smaller)
            for x, y in batches(2):
                loss_of(model, mine(x), mine(y)).backward()
        assert [entry[3] for entry in recorded.log if entry[2] == "write"] == [1, 0] * 2
        return recorded.log

    judge(run())
    # Gathers of a backward wait for everything before it, too, if shards were written since forward: without that,
    # what the plan says has to do.
    follow, original = planner._Planner.follow, Streams.on_stream
    planner._Planner.follow = lambda self: None  # type: ignore[method-assign]

    def forgetful(self: Streams, operation: Operation, call: Any) -> Any:
        waits = tuple(mark for mark in operation.waits if mark.what != "freed")
        return original(self, replace(operation, waits=waits), call)

    try:
        judge(run())
        Streams.on_stream = forgetful  # type: ignore[method-assign]
        with pytest.raises(PlanError, match="shard of . is read while"):
            judge(run())
    finally:
        planner._Planner.follow, Streams.on_stream = follow, original  # type: ignore[method-assign]


@pytest.mark.filterwarnings("ignore:.*were written to while their module ran")
def test_gathers_wait_for_writes_in_a_step():
    run_ranks(2, check_writes)


def padded(self: Any, axis: Any, params: Any, extra: int = 0) -> FlatPlan:
    """As on accelerators."""
    return FlatPlan([p.shape for p in params], [p.dim for p in params], axis.size, axis.index, True, extra)


def check_padded() -> None:
    bucket.Bucket.plan_over, before = padded, bucket.Bucket.plan_over  # type: ignore[method-assign]  # put back below
    try:
        for reshard in (True, 2 if torch.distributed.get_world_size() == 4 else False):
            train_alike(lambda model, reshard=reshard: shard_blocks(model, reshard_after_forward=reshard), steps=4)
        train_alike(fully_shard, steps=2)
    finally:
        bucket.Bucket.plan_over = before  # type: ignore[method-assign]


@pytest.mark.parametrize("world", [2, 4])
def test_training_with_sections_of_equal_length(world):
    run_ranks(world, check_padded)
