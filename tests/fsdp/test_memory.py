"""Memory that was given back: whoever kept a tensor in it gets an error or NaN, never a crash nor a wrong number."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from device_ranks import run_on_devices
from fsdp.compare import Model, batches, loss_of, mine, shard_blocks, train_alike
from ranks import fresh_values, run_ranks
from terrazzo.fsdp import fully_shard
from terrazzo.fsdp.run import memory
from terrazzo.fsdp.run.memory import ReturnableMemory

READS: list[Callable[[Tensor], Tensor]] = [
    Tensor.sum,
    Tensor.clone,
    Tensor.norm,
    Tensor.double,
    Tensor.t,
    lambda w: w * 2,
    lambda w: torch.cat([w, w]),
    lambda w: torch._foreach_mul([w], 2.0)[0],
    lambda w: torch.empty_like(w).copy_(w),
    lambda w: w @ torch.ones(w.shape[1], 2),
    lambda w: torch.ones(2, w.shape[0]) @ w,
    lambda w: F.linear(torch.ones(2, w.shape[1]), w),
    lambda w: F.layer_norm(torch.ones(2, *w.shape), w.shape, w),
    lambda w: F.embedding(torch.tensor([0, 1]), w),
    lambda w: F.conv2d(torch.ones(1, 1, 8, 8), w[None, None]),
    lambda w: w[0],
    lambda w: w[torch.tensor([0])],
    lambda w: w.softmax(1),
    lambda w: torch.tensor(w.tolist()) if w.numel() < 1000 else w.sum(),
    lambda w: torch.from_numpy(w.numpy()),
]
WRITES: list[Callable[[Tensor], object]] = [Tensor.zero_, Tensor.add_, lambda w: w.copy_(torch.ones(()))]


def outcomes(of: Tensor) -> set[str]:
    found = set()
    with torch.no_grad():
        for read in READS:
            try:
                result = read(of.detach())
            except RuntimeError:
                found.add("raised")
            else:
                found.add("nan" if result.isnan().any() else f"read {result}")
        for write in WRITES:
            with pytest.raises((RuntimeError, TypeError)):
                write(of.detach())
        if "nan" in found:  # nobody wrote there
            assert all(read(of.detach()).isnan().any() for read in READS[:2])
    return found


@pytest.mark.skipif(not memory._HAS_TRAPS or memory._HAS_MESSAGES, reason="this build of PyTorch has no traps")
def test_reading_returned_memory_gives_nan_or_raises_and_writing_raises():
    for numel in (64, 3 << 20):  # also more than the trap's piece
        whole = torch.ones(numel)
        kept = whole.view(-1, 8)
        held = ReturnableMemory(whole, "gone")
        held.give_back()
        held.give_back()
        assert outcomes(kept) == {"raised", "nan"}
        held.take_back()
        held.take_back()
        kept.fill_(2)
        assert kept.sum() == 2 * numel and held.owns(kept) and not held.owns(kept.clone())


@pytest.mark.skipif(not memory._HAS_TRAPS or memory._HAS_MESSAGES, reason="this build of PyTorch has no traps")
def test_memory_passes_to_the_next_of_its_size():
    memory.free_memory_aside()
    first, second, other = (torch.ones(numel) for numel in (64, 64, 128))
    held = [ReturnableMemory(each, "gone") for each in (first, second, other)]
    addresses = [each.data_ptr() for each in (first, second)]
    for each in held:
        each.give_back()
    assert len(memory._aside) == 2, "the oldest is freed"
    held[0].take_back()
    assert first.data_ptr() == addresses[1]
    first.fill_(2)
    assert outcomes(second.view(-1, 8)) == {"raised", "nan"}
    held[1].take_back()  # there is none of its size: what is aside is freed first
    assert not memory._aside and second.data_ptr() != first.data_ptr()
    second.fill_(3)
    assert first.eq(2).all() and second.eq(3).all() and second.untyped_storage().nbytes() == 256
    held[0].give_back()
    held[0].take_back()
    assert first.data_ptr() == addresses[1] and first.eq(2).all()
    held[0].give_back()
    memory.free_memory_aside()
    held[0].take_back()
    assert first.untyped_storage().nbytes() == 256
    held[2].take_back()
    other.fill_(1)


@pytest.mark.skipif(not memory._HAS_TRAPS or memory._HAS_MESSAGES, reason="this build of PyTorch has no traps")
def test_threads_and_the_collector_may_come_between():
    before = gc.get_threshold(), sys.getswitchinterval()

    def pass_around(numel: int) -> int:
        own = [torch.zeros(numel) for _ in range(3)]
        held = [ReturnableMemory(each, "gone") for each in own]
        for step in range(300):
            cycle: list[object] = [ReturnableMemory(torch.zeros(8), "gone")]
            cycle.append(cycle)
            for each in held:
                each.give_back()
            for each, tensor in zip(held, own, strict=True):
                each.take_back()
                tensor.fill_(step)
            assert all(tensor.eq(step).all() for tensor in own)
        return len({tensor.data_ptr() for tensor in own})

    gc.set_threshold(5)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(pass_around, [1 << 12, 1 << 12, 1 << 13, 1 << 12])) == [3] * 4
    finally:
        gc.set_threshold(*before[0])
        sys.setswitchinterval(before[1])


def check_aside() -> None:
    """At most two groups' memory is held for the next step, and none where a model is resharded or gone."""
    memory.free_memory_aside()
    torch.manual_seed(0)
    model = Model()
    shard_blocks(model)
    for _ in range(2):
        (x, y), *_ = batches(1)
        loss_of(model, mine(x), mine(y)).backward()
        assert len(memory._aside) == 2
    model.reshard()  # type: ignore[operator]
    assert not memory._aside
    with torch.no_grad():
        model(mine(x))
    assert memory._aside
    del model
    gc.collect()
    assert not memory._aside


