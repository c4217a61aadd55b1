"""Mixed precision has the reference's arithmetic: what it computes in, accumulates in, reduces in and steps in."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.compare import Model, adamw, apart, assert_same_parameters, batches, loss_of, mine, shard_blocks
from ranks import run_ranks
from terrazzo.comm import add_observer, remove_observer
from terrazzo.fsdp import MixedPrecisionPolicy, fully_shard

pytestmark = pytest.mark.on_late(both=True)

HALF = torch.bfloat16


def simulated_gradients(model: Model, x: Tensor, y: Tensor, reduce_dtype: torch.dtype, cast: bool) -> list[Tensor]:
    """What the ranks' gradients in half precision come to, computed on one process."""
    world = dist.get_world_size()
    total: list[Tensor] = []
    for rank in range(world):
        half = copy.deepcopy(model).to(HALF)
        inputs = mine(x, rank).to(HALF) if cast else mine(x, rank)
        ((half(inputs).float() - mine(y, rank)) ** 2).mean().backward()
        grads = [p.grad.to(reduce_dtype) for p in half.parameters()]
        total = grads if not total else [a.float() + b.float() for a, b in zip(total, grads, strict=True)]
    return [(t.float() / world).to(reduce_dtype) for t in total]


def check_arithmetic(reduce_dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=reduce_dtype)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=replace(policy, output_dtype=torch.float32))
    ours, theirs = adamw(model), adamw(reference)
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    model.blocks[0].up.register_forward_hook(lambda m, args, out: seen.append((m.weight.dtype, args[0].dtype)))
    for x, y in batches(10):
        out = model(mine(x))
        assert out.dtype is torch.float32
        ((out - mine(y)) ** 2).mean().backward()
        for parameter, expected in zip(
            model.parameters(), simulated_gradients(reference, x, y, reduce_dtype or HALF, True), strict=True
        ):
            assert parameter.grad.dtype is torch.float32 is parameter.dtype
            # Half precision has eight bits: sums in another order differ in the last ones.
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.float(), rtol=0.02, atol=1e-3)
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.full_tensor()
        ours.step()
        theirs.step()
        ours.zero_grad()
        assert_same_parameters(model, reference)
    assert set(seen) == {(HALF, HALF)}


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_half_precision_computes_and_single_steps(world, reduce_dtype):
    run_ranks(world, check_arithmetic, reduce_dtype)


