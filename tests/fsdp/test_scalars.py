"""Parameters without dims: whole on every rank, trained and saved as one of a single process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import device_type, run_ranks
from terrazzo.checkpoint import Checkpoint, FileSystemReader, FileSystemWriter, load, save
from terrazzo.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from terrazzo.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, report
from terrazzo.fsdp.group import group_of
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.on_late

ROWS = 2


class Scaled(nn.Module):
    """A layer whose output has two scalars, of which one is shared with the next layer."""

    def __init__(self, width: int, out: int, shared: nn.Parameter) -> None:
        super().__init__()
        self.gain, self.layer, self.shared = nn.Parameter(torch.tensor(0.7)), nn.Linear(width, out), shared

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.gain + self.shared


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.tensor(-0.2))
        self.first, self.second = Scaled(5, 7, shared), Scaled(7, 3, shared)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.unused = nn.Parameter(torch.tensor(3.0))
        self.sometimes = nn.Parameter(torch.tensor(0.5))  # only rank 1 uses it

    def forward(self, x: Tensor, rank: int | None = None) -> Tensor:
        out = self.second(self.first(x)) * self.temperature.exp() * self.frozen
        if rank == 1:
            return out + self.sometimes
        if rank is None:  # all ranks' rows
            out = out.clone()
            out[ROWS : 2 * ROWS] += self.sometimes
        return out


def models(seed: int = 0) -> tuple[Any, Any]:
    """The model to shard, whose scalars differ between ranks until then, and one for a single process."""
    torch.manual_seed(seed)
    model = Model()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 0:
                parameter += dist.get_rank()
    return model, reference


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.05, **options)


def rows_of(seed: int, of: slice = slice(None)) -> Tensor:
    data = torch.randn(ROWS * 4, 5, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return data.to(device_type())[of]


def train_beside(model: Any, reference: Any, steps: int = 3, rank: int | None = None, **options: Any) -> None:
    """Gradients, their norm and parameters are those of a single process."""
    rank = dist.get_rank() if rank is None else rank
    both = [(model, optimizer_of(model, **options)), (reference, optimizer_of(reference))]
    part = slice(ROWS * rank, ROWS * rank + ROWS)
    for step in range(steps):
        model(rows_of(step, part), rank).square().mean().backward()
        reference(rows_of(step)).square().mean().backward()
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each, _ in both]
        torch.testing.assert_close(whole(norms[0]), norms[1], rtol=1e-4, atol=1e-5)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) is (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-5, msg=name)
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(model, reference)


def whole(x: Any) -> Any:
    return x.full_tensor().to(device_type()) if isinstance(x, DTensor) else x


def assert_alike(model: Any, reference: Any) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        if p.ndim == 0:
            assert all(placement == Replicate() for placement in p.placements)
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, p.to_local().item())
            assert len(set(everywhere)) == 1, name  # the same bits


def sharded(model: Any, how: str) -> Any:
    kind = device_type()
    options: dict[str, dict[str, Any]] = {
        "hsdp": {"mesh": init_device_mesh(kind, (2, 2)) if how == "hsdp" else None},
        "kept": {"reshard_after_forward": 2},
        "never freed": {"reshard_after_forward": False},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "other dim": {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
        "float64": {"mp_policy": MixedPrecisionPolicy(torch.float64, torch.float64, output_dtype=torch.float32)},
    }
    if how == "coalesced":
        model.second.shared = nn.Parameter(model.second.shared.detach().clone())
        fully_shard(model.first)
        fully_shard(model.second)
    elif how in ("hsdp", "kept", "apart"):
        fully_shard([model.first, model.second], **options.get(how, {}))  # they share a parameter
    return fully_shard(model, **options.get(how, {}))


def check_training() -> None:
    for how in ("root", "hsdp", "kept", "never freed", "offload", "other dim", "float64", "apart"):
        model, reference = models()
        train_beside(sharded(model, how), reference, foreach=how == "root" or None, fused=how == "apart" or None)
    model, reference = models()
    reference.second.shared = nn.Parameter(reference.second.shared.detach().clone())
    sharded(model, "coalesced")
    train_beside(model, reference, 1)
    if device_type() == "cpu":  # elsewhere groups may go alone
        assert group_of(model.first).unit is group_of(model.second).unit


def check_accumulation() -> None:
    """Micro-batches without communication, and a switch for replicas where there are none."""
    for how in ("root", "hsdp"):
        model, reference = models()
        sharded(model, how)
        rank = dist.get_rank()
        model.set_requires_all_reduce(False)
        for step in range(3):
            if how == "hsdp" and step == 2:
                model.set_requires_all_reduce(True)
            model.set_requires_gradient_sync(step > 0)
            model(rows_of(step, slice(ROWS * rank, ROWS * rank + ROWS)), rank).square().mean().backward()
            reference(rows_of(step)).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-5, msg=name)


def check_meta_and_others() -> None:
    model, reference = models()
    with torch.device("meta"):
        meta: Any = Model()
    sharded(meta, "apart")
    optimizer = optimizer_of(meta)
    meta.to_empty(device=device_type())
    set_model_state_dict(meta, reference.state_dict(), options=StateDictOptions(full_state_dict=True))
    train_beside(meta, reference)
    assert any(p is meta.temperature for p in optimizer.param_groups[0]["params"])
    full = get_model_state_dict(meta, options=StateDictOptions(full_state_dict=True))
    assert torch.equal(full["temperature"], whole(meta.temperature)) and full["temperature"].shape == ()

    # On some ranks on the meta device: there is the first rank's value only for those that are there.
    for there in (0, 1):
        with torch.device(device_type() if dist.get_rank() == there else "meta"):
            some: Any = Scaled(4, 4, nn.Parameter(torch.tensor(5.0 + dist.get_rank())))
        fully_shard(some)
        here = dist.get_rank() == there
        assert some.gain.to_local().is_meta is not here
        assert not here or some.shared.to_local().item() == 5.0 + there

    # Ignored ones stay what they are; a module of scalars alone; a write to a scalar counts.
    fully_shard(model, ignored_params={model.temperature})
    assert not isinstance(model.temperature, DTensor) and isinstance(model.first.gain, DTensor)
    only: Any = nn.Module()
    only.scale = nn.Parameter(torch.tensor(2.0))
    only.forward = lambda x: x * only.scale
    holder = nn.Sequential(only)
    fully_shard(holder)
    with torch.no_grad():
        only.scale.fill_(3)
    out = holder(torch.ones(2) * (dist.get_rank() + 1))
    assert out.tolist() == [3.0 * (dist.get_rank() + 1)] * 2
    out.sum().backward()
    assert only.scale.grad.full_tensor().item() == 5
    assert str(report(holder))


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(5, 8), nn.Linear(8, 5), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.gain


def check_tensor_parallel() -> None:
    """Beside tensor-parallel parameters, a plain scalar, and one that is a DTensor itself."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    for distributed in (False, True):
        torch.manual_seed(0)
        model: Any = Parallel()
        reference = copy.deepcopy(model)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if distributed:
            model.gain = nn.Parameter(distribute_tensor(model.gain.detach(), mesh["tp"], [Replicate()]))
            model.down.register_forward_hook(lambda _, args, out: DTensor.from_local(out, mesh["tp"], [Replicate()]))
            model.register_forward_hook(lambda _, args, out: out.to_local())
        fully_shard(model, mesh=mesh["dp"])
        assert model.gain.placements == (Replicate(),) * (2 if distributed else 1)
        rank = mesh.get_local_rank("dp")
        both = [(each, torch.optim.SGD(each.parameters(), 0.1)) for each in (model, reference)]
        for step in range(2):
            model(rows_of(step, slice(4 * rank, 4 * rank + 4))).square().mean().backward()
            reference(rows_of(step)).square().mean().backward()
            torch.testing.assert_close(whole(model.gain.grad), reference.gain.grad, rtol=1e-4, atol=1e-6)
            for _, optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        assert_alike(model, reference)


