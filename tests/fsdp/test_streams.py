"""What only accelerators use, as far as a CPU can show it: order of events, overlapping reductions, padded buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp.compare import Model, shard_blocks, train_alike
from ranks import run_ranks
from terrazzo.fsdp import bucket, streams
from terrazzo.fsdp.flat import FlatPlan
from terrazzo.fsdp.streams import GatherStream
from terrazzo.fsdp.unit import unit_of


class Recorded:
    """A device module whose streams write down what is asked of them."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.now = "compute"
        self.is_available = lambda: True  # asked by some versions of PyTorch
        recorded = self

        class Event:
            made = 0

            def __init__(self) -> None:
                Event.made += 1
                self.number = Event.made

            def record(self) -> None:
                recorded.log.append((recorded.now, "record", self.number))

        class Stream:
            def __init__(self, name: Any) -> None:
                self.name = "gather" if isinstance(name, torch.device) else name

            def wait_event(self, event: Any) -> None:
                recorded.log.append((self.name, "wait", getattr(event, "number", event)))

            def wait_stream(self, other: Any) -> None:
                recorded.log.append((self.name, "wait for", other.name))

            def __enter__(self) -> None:
                recorded.now = self.name

            def __exit__(self, *error: object) -> None:
                recorded.now = "compute"

        self.Event, self.Stream = Event, Stream

    def current_stream(self) -> Any:
        return self.Stream("compute")

    def stream(self, stream: Any) -> Any:
        return stream


@pytest.fixture
def device(monkeypatch):
    recorded = Recorded()
    monkeypatch.setattr(streams.torch, "get_device_module", lambda kind: recorded)
    return recorded


def test_a_buffer_is_reused_only_after_it_was_copied_out(device):
    stream = GatherStream(torch.device("cpu"))
    stream.wait_for_current()
    first = stream.start(lambda: device.log.append((device.now, "gather 1")))
    stream.finish(first, lambda: device.log.append((device.now, "copy 1")))
    stream.start(lambda: device.log.append((device.now, "gather 2")))
    assert device.log == [
        ("gather", "wait for", "compute"),  # the optimizer's writes
        ("gather", "gather 1"),
        ("gather", "record", 1),
        ("compute", "wait", 1),
        ("compute", "copy 1"),
        ("compute", "record", 2),
        ("gather", "wait", 2),
        ("gather", "gather 2"),
        ("gather", "record", 3),
    ]


def check_training_with_a_stream() -> None:
    before = streams.torch.get_device_module
    recorded = Recorded()

    def shard(model: Model) -> None:
        shard_blocks(model, reshard_after_forward=True)
        schedule = unit_of(model).ensure_schedule()
        streams.torch.get_device_module = lambda kind: recorded
        schedule.stream = GatherStream(torch.device("cpu"))
        model.set_post_optim_event("optimizer has stepped")

    try:
        train_alike(shard, steps=4)
    finally:
        streams.torch.get_device_module = before
    waits = [entry for entry in recorded.log if entry[:2] == ("gather", "wait") and entry[2] == "optimizer has stepped"]
    assert len(waits) == 1, "the event is waited for once"
    assert recorded.log.count(("gather", "wait for", "compute")) == 3, "the other steps wait for all that was queued"


def test_training_with_a_stream():
    run_ranks(2, check_training_with_a_stream)


def check_padded() -> None:
    def padded(self: Any, axis: Any, params: Any) -> FlatPlan:
        return FlatPlan([p.shape for p in params], [p.dim for p in params], axis.size, axis.index, equal=True)

    bucket.Bucket.plan_over, before = padded, bucket.Bucket.plan_over  # type: ignore[method-assign]  # put back below
    try:
        for reshard in (True, 2 if torch.distributed.get_world_size() == 4 else False):
            train_alike(lambda model, reshard=reshard: shard_blocks(model, reshard_after_forward=reshard), steps=4)
    finally:
        bucket.Bucket.plan_over = before  # type: ignore[method-assign]


@pytest.mark.parametrize("world", [2, 4])
def test_training_with_buffers_of_equal_length(world):
    run_ranks(world, check_padded)
