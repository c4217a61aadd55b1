"""By what gradients are divided, and when: as PyTorch does it, which says so in a function of its own."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from fsdp.compare import Model, apart, shard_blocks, train_alike
from ranks import device_type, run_ranks
from terrazzo._torch.groups import premultiplied_sum
from terrazzo.comm import in_place, sections, wire
from terrazzo.comm.flat import FlatPlan
from terrazzo.comm.wire import ScaledSum
from terrazzo.fsdp import MixedPrecisionPolicy, fully_shard, report
from terrazzo.fsdp.run import bucket
from terrazzo.fsdp.run.division import Ways, division_of
from terrazzo.tensor import init_device_mesh

pytestmark = pytest.mark.on_late(both=True)


class Ranks:
    """As much of a process group as the function asks for."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def said(op: Any) -> Any:
    """What PyTorch asks NCCL for."""
    if op == ReduceOp.PREMUL_SUM:
        return ScaledSum(op.factor)
    assert op == ReduceOp.AVG or op == ReduceOp.SUM
    return "avg" if op == ReduceOp.AVG else "sum"


FACTORS = (None, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 64.0, 0.5)


def test_factors_are_pytorchs():
    sizes = [(2, 1), (4, 1), (4, 2), (3, 1), (8, 16), (1, 4)]
    for dtype, factor, force, (shards, replicas) in product(
        (torch.float32, torch.bfloat16, torch.float16), FACTORS, (False, True), sizes
    ):
        groups: Any = Ranks(shards), Ranks(replicas) if replicas > 1 else None
        before, after, scatter, all_reduce = _get_gradient_divide_factors(*groups, dtype, "cuda", factor, force)
        found = division_of(dtype, Ways.SUMS if force else Ways.NATIVE, shards, replicas, factor)
        if factor == 1.0:  # which they divide by, or multiply by
            assert said(scatter) in ("sum", ScaledSum(1.0), *(["avg"] if shards == 1 else [])) and found.shards == "sum"
        elif factor == shards * replicas == shards and not force and dtype is not torch.float16:
            assert found.shards == said(scatter) == "avg"  # and there is nobody else
        else:
            assert (found.shards, found.replicas) == (said(scatter), said(all_reduce)), (dtype, factor, force, shards)
        wanted = (before or 1.0, after or 1.0)
        assert (found.before or 1.0, found.after or 1.0) == wanted, (dtype, factor, force, shards, replicas)


def test_whatever_is_chosen_the_sum_is_divided_by_the_same():
    for ways, dtype, factor, (shards, replicas), already in product(
        Ways, (torch.float32, torch.float16), FACTORS, [(2, 1), (4, 2), (3, 5)], (False, True)
    ):
        found = division_of(dtype, ways, shards, replicas, factor, already)
        total = (found.before or 1) * (found.after or 1)
        total *= (
            1 / found.shards.factor if isinstance(found.shards, ScaledSum) else {"sum": 1, "avg": shards}[found.shards]
        )
        total *= {"sum": 1, "avg": replicas}[found.replicas]
        ranks = shards * replicas
        assert total == pytest.approx((factor or ranks) * (ranks if already else 1)), (ways, dtype, factor, already)
        if ways is Ways.SUMS:
            assert found.shards == found.replicas == "sum"
        if ways is Ways.EXACT:
            assert not isinstance(found.shards, ScaledSum)


# ------------------------------------------------------------------ what a backend that divides is asked for


