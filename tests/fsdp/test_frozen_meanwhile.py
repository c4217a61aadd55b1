"""Parameters that are frozen or trained again while gradients are accumulated have the gradients of one process.

Those that a parameter got before it was frozen stay, and are reduced with the others'. None are left for the next step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.compare import whole
from ranks import device_type, run_ranks
from terrazzo.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from terrazzo.tensor import init_device_mesh

pytestmark = pytest.mark.on_late

WIDTH, ROWS = 5, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return x + torch.tanh(self.inner(x)) if use else x * 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, unused: int) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, i != unused)
        return self.head(x)


class Micro(NamedTuple):
    """A micro-batch: what is reduced, and which parameters are frozen before forward, and before backward."""

    reduced: str = "all"
    frozen: tuple[str, ...] = ()
    late: tuple[str, ...] | None = None  # None: as before forward
    unused: int = -1  # the block that no rank but the first uses


BLOCK = "blocks.1.inner."
PROGRAMS: dict[str, list[Micro]] = {
    "one parameter": [Micro("none"), Micro(frozen=("blocks.0.inner.bias",))],
    "a whole block": [Micro("none"), Micro(frozen=(BLOCK,))],
    "the first block, which backward does not reach then": [Micro("none"), Micro(frozen=("blocks.0.",))],
    "all but the head": [Micro("none"), Micro(frozen=("blocks.",))],
    "in turn": [Micro("none"), Micro("none", ("blocks.",)), Micro("none", ("head", BLOCK)), Micro(frozen=("head.b",))],
    "trained again": [Micro("none"), Micro("none", (BLOCK, "head.bias")), Micro()],
    "trained later": [Micro("none", (BLOCK, "head.bias")), Micro("none"), Micro(frozen=("head", BLOCK))],
    "used by one rank": [Micro("none", unused=1), Micro(frozen=(BLOCK,), unused=1)],
    "used by one rank once": [Micro("none", unused=2), Micro("none", ("blocks.2",)), Micro(frozen=("blocks.",))],
    "after the first forward": [Micro("none", late=(BLOCK, "head.bias")), Micro(frozen=(BLOCK,))],
    "after the second forward": [Micro("none"), Micro(late=(BLOCK, "blocks.0.inner.bias", "head.bias"))],
}
TO_REPLICAS: dict[str, list[Micro]] = {
    "one block, then the others": [Micro("shards", ("blocks.0.", "head.bias")), Micro(frozen=("blocks.1", "blocks.2"))],
    "a whole block": [Micro("shards"), Micro(frozen=(BLOCK,))],
    "all but the head": [Micro("shards"), Micro(frozen=("blocks.",))],
    "in turn": [Micro("shards", (BLOCK,)), Micro("shards", ("blocks.0.",)), Micro("shards", ("head",)), Micro()],
    "both kinds": [Micro("none"), Micro("shards", ("blocks.0.",)), Micro("none", (BLOCK,)), Micro(frozen=("blocks.",))],
    "used by one rank": [Micro("shards", unused=1), Micro(frozen=(BLOCK,), unused=1)],
    "after the first forward": [Micro("shards", late=(BLOCK, "head.bias")), Micro(frozen=(BLOCK,))],
    "after the second forward": [Micro("shards"), Micro("shards", late=("head.bias",)), Micro(late=(BLOCK,))],
}


def set_flags(params: dict[str, Any], frozen: Sequence[str]) -> None:
    for name, param in params.items():
        param.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)


def run(module: Any, kept: dict[str, Any] | None, micro: Micro, seed: int, ranks: Sequence[int]) -> None:
    """Forward and backward of the ranks' parts. Flags are set on `kept` parameters, or those that are registered."""
    world = dist.get_world_size()
    x = torch.randn(world, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    set_flags(kept or dict(module.named_parameters()), micro.frozen)
    losses = [module(x[rank], micro.unused if rank else -1).float().square().mean() for rank in ranks]
    if micro.late is not None:
        set_flags(kept or dict(module.named_parameters()), micro.late)
    (torch.stack(losses).sum() / (world if len(ranks) == world else 1)).backward()


def compare(model: nn.Module, reference: nn.Module, tolerance: float, what: str) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{what}: {name}"
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(
                whole(p.grad).to(q.device), q.grad, rtol=tolerance, atol=tolerance, msg=f"{what}: {name} differs"
            )


def check(
    programs: dict[str, list[Micro]],
    mesh_shape: tuple[int, ...],
    coalesce: bool,
    held: bool,
    tolerance: float,
    options: dict[str, Any],
    after_backward: bool = True,
) -> None:
    mesh = init_device_mesh(device_type(), mesh_shape)
    torch.manual_seed(0)
    model: Any = Model()
    reference = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    model.set_reshard_after_backward(after_backward)
    if not coalesce:
        model.set_coalesce_bytes(0)
    kept = dict(model.named_parameters())
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, reference)]
    everyone = range(dist.get_world_size())
    for what, program in programs.items():
        for then, micros in ((f"{what}", program), (f"the step after {what!r}", [Micro()])):
            for seed, micro in enumerate(micros):
                model.set_requires_gradient_sync(micro.reduced != "none")
                model.set_requires_all_reduce(micro.reduced == "all")
                run(model, kept if held else None, micro, seed, [dist.get_rank()])
                run(reference, None, micro, seed, everyone if dist.get_world_size() > 1 else [0])
            for block in model.modules():
                if hasattr(block, "reshard"):
                    block.reshard()
            compare(model, reference, tolerance, then)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