@pytest.mark.skipif(not memory._HAS_TRAPS or memory._HAS_MESSAGES, reason="this build of PyTorch has no traps")
def test_what_is_held_for_the_next_step():
    run_ranks(2, check_aside)


def check_returned_memory_of_an_accelerator(device: torch.device) -> None:
    whole = torch.ones(64, device=device)
    held = ReturnableMemory(whole, "it is gone")
    held.give_back()
    with pytest.raises(RuntimeError, match="it is gone|the memory of this tensor was freed"):  # the latter by `late`
        whole.sum()
    held.take_back()
    assert whole.fill_(1).sum().item() == 64


@pytest.mark.gpu
@pytest.mark.skipif(not memory._HAS_MESSAGES, reason="this version of PyTorch has no such errors on accelerators")
def test_returned_memory_of_an_accelerator_says_so():
    run_on_devices(check_returned_memory_of_an_accelerator)


def check_captured() -> set[str]:
    """A parameter kept from forward, and a view of it, used when the module has finished; then training goes on."""
    torch.manual_seed(0)
    model = Model(2, 64, 128)
    reference = copy.deepcopy(model)
    shard_blocks(model, reshard_after_forward=True)
    kept: list[Tensor] = []
    model.blocks[0].up.register_forward_hook(lambda m, args, out: kept.extend([m.weight, m.weight.detach()[:8]]))
    x, y = next(batches(1))
    loss = loss_of(model, mine(x), mine(y))
    found = outcomes(kept[0]) | outcomes(kept[1])
    loss.backward()
    found |= outcomes(kept[0])
    loss_of(reference, x, y).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-5)
    return found


def test_parameters_kept_after_their_module_finished():
    for value in fresh_values(2, check_captured):
        assert value == ({"raised"} if memory._HAS_MESSAGES else {"raised", "nan"})


class Table(nn.Module):
    """Hands out its parameter, and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 7) / 3)
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, n: int) -> dict[str, Tensor]:
        return {"whole": self.weight, "part": self.weight[:n], "turned": self.weight.t(), "frozen": self.frozen}


class WithTable(Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, x: Tensor) -> Tensor:
        table = self.table(3)
        x = self.embed(x)
        x = self.blocks[0](x) @ table["turned"] @ table["whole"] + table["frozen"]
        return self.head(x + table["part"].mean(0))


def check_handed_out() -> None:
    def shard(model: WithTable) -> None:
        fully_shard(model.table, reshard_after_forward=True)
        shard_blocks(model, reshard_after_forward=True)

    model = train_alike(shard, make=WithTable)
    with torch.no_grad():
        found = model.table(3)
        again = model.table(3)
        assert all(torch.equal(found[key], again[key]) and found[key].isfinite().all() for key in found)


def test_parameters_that_a_module_returns():
    run_ranks(2, check_handed_out)