# ------------------------------------------------------------------ checkpoints


def trained(how: str, steps: int, seed: int = 0) -> tuple[Any, Any]:
    model, _ = models(seed)
    sharded(model, how)
    optimizer = optimizer_of(model)
    step(model, optimizer, steps)
    return model, optimizer


def step(model: Any, optimizer: Any, steps: int) -> None:
    """On the same rows on any number of ranks."""
    n, rank = dist.get_world_size(), dist.get_rank()
    size = ROWS * 4 // n
    for each in range(steps):
        model(rows_of(each, slice(size * rank, size * rank + size)), 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: Any) -> dict[str, Tensor]:
    return {name: whole(p.detach()).cpu() for name, p in model.named_parameters()}


def check_save(how: str, folder: str) -> dict[str, Tensor]:
    model, optimizer = trained(how, 3)
    states = get_state_dict(model, optimizer)
    state = {"model": states[0], "optimizer": states[1]}
    save(state, checkpoint_id=f"{folder}/native")
    save(state, storage_writer=FileSystemWriter(f"{folder}/dcp"))
    step(model, optimizer, 1)
    return values(model)


def check_load(how: str, folder: str) -> dict[str, Tensor]:
    found = []
    for kind in ("native", "dcp"):
        model, optimizer = trained(how, 1, seed=5)
        states = get_state_dict(model, optimizer)
        state = {"model": states[0], "optimizer": states[1]}
        if kind == "native":
            load(state, checkpoint_id=f"{folder}/native")
        else:
            load(state, storage_reader=FileSystemReader(f"{folder}/dcp"))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step(model, optimizer, 1)
        found.append(values(model))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)
    return found[0]


def test_scalars_in_checkpoints(tmp_path):
    """Stored once, and loaded on other ranks and in other ways."""
    (expected, *_) = run_ranks(4, check_save, "hsdp", str(tmp_path))
    for folder in ("native", "dcp"):
        with Checkpoint(str(tmp_path / folder)) as found:
            assert found["model.temperature"].shape == ()
    for world, how in ((4, "root"), (2, "root"), (1, "never freed")):
        found = run_ranks(world, check_load, how, str(tmp_path))[0]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_scalars_train_as_in_one_process():
    run_ranks(4, check_training)


def test_scalars_of_micro_batches_of_the_meta_device_and_alone():
    run_ranks(4, check_accumulation)
    run_ranks(4, check_meta_and_others)
    run_ranks(4, check_tensor_parallel)