EXACT = 1e-5
WIDE = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float32)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def check_settings() -> None:
    world = dist.get_world_size()
    both: list[tuple[bool, bool, float, dict[str, Any], bool]] = [
        (True, False, EXACT, {}, True),
        (False, True, EXACT, {"mp_policy": WIDE}, True),
        (True, True, EXACT, {"offload_policy": CPUOffloadPolicy(), "reshard_after_forward": False}, True),
        (False, False, EXACT, {"mp_policy": WIDE, "reshard_after_forward": True}, False),
        (True, False, 0.05, {"mp_policy": HALF}, True),
    ]
    for setting in both:
        check(PROGRAMS, (world,), *setting)
        if world > 1:
            check(PROGRAMS | TO_REPLICAS, (2, world // 2), *setting)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_parameters_frozen_between_micro_batches(world):
    run_ranks(world, check_settings)


def check_four() -> None:
    check(PROGRAMS | TO_REPLICAS, (2, 2), True, True, EXACT, {"mp_policy": WIDE})
    check(PROGRAMS, (4,), True, False, EXACT, {"reshard_after_forward": 2})


@pytest.mark.long
def test_parameters_frozen_between_micro_batches_on_four_ranks():
    run_ranks(4, check_four)


def check_replicas_with_other_counts() -> None:
    """A block is frozen in the last micro-batch of each step, which is the only one of the second replica."""
    mesh = init_device_mesh(device_type(), (2, 2))
    for switch in ("set_requires_all_reduce", "set_requires_gradient_sync"):
        for counts in ((3, 1), (1, 2)):
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 2))
            reference = copy.deepcopy(model)
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, reference)]
            for step in range(3):
                for module, ranks in ((model, [dist.get_rank()]), (reference, range(4))):
                    for rank in ranks:
                        for i in range(counts[rank // 2]):
                            is_last = i == counts[rank // 2] - 1
                            module[1].requires_grad_(not is_last)
                            if module is model:
                                getattr(model, switch)(is_last)
                            torch.manual_seed(100 * step + 10 * rank + i)
                            loss = module(torch.randn(5, 4)).square().mean()
                            (loss if module is model else loss / 4).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                compare_values(model, reference)


def compare_values(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, msg=name)  # type: ignore[operator]


@pytest.mark.on_late(sample=True)
def test_replicas_that_run_other_numbers_of_micro_batches():
    run_ranks(4, check_replicas_with_other_counts)


def check_running_reduction() -> None:
    """A reduction that still runs has the parameters that it began with."""
    torch.manual_seed(0)
    model: Any = Model()
    reference = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for frozen in (("blocks.0.inner.weight", "head.weight"), (BLOCK,)):
        for i, micro in enumerate([Micro(), Micro(frozen=frozen), Micro(), Micro(frozen=("blocks.2.inner.bias",))]):
            model.set_is_last_backward(i == 3)
            run(model, None, micro, i, [dist.get_rank()])
            run(reference, None, micro, i, range(dist.get_world_size()))
        compare(model, reference, EXACT, str(frozen))
        model.zero_grad()
        reference.zero_grad()


def test_parameters_frozen_while_a_reduction_runs():
    run_ranks(2, check_running_reduction)


def check_other_sections() -> None:
    """Gradients that wait for the replicas fit after a setting that pads sections."""
    torch.manual_seed(0)
    model: Any = Model()
    reference = copy.deepcopy(model)
    fully_shard(model, mesh=init_device_mesh(device_type(), (2, 2)))
    for i in range(2):
        model.set_requires_all_reduce(i == 1)
        run(model, None, Micro(), i, [dist.get_rank()])
        run(reference, None, Micro(), i, range(4))
        model.set_custom_reduce_scatter(Summing())
    compare(model, reference, EXACT, "padded")


class Summing:
    """A user's reduce-scatter."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@pytest.mark.on_late(sample=True)
def test_gradients_that_wait_for_the_replicas_fit_into_padded_sections():
    run_ranks(4, check_other_sections)
