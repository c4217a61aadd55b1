"""Sharded models beside the rest of PyTorch: checkpointing of activations, compilation, scaling, RNNs, debug modes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fsdp.compare import (
    Block,
    Model,
    adamw,
    apart,
    assert_same_parameters,
    batches,
    loss_of,
    mine,
    shard_blocks,
    train_alike,
    whole,
)
from ranks import device_type, run_ranks
from terrazzo.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from terrazzo.tensor import DTensor

pytestmark = pytest.mark.on_late(both=True)


class Checkpointed(Model):
    """Recomputes in backward: each block, or all of them as one segment."""

    reentrant = False
    segment = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.segment:
            x = checkpoint(self._blocks, x, use_reentrant=self.reentrant)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)

    def _blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class CheckpointedInside(Block):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def check_checkpointing(reentrant: bool) -> None:
    Checkpointed.reentrant = CheckpointedInside.reentrant = reentrant
    for segment in (False, True):
        Checkpointed.segment = segment
        for reshard in (True, False):
            train_alike(lambda m, r=reshard: shard_blocks(m, reshard_after_forward=r), make=Checkpointed, steps=4)

    def inside() -> Model:
        model = Model()
        model.blocks = nn.ModuleList([CheckpointedInside() for _ in range(3)])
        return model

    train_alike(shard_blocks, make=inside, steps=4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_activation_checkpointing(world, reentrant):
    run_ranks(world, check_checkpointing, reentrant)


def check_wrapper() -> None:
    def wrap_then_shard(model: Model) -> None:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = fully_shard(checkpoint_wrapper(block))
        fully_shard(model)

    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    wrap_then_shard(model)
    ours, theirs = adamw(model), adamw(reference)
    for x, y in batches(4):
        loss_of(model, mine(x), mine(y)).backward()
        loss_of(reference, x, y).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert [n for n, _ in model.named_parameters()][2] == "blocks.0._checkpoint_wrapped_module.norm.weight"
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-5, atol=1e-5)


def test_checkpoint_wrapper():
    run_ranks(2, check_wrapper)


def check_compile() -> None:
    def compile_then_shard(model: Model) -> None:
        for block in model.blocks:
            block.compile(backend="aot_eager")
        shard_blocks(model)

    def shard_then_compile(model: Model) -> None:
        shard_blocks(model)
        for block in model.blocks:
            block.compile(backend="aot_eager")

    torch._dynamo.reset()
    for prepare in (compile_then_shard, shard_then_compile):
        model = train_alike(prepare, steps=3)
        assert model.blocks[0]._compiled_call_impl is not None
    torch._dynamo.reset()


def test_compiled_blocks():
    run_ranks(2, check_compile)


def check_compiled_root() -> None:
    """Compiling the whole: the gathers stay outside of the graphs."""
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    shard_blocks(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for x, y in batches(2):
        model.zero_grad()
        reference.zero_grad()
        loss_of(compiled, mine(x), mine(y)).backward()
        loss_of(reference, x, y).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


def test_a_compiled_root():
    run_ranks(2, check_compiled_root)


def check_grad_scaler() -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    shard_blocks(model)
    ours, theirs = adamw(model), adamw(reference)
    scalers = [torch.amp.GradScaler(device_type(), init_scale=2.0**8, growth_interval=2) for _ in range(2)]
    for step, (x, y) in enumerate(batches(5)):
        if step == 2 and dist.get_rank() == 0:
            x[0, 0] = float("inf")  # the data of one rank overflow: all ranks skip the step
        x[0, 0] = float("inf") if step == 2 else x[0, 0]
        for module, optimizer, scaler, part in (
            (model, ours, scalers[0], mine),
            (reference, theirs, scalers[1], lambda t: t),
        ):
            scaler.scale(loss_of(module, part(x), part(y))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_same_parameters(model, reference)


def test_grad_scaler():
    run_ranks(2, check_grad_scaler)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x.unsqueeze(1).expand(-1, 3, -1))
        return self.head(out[:, -1])


def check_lstm() -> None:
    def shard(model: Recurrent) -> None:
        fully_shard(model.rnn)
        fully_shard(model)

    train_alike(shard, make=Recurrent, steps=4)


def test_modules_that_keep_lists_of_their_parameters():
    run_ranks(2, check_lstm)


class Attention(nn.Module):
    """Reads its six inputs as three words of two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.unflatten(1, (3, 2)))).mean(1)) * self.scale


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """For models with gradients that are zero but for rounding (keys' biases): Adam would make steps of them."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def check_transformer() -> None:
    def shard(model: Attention) -> None:
        for layer in model.encoder.layers:
            fully_shard(layer)
        fully_shard(model)

    model = train_alike(shard, make=Attention, optimizer=momentum)
    assert not isinstance(model.scale, DTensor)
    with torch.no_grad():
        model.eval()(torch.randn(2, 6))


def test_a_transformer_of_torch():
    run_ranks(2, check_transformer)


def check_state_dict() -> None:
    torch.manual_seed(0)
    model = Model()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    shard_blocks(model, reshard_after_forward=False)
    x, y = next(batches(1))
    model(x)
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    state = model.state_dict()
    assert list(state) == list(plain)
    for name, value in state.items():
        assert isinstance(value, DTensor) and torch.equal(value.full_tensor(), plain[name])
    model(x)
    assert isinstance(model.blocks[0].up.state_dict()["weight"], DTensor), "of a part of a group too"

    model(x)
    doubled = {name: value * 2 for name, value in state.items()}
    model.load_state_dict(doubled)
    reference = Model()
    reference.load_state_dict({name: value * 2 for name, value in plain.items()})
    torch.testing.assert_close(model(x), reference(x))

    with torch.device("meta"):
        other = Model()
    shard_blocks(other)
    other.load_state_dict(doubled, assign=True)
    ours, theirs = adamw(other), adamw(reference)
    torch.testing.assert_close(other(x), reference(x))
    for module, optimizer, part in ((other, ours, mine), (reference, theirs, lambda t: t)):
        loss_of(module, part(x), part(y)).backward()
        optimizer.step()
    assert_same_parameters(other, reference)


@pytest.mark.parametrize("world", [2, 4])
def test_state_dicts(world):
    run_ranks(world, check_state_dict)


def check_no_grad_kinds() -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    shard_blocks(model)
    x, y = next(batches(1))
    with torch.inference_mode():
        torch.testing.assert_close(model(x), reference(x))
    loss_of(model, mine(x), mine(y)).backward()
    loss_of(reference, x, y).backward()
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), reference.head.weight.grad, rtol=1e-5, atol=1e-5)
    with torch.autocast(device_type(), torch.bfloat16):
        torch.testing.assert_close(model(x), reference(x))
    gradients = torch.autograd.grad(model(x).sum(), [model.blocks[0].unshard() or model.blocks[0].up.weight])
    expected = torch.autograd.grad(reference(x).sum(), [reference.blocks[0].up.weight])
    torch.testing.assert_close(gradients, expected)


def test_inference_mode_autocast_and_autograd_grad():
    run_ranks(2, check_no_grad_kinds)


class RunInBackward(torch.autograd.Function):
    """Multiplies gradients by the outputs of a model that runs in backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module) -> Tensor:
        ctx.model, ctx.x = model, x.detach()
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            return grads[0] * ctx.model(ctx.x).sum(), None


