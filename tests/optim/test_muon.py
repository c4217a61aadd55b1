"""Muon on shards of every kind: bit for bit what PyTorch's does on one device, in two messages for a group."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

import terrazzo.checkpoint as checkpoint
from ranks import device_type, run_ranks
from terrazzo.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from terrazzo.errors import OptimError
from terrazzo.fsdp import fully_shard
from terrazzo.optim import Muon
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode

pytestmark = pytest.mark.on_late(both=True)

SHAPES = [(8, 8), (7, 3), (3, 10), (2, 5), (12, 4)]
OPTIONS = [{}, {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "ns_steps": 3}]


class Matrices(nn.Module):
    """Its gradients are what it is called with, whoever computes them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.all = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)

    def forward(self, grads: list[Tensor]) -> Tensor:
        terms = []
        for p, grad in zip(self.all, grads, strict=True):
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            term = (p * grad).sum()
            terms.append(term.full_tensor() if isinstance(term, DTensor) else term)
        return torch.stack(terms).sum()


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(model: Matrices, optimizer: torch.optim.Optimizer, steps: range = range(3)) -> None:
    for step in steps:
        model(gradients(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def expected(options: dict, steps: int = 3) -> list[Tensor]:
    model = Matrices()
    train(model, torch.optim.Muon(model.parameters(), **options), range(steps))
    return [p.detach() for p in model.parameters()]


def equals(model: Matrices, wanted: list[Tensor]) -> None:
    for p, reference in zip(model.parameters(), wanted, strict=True):
        found = p.full_tensor() if isinstance(p, DTensor) else p
        assert torch.equal(found.detach(), reference), (p, reference)


def check_fully_shard() -> None:
    """In one dim and with replicas, along dim 0 and 1, alone and with tensor parallelism below."""
    flat = init_device_mesh(device_type(), (4,))
    square = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    for mesh, tp, placement in [
        (flat, None, None),
        (flat, None, lambda p: Shard(1)),
        (square, None, None),
        (square["dp"], Shard(0), None),
        (square["dp"], Shard(1), None),
        (square["dp"], Replicate(), lambda p: Shard(1)),
    ]:
        for options in OPTIONS:
            model = Matrices()
            if tp is not None:
                for i, p in enumerate(model.all):
                    model.all[i] = nn.Parameter(distribute_tensor(p.detach(), square["tp"], [tp]))
            fully_shard(model, mesh=mesh, shard_placement_fn=placement)
            train(model, Muon(model.parameters(), **options))
            equals(model, expected(options))


def test_fully_shard():
    run_ranks(4, check_fully_shard)


def check_other_tensors() -> None:
    """Tensor parallelism alone, replicas, and plain parameters beside them in one group."""
    mesh = init_device_mesh(device_type(), (2,))
    model = Matrices()
    placements = [Shard(0), Shard(1), Replicate(), None, Shard(0)]
    for i, (p, placement) in enumerate(zip(list(model.all), placements, strict=True)):
        if placement is not None:
            model.all[i] = nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]))
    optimizer = Muon(model.parameters(), lr=torch.tensor(0.01))
    train(model, optimizer)
    equals(model, expected({"lr": 0.01}))
    assert optimizer.step(lambda: 3) == 3  # nobody has gradients
    equals(model, expected({"lr": 0.01}))
    # Some have none, and one is still a sum of terms.
    model(gradients(0)).backward()
    keep = [model.all[2].detach().clone(), model.all[3].detach().clone()]
    model.all[2].grad = model.all[3].grad = None
    p = model.all[0]
    whole = p.grad.full_tensor()
    p.grad = DTensor.from_local(whole / 2, mesh, [Partial()]).redistribute(mesh, [Shard(0)])
    optimizer.step()
    assert torch.equal(model.all[2].full_tensor(), keep[0].full_tensor()) and torch.equal(model.all[3], keep[1])
    copy = pickle.loads(pickle.dumps(Muon([nn.Parameter(torch.eye(2))])))
    copy.param_groups[0]["params"][0].grad = torch.eye(2)
    copy.step()


def test_other_tensors():
    run_ranks(2, check_other_tensors)


def check_messages() -> None:
    """Two for a group, however many matrices it has."""
    model = fully_shard(Matrices(), mesh=init_device_mesh(device_type(), (4,)))
    optimizer = Muon(model.parameters())
    model(gradients(0)).backward()
    with CommDebugMode() as mode:
        optimizer.step()
    assert sum(mode.get_comm_counts().values()) == 2, mode.get_comm_counts()


def test_messages():
    run_ranks(4, check_messages)


def check_state(folder: str) -> None:
    """Saved by shards in one dim, loaded into shards in two: training goes on as on one device."""
    model = fully_shard(Matrices(), mesh=init_device_mesh(device_type(), (4,)))
    optimizer = Muon(model.parameters(), lr=0.05)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    assert all(isinstance(s["momentum_buffer"], DTensor) for s in state["optimizer"]["state"].values())
    checkpoint.save(state, checkpoint_id=folder)

    square = init_device_mesh(device_type(), (2, 2))
    other = fully_shard(Matrices(), mesh=square, shard_placement_fn=lambda p: Shard(1))
    resumed = Muon(other.parameters(), lr=0.01)
    state = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, resumed)}
    checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    set_optimizer_state_dict(other, resumed, state["optimizer"])
    train(other, resumed, range(3, 6))
    equals(other, expected({"lr": 0.05}, 6))


