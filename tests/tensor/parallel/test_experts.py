"""Experts on different ranks: values and gradients are those of one device, whichever tokens go where."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from device_ranks import run_on_devices
from ranks import device_type, run_ranks
from terrazzo.errors import DTensorArgumentError, ParallelPlanError
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import DTensor, Shard, init_device_mesh
from terrazzo.tensor.parallel import (
    ExpertParallel,
    GroupedExperts,
    MixtureOfExperts,
    grouped_mm,
    parallelize_module,
)

pytestmark = pytest.mark.on_late

DIM, HIDDEN = 6, 10


def same(mine: Any, expected: Tensor) -> None:
    whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
    torch.testing.assert_close(whole.detach(), expected.detach(), rtol=1e-4, atol=1e-5)


def parallel(module: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(module, mesh, ExpertParallel())


def swiglu(experts: Any, e: int, x: Tensor) -> Tensor:
    return (F.silu(x @ experts.w1[e].T) * (x @ experts.w3[e].T)) @ experts.w2[e].T


class ByIndex(nn.Module):
    """Called as Transformers calls experts, and computes as its eager implementation does: only experts with tokens."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, HIDDEN, DIM) / 3)
        self.down = nn.Parameter(torch.randn(num_experts, DIM, HIDDEN) / 3)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(tokens)
        hit = F.one_hot(indices, num_classes=self.num_experts).sum((0, 1)).nonzero()[:, 0]
        for e in hit:
            token, place = torch.where(indices == e)
            out = F.relu(tokens[token] @ self.up[e].T) @ self.down[e].T * weights[token, place, None]
            y = y.index_add(0, token, out)
        return y


def check_both_forms(choices: list[list[list[int]]], num_experts: int) -> None:
    """`choices[rank]` are the experts of each of its tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device_type(), (ranks,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    indices = [torch.tensor(c, dtype=torch.long).reshape(-1, 2) for c in choices]
    tokens = [torch.randn(len(c), DIM) for c in indices]
    weights = [torch.rand(len(c), 2) for c in indices]
    weigh = [torch.randn(len(c), DIM) for c in indices]  # makes the gradients of rows different
    for by_index in (False, True):
        reference: Any = ByIndex(num_experts) if by_index else GroupedExperts(DIM, HIDDEN, num_experts)
        mine = parallel(copy.deepcopy(reference), mesh)
        assert type(mine).__name__ == type(reference).__name__ and isinstance(mine, type(reference))
        for p in mine.parameters():
            assert p.placements == (Shard(0),) and p.shape[0] == num_experts
        x = [t.clone().requires_grad_() for t in tokens]
        if by_index:
            wanted = [reference(*each) for each in zip(x, indices, weights, strict=True)]
            own = tokens[rank].clone().requires_grad_()
            got = mine(own, indices[rank], weights[rank])
            assert mine.num_experts == num_experts
        else:
            orders = [i[:, 0].argsort(stable=True) for i in indices]
            x = [t[order].detach().requires_grad_() for t, order in zip(tokens, orders, strict=True)]
            wanted = [
                torch.stack([swiglu(reference, int(e), row) for e, row in zip(i[order, 0], t, strict=True)])
                if len(i)
                else t * 1
                for i, order, t in zip(indices, orders, x, strict=True)
            ]
            own = x[rank].detach().clone().requires_grad_()
            got = mine(own, F.one_hot(indices[rank][:, 0], num_experts).sum(0))
        total: Any = sum((w * y).sum() for w, y in zip(weigh, wanted, strict=True))
        if total.requires_grad:  # there are tokens
            total.backward()
        (weigh[rank] * got).sum().backward()
        same(got, wanted[rank])
        same(own.grad, torch.zeros_like(own) if x[rank].grad is None else x[rank].grad)
        for (name, p), q in zip(mine.named_parameters(), reference.parameters(), strict=True):
            assert p.grad is not None and p.grad.placements == (Shard(0),), name
            same(p.grad, torch.zeros_like(q) if q.grad is None else q.grad)


def check_tokens() -> None:
    ranks = dist.get_world_size()
    mixed = [[[0, 1], [4, 2], [3, 0]], [[1, 0]], [[2, 4], [4, 3]], [[0, 4]] * 5]
    check_both_forms(mixed[:ranks], 5)  # uneven: more experts on some ranks
    check_both_forms([[], *mixed[1:ranks]], 6)  # a rank without tokens
    check_both_forms([[[0, 1], [1, 0]]] * ranks, 8)  # all go to the first rank: experts and ranks without rows
    check_both_forms([[]] * ranks, 4)  # no tokens anywhere


@pytest.mark.parametrize("ranks", [2, 4])
def test_values_and_gradients_are_those_of_one_device(ranks):
    run_ranks(ranks, check_tokens)


def check_tensor_parallel() -> None:
    """Experts on two pairs of ranks; each of a pair has half of every expert, and the same tokens."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("ep", "tp"))
    place = dist.get_rank() // 2
    torch.manual_seed(0)
    reference = GroupedExperts(DIM, HIDDEN, 3)
    style = ExpertParallel(tensor={"w1": Shard(1), "w3": Shard(1), "w2": Shard(2)})
    mine = parallelize_module(copy.deepcopy(reference), mesh["ep", "tp"], style)
    assert mine.w2.placements == (Shard(0), Shard(2))
    x = [torch.randn(6, DIM, requires_grad=True) for _ in range(2)]
    counts = [torch.tensor([1, 4, 1]), torch.tensor([0, 2, 4])]
    wanted = [reference(*each) for each in zip(x, counts, strict=True)]
    own = x[place].detach().clone().requires_grad_()
    got = mine(own, counts[place])
    torch.stack(wanted).square().sum().backward()
    got.square().sum().backward()
    same(got, wanted[place])
    same(own.grad, x[place].grad)
    for p, q in zip(mine.parameters(), reference.parameters(), strict=True):
        same(p.grad, q.grad)
    with pytest.raises(ParallelPlanError, match="'w2'. must be a Shard, not None"):
        parallelize_module(reference, mesh["ep", "tp"], ExpertParallel(tensor={"w1": Shard(1)}))
    assert not any(isinstance(p, DTensor) for p in reference.parameters())  # w1 is as it was
    with pytest.raises(ParallelPlanError, match="a mesh of two dimensions for ExpertParallel.tensor"):
        parallelize_module(reference, mesh["ep"], style)
    cube = init_device_mesh(device_type(), (2, 2, 1), mesh_dim_names=("ep", "tp", "more"))
    with pytest.raises(ParallelPlanError, match="a mesh of two dimensions for .* has 3: "):
        parallelize_module(GroupedExperts(2, 2, 4), cube, ExpertParallel({}))


