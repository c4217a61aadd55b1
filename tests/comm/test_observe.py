"""Observers hear of every collective before it starts, and nobody hears of what is not sent."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ranks import run_ranks
from terrazzo.comm import CommEvent, add_observer, axis_of, collectives, differentiable, observe, remove_observer


class Listening:
    def __enter__(self) -> list[CommEvent]:
        self.events: list[CommEvent] = []
        add_observer(self.events.append)
        return self.events

    def __exit__(self, *error: object) -> None:
        remove_observer(self.events.append)


def counted() -> None:
    axis = axis_of(DeviceMesh("cpu", list(range(4))), 0)
    me = axis.index
    part = torch.ones(2, 3)  # 24 bytes
    whole = torch.ones(8, 3)  # 96 bytes
    uneven = (0, 1, 2, 5)
    with Listening() as events:
        collectives.all_reduce(whole, axis, "max")
        collectives.all_gather(part, axis, 0, (2,) * 4)
        collectives.all_gather(torch.ones(uneven[me], 3), axis, 0, uneven)
        collectives.reduce_scatter_start(whole, axis, 0, uneven, "avg").wait()
        collectives.all_to_all(torch.ones(8, 2), axis, 0, (2,) * 4, 1, (2,) * 4)  # of 64 bytes a quarter stays
        collectives.exchange(
            [None if i < me else part for i in range(4)],
            axis,
            [None if i > me else (2, 3) for i in range(4)],
            part,
        )
        collectives.broadcast(whole, axis, 3)
        collectives.scatter([part] * 4 if me == 1 else None, axis, 1, (2, 3), part)
    assert [(event.kind, event.bytes, event.op, event.async_op) for event in events] == [
        ("all_reduce", 2 * 72, "max", False),
        ("all_gather", 72, None, False),
        ("all_gather", 72, None, False),
        ("reduce_scatter", 72, "avg", True),
        ("all_to_all", 48, None, False),
        ("exchange", 24 * (3 - me), None, False),
        ("broadcast", 72, None, False),
        ("scatter", 72 if me == 1 else 0, None, False),
    ]
    assert all(event.axis is axis and not event.in_backward for event in events)
    assert observe.observers == ()


def test_every_kind_is_reported_with_its_bytes() -> None:
    run_ranks(4, counted)


def backward_is_told_apart() -> None:
    axis = axis_of(DeviceMesh("cpu", [0, 1]), 0)
    x = torch.ones(3, requires_grad=True)
    with Listening() as events:
        differentiable.gather_varying(x, axis, 0, (3, 3)).sum().backward()
    assert [(event.kind, event.in_backward, event.async_op) for event in events] == [
        ("all_gather", False, False),
        ("reduce_scatter", True, False),
    ]


def test_backward_is_told_apart() -> None:
    run_ranks(2, backward_is_told_apart)


def refuse(event: CommEvent) -> None:
    raise PermissionError(event.kind)


def refused_before_it_starts() -> None:
    axis = axis_of(DeviceMesh("cpu", [0, 1]), 0)
    x = torch.ones(3)
    if dist.get_rank() == 0:  # had it been sent, it would meet the sum below
        add_observer(refuse)
        with pytest.raises(PermissionError, match="all_reduce"):
            collectives.all_reduce(x, axis)
        remove_observer(refuse)
    assert torch.equal(collectives.all_reduce(x * (axis.index + 1), axis), x * 3)


def test_an_observer_may_refuse() -> None:
    run_ranks(2, refused_before_it_starts)


def silent() -> None:
    axis = axis_of(DeviceMesh("cpu", [0]), 0)
    x = torch.ones(3, requires_grad=True)
    with Listening() as events:
        collectives.all_reduce(x, axis)
        differentiable.gather_varying(x, axis, 0, (3,)).sum().backward()
    assert events == []


def test_one_rank_sends_nothing() -> None:
    run_ranks(1, silent)


def test_observers_are_added_and_removed_from_any_thread() -> None:
    def add_and_remove() -> None:
        for _ in range(300):
            add_observer(refuse)
            remove_observer(refuse)

    threads = [threading.Thread(target=add_and_remove) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert observe.observers == ()
    with pytest.raises(ValueError):
        remove_observer(refuse)
