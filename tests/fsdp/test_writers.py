"""Unsharded parameters are never older than the shards, whoever wrote those, with every setting of resharding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.compare import Model, assert_same_parameters, batches, loss_of, mine, shard_blocks
from ranks import device_type, run_ranks
from terrazzo.checkpoint import load, save
from terrazzo.errors import DivergedRanksError, FSDPError
from terrazzo.fsdp import FSDPModule, fully_shard
from terrazzo.tensor import DTensor, Replicate, Shard, init_device_mesh

pytestmark = pytest.mark.on_late


def values_for(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """New values of every parameter, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) / 4 for name, p in model.named_parameters()}


def like(value: Tensor, parameter: Any) -> Any:
    """The value, placed as the parameter."""
    if not isinstance(parameter, DTensor):
        return value.clone()
    whole = DTensor.from_local(value, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim)
    return whole.redistribute(placements=parameter.placements)


Params = dict[str, Any]  # those that an optimizer knows
Writer = Callable[[Any, Params, int], None]


class ThroughData(torch.optim.Optimizer):
    """Writes where no version counter sees it."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                local = p.to_local() if isinstance(p, DTensor) else p
                local.detach().data.mul_(0.5).add_(0.1)


def own_optimizer(model: Any, params: Params, seed: int) -> None:
    ThroughData(params.values(), {}).step()


def fused(model: Any, params: Params, seed: int) -> None:
    for p in params.values():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(params.values(), lr=0.1, fused=True).step()


@torch.no_grad()
def copy_in(model: Any, params: Params, seed: int) -> None:
    for name, value in values_for(model, seed).items():
        params[name].copy_(like(value, params[name]))


@torch.no_grad()
def into_data(model: Any, params: Params, seed: int) -> None:
    for name, value in values_for(model, seed).items():
        params[name].data.copy_(like(value, params[name]))


def other_data(model: Any, params: Params, seed: int) -> None:
    for name, value in values_for(model, seed).items():
        params[name].data = like(value, params[name])


def swap(model: Any, params: Params, seed: int) -> None:
    """With an average that is kept beside."""
    for name, value in values_for(model, seed).items():
        average = like(value, params[name])
        params[name].data, average.data = average.data, params[name].data


@torch.no_grad()
def operations(model: Any, params: Params, seed: int) -> None:
    for p in params.values():
        p.mul_(0.5)
    torch._foreach_add_(list(params.values()), 0.25)
    for p in params.values():
        local = p.to_local() if isinstance(p, DTensor) else p
        local.mul_(2)


def loaded(assign: bool) -> Writer:
    def writer(model: Any, params: Params, seed: int) -> None:
        values = values_for(model, seed)
        model.load_state_dict({name: like(values[name], p) for name, p in params.items()}, assign=assign)

    return writer


def into_state_dict(model: Any, params: Params, seed: int) -> None:
    """As checkpoints are loaded."""
    values = values_for(model, seed)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(like(values[name], value))


def emptied(model: Any, params: Params, seed: int) -> None:
    values = values_for(model, seed)
    model.to_empty(device=device_type())
    with torch.no_grad():
        for name, p in sharded(model).items():
            p.copy_(like(values[name], p))


def there_and_back(model: Any, params: Params, seed: int) -> None:
    model.double()
    with torch.no_grad():
        for p in sharded(model).values():
            p.mul_(0.5)
    model.float()


@torch.no_grad()
def part_of_a_group(model: Any, params: Params, seed: int) -> None:
    """Behind the group's back."""
    sharded(model)
    for block in model.blocks:
        block.up._apply(lambda t: t * 0.5)


WRITERS: dict[str, Writer] = {
    "an optimizer of one's own": own_optimizer,
    "a fused optimizer": fused,
    "copy_": copy_in,
    ".data.copy_": into_data,
    ".data =": other_data,
    "swapped .data": swap,
    "operations": operations,
    "load_state_dict": loaded(False),
    "load_state_dict(assign=True)": loaded(True),
    "into a state dict": into_state_dict,
    "to_empty": emptied,
    "double and float": there_and_back,
    "_apply of a part": part_of_a_group,
}