def check_accumulation() -> None:
    """Accumulated gradients add up in the reduce dtype: what half precision would swallow stays."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32))
    model.set_requires_gradient_sync(False)
    for scale in (256.0, 1.0, 1.0, 1.0):
        model(torch.full((1, 4), scale)).sum().backward()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 260.0))
    assert torch.full((4, 4), 256.0, dtype=HALF).add(1).float().max() == 256


@pytest.mark.parametrize("world", [1, 2])
def test_accumulation_is_in_the_reduce_dtype(world):
    run_ranks(world, check_accumulation)


def check_casts() -> None:
    torch.manual_seed(0)

    class Recording(nn.Linear):
        def forward(self, x: Tensor, *, mask: Tensor, index: Tensor) -> Tensor:
            self.seen = (x.dtype, mask.dtype, index.dtype)
            return super().forward(x.to(self.weight.dtype))

    def seen_by(policy: MixedPrecisionPolicy) -> tuple[torch.dtype, ...]:
        model = fully_shard(Recording(4, 4), mp_policy=policy)
        out = model(torch.ones(2, 4), mask=torch.ones(2), index=torch.ones(2, dtype=torch.int64))
        return (*model.seen, out.dtype)

    assert seen_by(MixedPrecisionPolicy(HALF)) == (HALF, HALF, torch.int64, HALF)
    assert seen_by(MixedPrecisionPolicy(HALF, cast_forward_inputs=False))[:2] == (torch.float32, torch.float32)
    assert seen_by(MixedPrecisionPolicy(output_dtype=torch.float64))[3] == torch.float64
    assert seen_by(MixedPrecisionPolicy(HALF, output_dtype=torch.float32))[3] == torch.float32


def test_inputs_and_outputs_are_cast_as_asked():
    run_ranks(1, check_casts)


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """Like a model output of Transformers: made once, also read by attribute, and no `update`."""

    logits: Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.logits, dict):
            self.logits = self.logits["logits"]
        super().__setitem__("logits", self.logits)

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key, value)
        setattr(self, key, value)

    def update(self, *args: object, **kwargs: object) -> None:
        raise Exception("no update")  # as there


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Output:
        return Output(self.layer(x))


def check_outputs_of_their_own() -> None:
    model = Answers()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    output = model(torch.ones(2, 4))
    assert type(output) is Output and output.logits is output["logits"]
    assert output.logits.dtype == torch.float32
    output.logits.sum().backward()
    assert model.layer.weight.grad is not None


def test_outputs_with_behaviour_of_their_own_are_cast():
    run_ranks(1, check_outputs_of_their_own)


def check_traffic() -> None:
    events: list[object] = []
    model = shard_blocks(Model(), mp_policy=MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32))
    apart(model)
    add_observer(events.append)
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y)).backward()
    remove_observer(events.append)
    elements = sum(p.numel() for p in model.blocks[0].parameters())
    assert {e.bytes for e in events if e.kind == "all_gather"} >= {elements * 2 // 2}
    count = len(list(model.blocks[0].parameters()))  # one more element each says whether there was a gradient
    assert {e.bytes for e in events if e.kind == "reduce_scatter"} >= {(elements + 2 * count) * 4 // 2}


@pytest.mark.cpu_only("sizes of messages")
def test_parameters_travel_in_the_param_dtype_and_gradients_in_the_reduce_dtype():
    run_ranks(2, check_traffic)


def check_frozen_half() -> None:
    """Frozen weights in half precision beside trainable single ones in one group, under a policy that casts."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 5).to(HALF).requires_grad_(False)
            self.adapter = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            assert self.base.weight.dtype is self.adapter.weight.dtype is x.dtype is HALF
            return self.base(x) + self.adapter(x)

    torch.manual_seed(0)
    model = Adapted()
    reference = copy.deepcopy(model).to(HALF)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(HALF, torch.float32))
    x = torch.randn(4, 6)
    out = model(x)
    torch.testing.assert_close(out, reference(x.to(HALF)))
    out.sum().backward()
    assert model.base.weight.grad is None and model.adapter.weight.grad.dtype is torch.float32
    reference(x.to(HALF)).sum().backward()
    torch.testing.assert_close(model.adapter.weight.grad.full_tensor(), reference.adapter.weight.grad.float())


def test_frozen_half_precision_weights_beside_trainable_ones():
    run_ranks(2, check_frozen_half)


def check_policies_differ() -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(HALF, torch.float32, torch.float32))
    fully_shard(model)
    x, y = next(batches(1))
    reference.blocks.to(HALF)
    for block in reference.blocks:
        block.register_forward_pre_hook(lambda m, args: (args[0].to(HALF),))
        block.register_forward_hook(lambda m, args, out: out.float())
    torch.testing.assert_close(model(x), reference(x))
    loss_of(model, mine(x), mine(y)).backward()
    assert model.embed.weight.grad is not None


def test_modules_with_policies_of_their_own():
    run_ranks(2, check_policies_differ)


class Embedding(nn.Embedding):
    def forward(self, words: Tensor, dense: bool) -> Tensor:  # type: ignore[override]
        return super().forward(words) + (self.weight.sum(0) if dense else 0)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = Embedding(9, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, words: Tensor, dense: bool) -> Tensor:
        return self.head(self.embedding(words, dense))  # type: ignore[no-any-return]


def check_sparse() -> None:
    """Sparse and dense gradients of one parameter are accumulated, in either order, as in one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wide = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float32)
    for policy in (wide, MixedPrecisionPolicy()):
        for dense in ((False, False, False), (False, True, False), (True, False, False), (False, True, True)):
            torch.manual_seed(0)
            model: Any = Words()
            reference = copy.deepcopy(model)
            fully_shard(model.embedding, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
            for i in range(3):
                model.set_requires_gradient_sync(i == 2)
                words = torch.randint(0, 9, (world, 6), generator=torch.Generator().manual_seed(i))
                model(words[rank], dense[i]).float().square().mean().backward()
                reference(words, dense[i]).square().mean().backward()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad.to_dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.cpu_only("sparse tensors")
def test_sparse_gradients_are_accumulated(world):
    run_ranks(world, check_sparse)