def check_only_in_backward(reshard_after_forward: bool | None) -> None:
    """No other forward has prepared the model, nor tells it of what is written to it."""
    torch.manual_seed(0)
    reference = Model()
    model = shard_blocks(copy.deepcopy(reference), reshard_after_forward=reshard_after_forward)
    shards: list[Any] = list(model.parameters())  # state_dict() would have what is unsharded gathered again

    def write(turn: int) -> None:
        with torch.no_grad():
            for p, q in zip(shards, reference.parameters(), strict=True):
                if turn == 0:
                    p.mul_(1.5), q.mul_(1.5)
                elif q.dim() == 1:
                    q[0] = 5  # which the first rank has
                    if dist.get_rank() == 0:
                        p.to_local()[0] = 5
        if turn == 2:
            new = {name: p + 1 for name, p in model.state_dict().items()}
            model.load_state_dict(new, assign=True)
            reference.load_state_dict({name: q + 1 for name, q in reference.state_dict().items()})

    for turn in range(4):
        found = []
        for each in (model, reference):
            x = next(batches(1))[0].requires_grad_()
            RunInBackward.apply(x, each).sum().backward()
            found.append(x.grad)
        torch.testing.assert_close(*found)
        write(turn)


@pytest.mark.cpu_only("on accelerators each rank answers for itself whether shards were written")
def test_a_model_that_runs_in_the_backward_of_another():
    for reshard_after_forward in (None, True, False):
        run_ranks(2, check_only_in_backward, reshard_after_forward)