def sharded(model: Any) -> Params:
    """The parameters as they are between steps, by name."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(model.named_parameters())


def check_writers() -> None:
    for name in WRITERS:
        check_writer(name)


def check_writer(name: str) -> None:
    world = torch.distributed.get_world_size()
    ways: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}]
    if world == 4:
        ways = [{"reshard_after_forward": 2}, {"mesh": init_device_mesh(device_type(), (2, 2))}]
    for options in ways:
        for reshard_after_backward in (False, True):
            if reshard_after_backward and options:
                continue
            where = f"{name}, {options}"
            torch.manual_seed(0)
            model: Any = Model()
            reference = copy.deepcopy(model)
            shard_blocks(model, **options)
            model.set_reshard_after_backward(reshard_after_backward)
            (x, y), (v, w) = batches(2)
            params, theirs = sharded(model), dict(reference.named_parameters())
            for seed in (1, 2):  # a rebuilt buffer is not the first one again
                loss_of(model, mine(x), mine(y)).backward()
                WRITERS[name](model, params, seed)
                WRITERS[name](reference, theirs, seed)
                torch.testing.assert_close(model(v), reference(v), msg=where)
                with torch.no_grad():  # and parameters that a forward has left are not used again either
                    WRITERS[name](model, params, seed + 10)
                    WRITERS[name](reference, theirs, seed + 10)
                    torch.testing.assert_close(model(v), reference(v), msg=where)
                params, theirs = sharded(model), dict(reference.named_parameters())
            model.zero_grad()  # they are sharded now
            reference.zero_grad()
            ours, other = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, reference))
            # Some writers leave values whose gradients are in the millions: their rounding is not what is asked here.
            size = loss_of(reference, v, w).detach()
            (loss_of(model, mine(v), mine(w)) / size).backward()
            (loss_of(reference, v, w) / size).backward()
            ours.step()
            other.step()
            sharded(model)
            assert_same_parameters(model, reference)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)])
def test_nothing_is_stale(world):
    run_ranks(world, check_writers)


# ------------------------------------------------------------------ while parameters are unsharded


def evaluated(**options: Any) -> tuple[Any, nn.Module, Params, Tensor]:
    """A model whose root an evaluation has left unsharded, what it was made of, and its sharded parameters."""
    torch.manual_seed(0)
    model: Any = Model()
    reference = copy.deepcopy(model)
    shard_blocks(model, **options)
    params = dict(model.named_parameters())
    x, _ = next(batches(1))
    model(x)
    assert not isinstance(model.head.weight, DTensor)
    return model, reference, params, x


@torch.no_grad()
def check_other_placements() -> None:
    """`.data` set to DTensors that are placed otherwise, as `vector_to_parameters` does."""
    torch.manual_seed(0)
    model: Any = Model()
    reference = copy.deepcopy(model)
    shard_blocks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, _ = next(batches(1))
    for module in (model, reference):
        vector = nn.utils.parameters_to_vector(module.parameters())
        nn.utils.vector_to_parameters(vector * 2, module.parameters())
    torch.testing.assert_close(model(x), reference(x))
    model.reshard()
    assert_same_parameters(model, reference)
    assert {p.placements for p in model.parameters()} == {(Shard(0),)}
    assert all(p is q for p, q in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
    model.head.bias.data = DTensor.from_local(torch.zeros(4), model.head.bias.device_mesh, [Replicate()])
    with pytest.raises(FSDPError, match=r"'head.bias' was set to a DTensor of shape \(4,\)"):
        model(x)


def test_data_that_is_placed_otherwise():
    run_ranks(2, check_other_placements)


@torch.no_grad()
def check_unsharded() -> None:
    """What users write to `model.parameters()` counts, be they sharded or not at that moment."""
    for options in ({}, {"reshard_after_forward": False}):
        for reshard in (True, False):
            model, reference, params, x = evaluated(**options)
            for factor in (0.5, 3.0):
                for module in (model, reference):
                    for p in module.parameters():
                        p.mul_(factor)
                if reshard:
                    model.state_dict()
                torch.testing.assert_close(model(x), reference(x))
            for p in params.values():  # a later write to the shards is the one that counts
                p.zero_()
            assert model(x).eq(0).all()


def test_writes_to_unsharded_parameters():
    run_ranks(2, check_unsharded)


def check_set_data() -> None:
    """`.data` of unsharded parameters, which from then on have memory that no gather fills."""
    for options in ({}, {"reshard_after_forward": False}):
        model, reference, params, x = evaluated(**options)
        optimizers = [torch.optim.SGD(each, lr=0.1) for each in (params.values(), list(reference.parameters()))]
        for _ in range(2):
            with torch.no_grad():
                assert not isinstance(model.head.weight, DTensor)
                for module in (model, reference):
                    module.head.weight.data = module.head.weight.data * 2
                torch.testing.assert_close(model(x), reference(x))
            for module, optimizer in zip((model, reference), optimizers, strict=True):
                module(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                torch.testing.assert_close(model(x), reference(x))
        sharded = params["head.weight"].data
        for wrong, words in ((sharded, "a DTensor"), (torch.ones(2, 2), r"a tensor of shape \(2, 2\)")):
            model.head.weight.data = wrong
            with pytest.raises(FSDPError, match=f"'head.weight' was set to {words} while"):
                model(x)
            with torch.no_grad():
                torch.testing.assert_close(model(x), reference(x))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.cpu_only("on accelerators PyTorch itself refuses a DTensor as data")
def test_data_of_unsharded_parameters(world):
    run_ranks(world, check_set_data)


def check_dtype_where_empty() -> None:
    """The last ranks have no rows of a group, so that no address tells them that the dtype has changed."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    reference = copy.deepcopy(model)
    fully_shard(model[0])
    fully_shard(model)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.ones(2, 3, dtype=dtype)
        for module in (model, reference):
            module.to(dtype)
            module.zero_grad()
            module(x).float().square().sum().backward()
        assert all(p.dtype == p.grad.dtype == dtype for p in model.parameters())
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def test_a_dtype_that_changes_where_a_rank_has_no_rows():
    run_ranks(4, check_dtype_where_empty)