def test_state(tmp_path):
    run_ranks(4, check_state, str(tmp_path / "checkpoint"))


BATCHES = [(5, 6, 4), (2, 2, 3, 7), (8, 4, 4), (3, 5)]


def check_batches() -> None:
    """Of a batch of matrices each is what PyTorch's Muon makes of it alone, whichever dims are sharded."""
    flat = init_device_mesh(device_type(), (4,))
    square = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    ways = [(flat, [Shard(0)]), (flat, [Shard(1)]), (flat, [Shard(2)]), (flat, [Replicate()])]
    ways += [(square, [Replicate(), Shard(0)]), (square, [Shard(0), Shard(1)]), (square, [Shard(0), Shard(0)])]
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator) for shape in BATCHES]
    grads = [[torch.randn(shape, generator=generator) for shape in BATCHES] for _ in range(2)]
    alone = [[nn.Parameter(each.clone()) for each in whole.flatten(0, -3)] if whole.ndim > 2 else
             [nn.Parameter(whole.clone())] for whole in wholes]  # fmt: skip
    plain = [nn.Parameter(whole.clone()) for whole in wholes]
    options = {"lr": 0.1, "weight_decay": 0.2}
    single, batched = torch.optim.Muon([p for each in alone for p in each], **options), Muon(plain, **options)
    for step in grads:
        for grad, each, p in zip(step, alone, plain, strict=True):
            p.grad = grad
            for one, part in zip(each, grad.reshape(-1, *grad.shape[-2:]), strict=True):
                one.grad = part
        single.step()
        batched.step()
    wanted = [torch.stack([p.detach() for p in each]).view(p.shape) for each, p in zip(alone, plain, strict=True)]
    for p, reference in zip(plain, wanted, strict=True):
        torch.testing.assert_close(p.detach(), reference, rtol=0, atol=3e-3)  # updates of 0.1 in bfloat16
    for mesh, placements in ways:
        own = [s if s.is_replicate() or s.dim < 2 else Shard(1) for s in placements]
        params = [
            nn.Parameter(distribute_tensor(whole, mesh, placements if whole.ndim > 2 else own)) for whole in wholes
        ]
        optimizer = Muon(params, **options)
        for step in grads:
            for p, grad in zip(params, step, strict=True):
                p.grad = distribute_tensor(grad, mesh, p.placements)
            optimizer.step()
        for p, reference in zip(params, wanted, strict=True):
            assert optimizer.state[p]["momentum_buffer"].placements == p.placements
            torch.testing.assert_close(p.detach().full_tensor().to(reference.device), reference, rtol=0, atol=3e-3)


def check_experts_stay() -> None:
    """Under fully_shard ranks have whole experts, which need no message."""
    model = Matrices()
    model.all = nn.ParameterList([nn.Parameter(torch.randn(5, 4, 6))])
    fully_shard(model, mesh=init_device_mesh(device_type(), (4,)))
    optimizer = Muon(model.parameters())
    model([torch.ones(5, 4, 6)]).backward()
    with CommDebugMode() as mode:
        optimizer.step()
    assert not mode.get_comm_counts()


def test_batches_of_matrices():
    run_ranks(4, check_batches)
    run_ranks(4, check_experts_stay)


def check_training() -> None:
    """Beside AdamW, under a model's own gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    reference = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    reference.load_state_dict(model.state_dict())
    fully_shard(model, mesh=init_device_mesh(device_type(), (2,)))
    rank = torch.distributed.get_rank()
    for step in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        for module, kind, inputs in ((model, Muon, x.chunk(2)[rank]), (reference, torch.optim.Muon, x)):
            if not step:
                module.muon = kind([p for p in module.parameters() if p.ndim == 2], lr=0.01)
                module.adamw = torch.optim.AdamW([p for p in module.parameters() if p.ndim != 2], lr=0.01)
            (module(inputs) - inputs).square().mean().backward()
            for optimizer in (module.muon, module.adamw):
                optimizer.step()
                optimizer.zero_grad()
    for p, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        # Orthogonalising in bfloat16 makes the last bit of a gradient a relative difference of 2 ** -8 in the update.
        torch.testing.assert_close(p.full_tensor(), wanted, rtol=1e-3, atol=1e-3)


def test_training():
    run_ranks(2, check_training)


def test_refused():
    with pytest.raises(ValueError, match=r"matrices, or batches of them.*\(3,\)") as raised:
        Muon([nn.Parameter(torch.zeros(3))])
    assert isinstance(raised.value, OptimError)
    with pytest.raises(ValueError, match="momentum"):
        Muon([nn.Parameter(torch.eye(3))], momentum=-1)
    complex_ = nn.Parameter(torch.eye(2, dtype=torch.complex64))
    complex_.grad = complex_.detach().clone()
    with pytest.raises(OptimError, match="complex64"):
        Muon([complex_]).step()