def check_many_steps_without_backward() -> None:
    """Evaluation in a loop, with gradients enabled by mistake, holds on to nothing."""
    model = shard_blocks(Model())
    x, y = next(batches(1))
    for _ in range(5):
        model(x)
    loss_of(model, mine(x), mine(y)).backward()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            assert all(isinstance(p, DTensor) for p in module.parameters())


def test_forwards_without_backward():
    run_ranks(2, check_many_steps_without_backward)


def check_mixed_checkpointing() -> None:
    """Recomputation sees inputs cast as the first time."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    results: list[list[Any]] = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = Checkpointed() if wrapped else Model()
        Checkpointed.segment, Checkpointed.reentrant = False, False
        shard_blocks(model, mp_policy=policy)
        x, y = next(batches(1))
        ((model(mine(x)).float() - mine(y)) ** 2).mean().backward()
        results.append([p.grad.full_tensor() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_checkpointing_in_mixed_precision():
    run_ranks(2, check_mixed_checkpointing)


class ChangesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5).relu_())


def check_in_place() -> None:
    def make() -> Model:
        model = Model()
        model.blocks = nn.ModuleList([ChangesItsInput() for _ in range(3)])
        return model

    train_alike(shard_blocks, make=make, steps=4)


def test_modules_that_change_their_inputs_in_place():
    run_ranks(2, check_in_place)


class Branching(Model):
    """Several modules work on one tensor, which also goes around them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        parts = [block(x) for block in self.blocks]
        return self.head(sum(parts) * x)


def check_branches() -> None:
    model = train_alike(lambda m: shard_blocks(m, reshard_after_forward=True), make=Branching, steps=4)
    whole_at_once: list[int] = []

    def count(grad: Tensor) -> None:
        whole_at_once.append(sum(not isinstance(block.up.weight, DTensor) for block in model.blocks))

    for block in model.blocks:
        block.up.register_forward_hook(lambda m, args, out: out.register_hook(count) and None)
    apart(model)
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y)).backward()
    assert whole_at_once == [1, 1, 1], "each is freed when its own backward ends"


@pytest.mark.on_late(coalesces=True)  # in one unit, autograd adds the gradients of what they share in another order
def test_branches_are_freed_one_by_one():
    run_ranks(2, check_branches)


def check_hooks() -> None:
    """Hooks of sharded parameters see their reduced gradients: an optimizer step in backward, a gradient changed."""
    model = shard_blocks(Model())
    reference = Model()
    reference.load_state_dict(full_state(model))
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
    theirs = adamw(reference)
    seen: list[Any] = []

    def step(p: Any) -> None:
        seen.append(p)
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements == p.placements
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    model.blocks[0].up.weight.register_hook(lambda grad: grad * 3)
    reference.blocks[0].up.weight.register_hook(lambda grad: grad * 3)
    removed = model.blocks[1].up.weight.register_hook(lambda grad: grad * 0)
    removed.remove()
    for x, y in batches(4):
        loss_of(model, mine(x), mine(y)).backward()
        loss_of(reference, x, y).backward()
        assert len(seen) == len(optimizers) and set(map(id, seen)) == set(map(id, optimizers))
        assert all(p.grad is None for p in model.parameters())
        seen.clear()
        theirs.step()
        theirs.zero_grad()
    assert_same_parameters(model, reference)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_hooks_of_parameters(world):
    run_ranks(world, check_hooks)
