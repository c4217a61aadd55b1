"""Whole tensors on one owner each, and back: for optimizers of users' own, such as Shampoo."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from terrazzo.errors import OptimError
from terrazzo.fsdp import fully_shard
from terrazzo.layout import Layout, Replicate, Shard
from terrazzo.optim import Owners
from terrazzo.optim.routes import balanced, routes_of
from terrazzo.tensor import DTensor, Partial, distribute_tensor, init_device_mesh


class Seen:
    """A mesh as one of its ranks sees it."""

    def __init__(self, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
        self.shape, self._coordinate = shape, coordinate

    def get_coordinate(self) -> tuple[int, ...]:
        return self._coordinate


@pytest.mark.parametrize("seed", range(20))
def test_ranks_agree_on_every_message(seed):
    """What one sends the other expects, owners get every element once, and holders all that they hold."""
    rng = random.Random(seed)
    mesh_shape = rng.choice([(3,), (4,), (2, 3), (3, 2), (2, 2, 2)])
    ranks = prod(mesh_shape)
    shapes = [(rng.randrange(0, 8), rng.randrange(1, 6)) for _ in range(6)]
    placements = [[rng.choice([Shard(0), Shard(1), Replicate()]) for _ in mesh_shape] for _ in shapes]
    orders = [rng.sample(range(len(mesh_shape)), len(mesh_shape)) for _ in shapes]
    costs = [prod(shape) for shape in shapes]
    coordinates = [tuple(torch.unravel_index(torch.tensor(r), mesh_shape)) for r in range(ranks)]
    coordinates = [tuple(int(c) for c in coordinate) for coordinate in coordinates]
    of_rank = []
    for coordinate in coordinates:
        mesh = Seen(mesh_shape, coordinate)
        layouts = [Layout.of(mesh, p, s, o) for p, s, o in zip(placements, shapes, orders, strict=True)]
        of_rank.append((layouts, routes_of(layouts, costs, coordinate)))
    owners = {routes.owners for _, routes in of_rank}
    assert len(owners) == 1
    for a in range(ranks):
        for b in range(ranks):
            assert of_rank[a][1].to_owners[b] == of_rank[b][1].from_holders[a]
            assert of_rank[a][1].to_holders[b] == of_rank[b][1].from_owners[a]
    for i, owner in enumerate(owners.pop()):
        count = torch.zeros(shapes[i], dtype=torch.int)
        for message in of_rank[owner][1].from_holders:
            for piece in message:
                if piece.tensor == i:
                    count[piece.box.slices()] += 1
        assert bool((count == 1).all())
        for layouts, routes in of_rank:
            boxes = [piece.box for message in routes.from_owners for piece in message if piece.tensor == i]
            held = layouts[i].box()
            assert boxes == ([] if held.is_empty else [held])


def test_balance():
    rng = random.Random(0)
    for _ in range(50):
        costs = [rng.randrange(1, 100) for _ in range(rng.randrange(1, 40))]
        ranks = rng.randrange(1, 9)
        loads = [0] * ranks
        for cost, rank in zip(costs, balanced(costs, ranks), strict=True):
            loads[rank] += cost
        assert max(loads) <= sum(costs) / ranks + max(costs)


class Shampoo(torch.optim.Optimizer):
    """Inverse fourth roots of the sums of both squares of a matrix's gradients, which its owner alone keeps."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        (group,) = self.param_groups
        self.owners = Owners(group["params"], cost=lambda shape: sum(n**3 for n in shape))
        self.sums: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        updates = {}
        for i, grad in self.owners.gather([p.grad for p in group["params"]]).items():
            rows, columns = self.sums.setdefault(i, [1e-3 * torch.eye(n) for n in grad.shape])
            rows += grad @ grad.T
            columns += grad.T @ grad
            updates[i] = root(rows) @ grad @ root(columns)
        for p, update in zip(group["params"], self.owners.scatter(updates, torch.float32), strict=True):
            p.sub_(update, alpha=group["lr"])


def root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


def check_shampoo() -> None:
    torch.manual_seed(0)
    model, reference = (nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    ours, theirs = Shampoo(model.parameters(), 0.1), Shampoo(reference.parameters(), 0.1)
    assert len(ours.owners.mine) == 1 and len(theirs.owners.mine) == 2
    rank = torch.distributed.get_rank()
    for step in range(5):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        for module, optimizer, inputs in ((model, ours, x.chunk(2)[rank]), (reference, theirs, x)):
            module(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(ours.sums) == 1
    for p, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), wanted, rtol=1e-4, atol=1e-5)


def test_shampoo():
    run_ranks(2, check_shampoo)


def check_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12.0).view(4, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    with pytest.raises(OptimError, match="Partial.*redistribute it"):
        Owners([DTensor.from_local(whole, mesh, [Partial()])])
    owners = Owners([sharded, whole])
    with pytest.raises(OptimError, match="tensor 0"):
        owners.gather([distribute_tensor(whole, mesh, [Shard(1)]), whole])
    with pytest.raises(OptimError, match="2 tensors, but 1"):
        owners.gather([sharded])
    mixed = Owners([sharded, sharded])
    with pytest.raises(OptimError, match="dtype"):
        mixed.gather([sharded, sharded.double()])
    wholes = mixed.gather([sharded, sharded.double()], torch.float64)
    assert [x.dtype for x in wholes.values()] == [torch.float64]
    with pytest.raises(OptimError, match="shape"):
        mixed.scatter({i: x[:1] for i, x in wholes.items()}, torch.float64)
    with pytest.raises(OptimError, match="position"):
        mixed.scatter({}, torch.float64)
    back = mixed.scatter(wholes, torch.float32)
    assert all(torch.equal(x.full_tensor(), whole) for x in back)


def test_refused():
    run_ranks(2, check_refused)