class Backend:
    """One that averages and multiplies as it reduces, and writes down what it was asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        patch.setattr(bucket.Bucket, "plan_over", padded)
        patch.setattr(wire, "has_reduce_scatter", lambda x: True)
        patch.setattr(wire, "averages", lambda axis, x: True)
        patch.setattr(wire, "reduce_scatter_flat", self.reduce_scatter)

    def reduce_scatter(self, group: Any, out: torch.Tensor, buffer: torch.Tensor, options: Any) -> None:
        op, n = options.reduceOp, group.size()
        self.asked.append(said(op))
        parts = torch.empty_like(buffer)
        dist.all_to_all_single(parts, buffer, group=group)
        rows = parts.view(n, -1)
        if op == ReduceOp.AVG:
            out.copy_(rows.mean(0))
        else:
            out.copy_((rows * op.factor if op == ReduceOp.PREMUL_SUM else rows).sum(0))


def padded(self: Any, axis: Any, params: Any, extra: int = 0) -> FlatPlan:
    """As on accelerators."""
    return FlatPlan([p.shape for p in params], [p.dim for p in params], axis.size, axis.index, True, extra)


def sgd(model: Any, factor: float) -> torch.optim.Optimizer:
    """With a learning rate for gradients that are that much smaller."""
    return torch.optim.SGD(model.parameters(), 0.1 * (factor if hasattr(model, "unshard") else 1.0))


def check_asked() -> None:
    n = dist.get_world_size()

    def train(factor: float | None, force: bool, scale: float = 1.0, **options: Any) -> set[Any]:
        def shard(model: Any) -> None:
            shard_blocks(model, **options)
            for module in (model, *model.blocks):
                if factor is not None:
                    module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(force)

        with pytest.MonkeyPatch.context() as patch:
            backend = Backend(patch)
            train_alike(shard, steps=3, clip=None, optimizer=partial(sgd, factor=1 / scale))
        assert backend.asked
        return set(backend.asked)

    assert train(None, False) == {"avg"}
    assert train(float(n), False) == {"avg"}
    assert train(5.0, False, scale=n / 5) == {ScaledSum(0.2)}
    assert train(None, True) == {"sum"}
    assert train(float(n), True) == {"sum"}
    assert train(5.0, True, scale=n / 5) == {"sum"}
    if n == 4:
        square = init_device_mesh(device_type(), (2, 2))
        assert train(None, False, mesh=square) == {"avg"}
        assert train(2.0, False, scale=2.0, mesh=square) == {"avg"}  # over the shards; replicas are added
        assert train(4.0, False, mesh=square) == {ScaledSum(0.25)}


@pytest.mark.skipif(
    not hasattr(premultiplied_sum(1.0), "factor"), reason="this version of PyTorch does not tell a sum's factor"
)
@pytest.mark.parametrize("world", [2, 4])
def test_a_backend_is_asked_for_what_it_can_do(world):
    run_ranks(world, check_asked)


# ------------------------------------------------------------------ float16


class Steep(nn.Module):
    """Whose gradients are near the end of float16 on every rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sum() + self.second(x).sum()


def check_float16() -> None:
    """Sums of what ranks have are too large for float16, and their means, and halves of sums, are not."""
    n = dist.get_world_size()
    value = 80000.0 / n if n == 2 else 120000.0 / n
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    kept = sections._SMALL, in_place._LARGE
    ways: list[tuple[float | None, bool, bool, Any]] = [
        (factor, force, large, None)
        for factor, force, large in product((None, float(n), 2.0 * n), (False, True), (False, True))
    ]
    if n == 4:
        ways += [(factor, force, False, (2, 2)) for factor, force in product((None, 4.0), (False, True))]
    for factor, force, large, sizes in ways:
        mesh = init_device_mesh(device_type(), (n,) if sizes is None else sizes)
        model = Steep(8)
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(force)
        for together in (0, 4 << 20):
            model.set_coalesce_bytes(together)
            model.zero_grad()
            try:
                if large:  # as groups of more than 4 MiB are
                    sections._SMALL, in_place._LARGE = 0, 16
                model(torch.full((1, 8), value)).backward()
            finally:
                sections._SMALL, in_place._LARGE = kept
            wanted = torch.full((8, 8), value * n / (factor or n))
            for p in model.parameters():
                grad = p.grad.full_tensor()
                torch.testing.assert_close(
                    grad, wanted, rtol=1e-3, atol=0, msg=f"{factor} {force} {large} {sizes} {grad}"
                )


@pytest.mark.parametrize("world", [2, 4])
def test_sums_that_have_no_room_in_float16(world):
    run_ranks(world, check_float16)


def check_infinite() -> None:
    """What is not finite stays so: a GradScaler looks for it."""
    model = apart(fully_shard(nn.Linear(8, 8, bias=False), mp_policy=MixedPrecisionPolicy(torch.float16)))
    model(torch.full((1, 8), float("inf"))).sum().backward()
    assert model.weight.grad.full_tensor().isinf().all()


def test_infinite_gradients_stay_so():
    run_ranks(2, check_infinite)


def check_factors_go_together() -> None:
    """Groups whose gradients are divided alike go in one message."""

    def shard(model: Any) -> None:
        shard_blocks(model)
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(float(dist.get_world_size()))

    model = train_alike(shard, make=Model)
    assert [unit.together for unit in report(model).groups] == [("Model",), ("blocks.0", "blocks.1", "blocks.2")]
    model.blocks[1].set_gradient_divide_factor(7.0)
    assert all(len(unit.together) == 1 for unit in report(model).groups)


@pytest.mark.cpu_only("counts messages")
def test_groups_that_are_divided_alike_go_together():
    run_ranks(2, check_factors_go_together)