@torch.no_grad()
def check_one_rank() -> None:
    """Some row is on one rank, which alone writes it."""
    on_cpu = device_type() == "cpu"
    for unshard in (False, True):
        model, reference, params, x = evaluated()
        if torch.distributed.get_rank() == 1:
            params["head.bias"].to_local().fill_(7)
        reference.head.bias[2] = 7  # of three elements two are on the first rank
        if not on_cpu:  # there no rank waits for what others may have written
            model.reshard()
        if unshard:
            model.unshard()
            assert torch.equal(model.head.bias, reference.head.bias)
        torch.testing.assert_close(model(x), reference(x))
        if torch.distributed.get_rank() == 1:  # which only reads, and cannot know that
            params["head.bias"].data.to_local().clone()
        torch.testing.assert_close(model(x), reference(x))
        if on_cpu:
            continue
        if torch.distributed.get_rank() == 1:
            params["head.bias"].to_local().fill_(8)
        with pytest.raises(DivergedRanksError, match=r"rank 1 wrote to .* of 'Model.*, and other ranks did not"):
            model.unshard() if unshard else model(x)
            model.state_dict()  # waits until it is known


def test_a_write_on_one_rank_alone():
    run_ranks(2, check_one_rank)


@torch.no_grad()
def check_loaded(path: str) -> None:
    """Bytes that are read into memory count."""
    model, reference, params, x = evaluated()
    state = {name: p.detach() for name, p in params.items()}
    save({name: value * 2 for name, value in state.items()}, checkpoint_id=path)
    for p in reference.parameters():
        p.mul_(2)
    load(state, checkpoint_id=path)
    torch.testing.assert_close(model(x), reference(x))


def test_a_checkpoint_that_is_loaded_into_what_was_kept(tmp_path):
    run_ranks(2, check_loaded, str(tmp_path / "saved"))


def through_numpy(params: Params) -> None:
    for p in params.values():
        p.to_local().numpy()[...] = 0


def through_a_collective(params: Params) -> None:
    for p in params.values():
        zeros = torch.zeros(p.to_local().shape)
        lengths = [len(zeros) * (rank == torch.distributed.get_rank()) for rank in range(2)]
        torch.distributed.all_to_all_single(p.to_local(), zeros, lengths, lengths)


def through_old_data(params: Params, taken: dict[str, Any]) -> None:
    for data in taken.values():
        data.to_local().zero_()


@torch.no_grad()
def check_uncounted() -> None:
    """What PyTorch does not count is seen once parameters are gathered again, and not while they stay unsharded."""
    for writer in (through_numpy, through_a_collective, through_old_data):
        model, _, params, x = evaluated()
        taken = {name: p.data for name, p in params.items()}
        model(x)
        before = model.head.bias.clone()
        writer(params, taken) if writer is through_old_data else writer(params)
        model(x)
        assert all(p.to_local().eq(0).all() for p in params.values())
        assert torch.equal(model.head.bias, before) and before.ne(0).any(), "the border: docs/fully-shard.md names it"
        model.reshard()
        assert model(x).eq(0).all()


@pytest.mark.cpu_only("writes through NumPy")
def test_writes_that_pytorch_does_not_count():
    run_ranks(2, check_uncounted)