def test_experts_are_tensor_parallel_inside():
    run_ranks(4, check_tensor_parallel)


def token_by_token(moe: Any, x: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """The mixture by its definition, for one token and one expert at a time."""
    tokens = x.reshape(-1, DIM)
    logits = tokens @ moe.router.weight.T
    scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
    chosen = [sorted(range(moe.num_experts), key=lambda e: -float(row.detach()[e]))[: moe.top_k] for row in scores]
    taken: dict[int, list[int]] = {}
    for e in range(moe.num_experts):
        mine = sorted((t for t in range(len(tokens)) if e in chosen[t]), key=lambda t: -float(scores.detach()[t, e]))
        taken[e] = mine if capacity is None else mine[:capacity]
    rows = []
    for t, row in enumerate(tokens):
        total = sum(scores[t, e] for e in chosen[t]) if moe.normalize else 1.0
        y = torch.zeros(DIM)
        for e in chosen[t]:
            if t in taken[e]:
                y = y + scores[t, e] / total * swiglu(moe.experts, e, row)
        if moe.shared is not None:
            y = y + moe.shared.w2(F.silu(moe.shared.w1(row)) * moe.shared.w3(row))
        rows.append(y)
    shares = scores / scores.sum(-1, keepdim=True)
    part = torch.tensor([sum(e in c for c in chosen) / len(tokens) for e in range(moe.num_experts)])
    balance = (shares.mean(0) * part).sum() * moe.num_experts / moe.top_k
    return torch.stack(rows).view(x.shape), balance


@pytest.mark.cpu_only("the mixture's own arithmetic")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1, "normalize": False},
        {"score": "sigmoid", "shared": 8, "top_k": 3},
        {"capacity_factor": 0.6, "shared": 5},
        {"capacity_factor": 0.5, "top_k": 1},
    ],
)
def test_a_mixture_is_what_it_is_token_by_token(options):
    torch.manual_seed(1)
    moe = MixtureOfExperts(DIM, HIDDEN, 4, **options)
    x = torch.randn(3, 5, DIM, requires_grad=True)
    weigh = torch.randn(3, 5, DIM)
    factor = options.get("capacity_factor")
    capacity = None if factor is None else -int(-15 * moe.top_k / 4 * factor // 1)
    found = []
    for run in (moe, lambda x: token_by_token(moe, x, capacity)):
        y, balance = run(x)
        grads = torch.autograd.grad((y * weigh).sum() + 3 * balance, [x, *moe.parameters()], allow_unused=True)
        found.append([y, balance, *(torch.zeros(1) if g is None else g for g in grads)])
    for mine, expected in zip(*found, strict=True):
        same(mine, expected.expand_as(mine))
    if capacity is not None:
        free = MixtureOfExperts(DIM, HIDDEN, 4, **{**options, "capacity_factor": None})
        free.load_state_dict(moe.state_dict())
        assert not torch.allclose(free(x)[0], found[0][0])  # some tokens were dropped


class Model(nn.Module):
    def __init__(self, capacity_factor: float | None) -> None:
        super().__init__()
        self.again = capacity_factor is not None  # forward runs again in backward
        self.into = nn.Linear(4, DIM)
        self.layers = nn.ModuleList(
            [MixtureOfExperts(DIM, HIDDEN, 5, shared=7, capacity_factor=capacity_factor) for _ in range(2)]
        )
        self.out = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.into(x), torch.zeros(())
        for layer in self.layers:
            y, balance = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            x, total = x + y, total + balance
        return self.out(x), total / len(self.layers)


def check_training(capacity_factor: float | None) -> None:
    """Experts over `ep`, sharded over the rest of the mesh; all else sharded over all ranks; clipping over both."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device_type(), (ranks // 2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(0)
    reference: Any = Model(capacity_factor)
    model: Any = copy.deepcopy(reference)
    for layer in model.layers:
        parallel(layer.experts, mesh["ep"])
        fully_shard(layer.experts, mesh=mesh["efsdp"]).set_gradient_divide_factor(ranks)
        fully_shard(layer)
    fully_shard(model)
    assert len({p.device_mesh for p in model.parameters()}) == 2
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, reference)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ranks, 7, 4, generator=generator)
        y = torch.randn(ranks, 7, 3, generator=generator)

        def loss_of(m: Any, r: int, x: Tensor = x, y: Tensor = y) -> Tensor:
            out, balance = m(x[r])
            return F.mse_loss(out, y[r]) + 0.1 * balance

        mine = loss_of(model, rank)
        mine.backward()
        wanted = torch.stack([loss_of(reference, r) for r in range(ranks)])
        wanted.mean().backward()
        same(mine, wanted[rank])
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p.grad is not None, name
            same(p.grad, q.grad)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.3) for m in (model, reference)]
        assert float(norms[1]) > 0.3
        same(norms[0], norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            same(p, q)


@pytest.mark.parametrize("capacity_factor", [None, 0.7])
def test_training_is_that_of_one_device(capacity_factor):
    run_ranks(4, check_training, capacity_factor)


def check_errors() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    with pytest.raises(ParallelPlanError, match="1 experts, fewer than the mesh has ranks, 2"):
        parallel(GroupedExperts(2, 2, 1), mesh)
    with pytest.raises(ParallelPlanError, match="first dim of every parameter of MixtureOfExperts"):
        parallel(MixtureOfExperts(2, 2, 4, shared=3), mesh)
    with pytest.raises(ParallelPlanError, match="of no parameter"):
        parallel(nn.Identity(), mesh)
    experts = parallel(GroupedExperts(2, 2, 4), mesh)
    with pytest.raises(ParallelPlanError, match="twice"):
        parallel(experts, mesh)
    with pytest.raises(ParallelPlanError, match="each of the 4 experts"):
        experts(torch.ones(3, 2), torch.ones(2))
    with pytest.raises(ParallelPlanError, match="called with 1 arguments"):
        experts(torch.ones(3, 2))
    assert experts(torch.ones(3, 2), torch.tensor([3.0, 0, 0, 0])).shape == (3, 2)  # counts of torch.histc


def test_wrong_uses_are_errors():
    run_ranks(2, check_errors)
    with pytest.raises(DTensorArgumentError, match="top_k must be from 1 to the number of experts, 4, not 5"):
        MixtureOfExperts(2, 2, 4, top_k=5)
    with pytest.raises(DTensorArgumentError, match="'softmax' or 'sigmoid', not 'max'"):
        MixtureOfExperts(2, 2, 4, score="max")  # type: ignore[arg-type]


def check_grouped_matmul(device: torch.device) -> None:
    counts = torch.tensor([3, 0, 5], device=device)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(8, 16, device=device, dtype=dtype, requires_grad=True)
        w = torch.randn(3, 24, 16, device=device, dtype=dtype, requires_grad=True)
        y = grouped_mm(x, w.transpose(1, 2), counts)
        expected = torch.cat([x[:3] @ w[0].T, x[3:] @ w[2].T])
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
        grads = [torch.autograd.grad((each * each.detach()).sum(), [x, w]) for each in (y, expected)]
        for mine, wanted in zip(*grads, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=5e-2, atol=5e-1)
        assert not grads[0][1][1].any()


@pytest.mark.gpu
@pytest.mark.cpu_only("the kernel is the accelerator's")
def test_grouped_matmul_on_the_device():
    run_on_devices(check_grouped_matmul)
