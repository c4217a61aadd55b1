"""Linear layers that communicate in chunks: one device's numbers and gradients, and what runs meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ranks import device_type, run_ranks
from terrazzo.comm import observe
from terrazzo.errors import ParallelPlanError
from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.on_late


def layers(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16, bias=bias), nn.GELU(), nn.Linear(16, 6, bias=bias))


def check(world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,))
    generator = torch.Generator().manual_seed(1)
    cases = ((4 * world, 2, True), (4 * world, 3, False), (2 * world, 5, True), (4 * world - 1, 2, True), (0, 2, True))
    for length, chunks, bias in cases:
        x, weight = (torch.randn(3, length, 6, generator=generator).to(device_type()) for _ in range(2))
        one = layers(bias).to(device_type())
        one_x = x.clone().requires_grad_()
        expected = one(one_x)
        (expected * weight).sum().backward()
        plan = {
            "0": ColwiseParallel(input_layouts=Shard(1), chunks=chunks),
            "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False, chunks=chunks),
        }
        model = parallelize_module(layers(bias).to(device_type()), mesh, plan)
        mine = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        with CommDebugMode() as seen:
            out = model(mine)
            assert out.placements == (Shard(1),)
            (out * distribute_tensor(weight, mesh, [Shard(1)])).sum().backward()
        torch.testing.assert_close(out.full_tensor(), expected)
        torch.testing.assert_close(mine.grad.full_tensor(), one_x.grad, rtol=1e-4, atol=1e-5)
        for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
        if world > 1 and length and length % world == 0:
            own = min(chunks, length // world)
            wanted = len(torch.arange(length // world).chunk(own))
            assert seen.get_comm_counts()["all_gather"] == seen.get_comm_counts()["reduce_scatter"] == 2 * wanted
    # What is not a sequence of shards runs as without chunks.
    plan = {"0": ColwiseParallel(chunks=2), "2": RowwiseParallel(chunks=2)}
    model = parallelize_module(layers(True).to(device_type()), mesh, plan)
    torch.testing.assert_close(model(x), layers(True).to(device_type())(x))
    with pytest.raises(ParallelPlanError, match="chunks is a number from 1, not 0"):
        ColwiseParallel(chunks=0)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_in_chunks(world: int) -> None:
    run_ranks(world, check, world)


class Order(TorchDispatchMode):
    """What is started, waited for and multiplied, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.seen.append("product")
        return func(*args, **(kwargs or {}))


def check_order() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(1), chunks=2),
        "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False, chunks=2),
    }
    model = parallelize_module(layers(False).to(device_type()), mesh, plan)
    x = distribute_tensor(torch.ones(3, 8, 6, device=device_type()), mesh, [Shard(1)]).requires_grad_()
    orders = []
    for run in (lambda: orders.append(model(x)), lambda: orders[0].sum().backward()):
        order = Order()
        started = lambda event: order.seen.append(f"{event.kind} starts")  # noqa: B023, E731
        ended = lambda kind, _: order.seen.append(f"{kind} ends")  # noqa: B023, E731
        observe.add_observer(started)
        observe.add_end_observer(ended)
        try:
            with order:
                run()
        finally:
            observe.remove_observer(started)
            observe.remove_end_observer(ended)
        orders.append(order.seen)
    forward, backward = orders[1], orders[2]
    assert forward[:5] == ["all_gather starts", "all_gather starts", "all_gather ends", "product", "all_gather ends"]
    assert forward[5:] == [
        "product", "product", "reduce_scatter starts", "product", "reduce_scatter starts", "reduce_scatter ends",
        "reduce_scatter ends",
    ]  # fmt: skip
    gathers = [event for event in backward if event.startswith("all_gather")]
    assert gathers == ["all_gather starts", "all_gather starts", "all_gather ends", "all_gather ends"]
    if device_type() != "cpu":
        return  # its backward has a thread of its own, whose products are not seen
    between = backward[backward.index("all_gather ends") : len(backward) - backward[::-1].index("all_gather ends")]
    assert between == ["all_gather ends", "product", "all_gather ends"]
    # The gradient of the first layer's weight is computed while that of its input is on its way.
    assert backward[-7:] == [
        "product", "reduce_scatter starts", "product", "reduce_scatter starts", "product", "reduce_scatter ends",
        "reduce_scatter ends",
    ]  # fmt: skip


def test_what_runs_meanwhile() -> None:
    run_ranks(2, check_order)
