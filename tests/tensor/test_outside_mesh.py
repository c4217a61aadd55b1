"""Ranks outside a tensor's mesh run the same program, as they do with PyTorch's DTensor, which is what is compared."""

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import terrazzo.tensor as ours
from ranks import run_ranks


def program(api, mesh):
    """What a rank gets to see, step by step."""
    local = torch.ones(4, 3)
    x = api.DTensor.from_local(local, mesh, [api.Shard(0)])
    replicated = x.redistribute(placements=[api.Replicate()])
    distributed = api.distribute_tensor(torch.ones(8, 3), mesh, [api.Shard(0)])
    results = [x, x + 2, x.sum(), x.sum() * 2, x.sum(0), *x.split([1, 2], dim=1), x.t(), replicated, distributed]
    results += [replicated.redistribute(placements=[api.Shard(0)]), api.zeros(8, 3, device_mesh=mesh)]
    return [(tuple(r.shape), r.to_local()) for r in results] + [x.equal(x + 0)]


def check_as_in_pytorch():
    mesh = DeviceMesh("cpu", [0, 2])
    mine, expected = program(ours, mesh), program(theirs, mesh)
    for got, wanted in zip(mine, expected, strict=True):
        if isinstance(wanted, bool):
            assert got is wanted
            continue
        assert got[0] == wanted[0]
        local = wanted[1].wait() if hasattr(wanted[1], "wait") else wanted[1]
        torch.testing.assert_close(got[1], local)


def check_backward_and_values():
    mesh = DeviceMesh("cpu", [0, 2])
    inside = dist.get_rank() in (0, 2)
    local = torch.ones(4, 3, requires_grad=True)
    x = ours.DTensor.from_local(local, mesh, [ours.Shard(0)])
    loss = ((x * 3).t().relu() + 1).sum()
    loss.backward()
    assert loss.requires_grad and loss.item() == (96.0 if inside else 0.0)
    if inside:
        torch.testing.assert_close(local.grad, torch.full((4, 3), 3.0))
    leaf = ours.distribute_tensor(torch.ones(8, 3), mesh, [ours.Shard(0)]).requires_grad_()
    (leaf * leaf).sum().backward()
    assert leaf.grad.shape == (8, 3) and leaf.grad.to_local().shape == ((4, 3) if inside else (0,))
    assert bool(x.equal(x * 2)) is not inside
    # A generator of all ranks goes on in step, whoever holds what is dropped.
    for call in (
        lambda: F.dropout(x, 0.3),
        lambda: F.dropout(x, 0.3, training=False),
        lambda: F.dropout(x.detach(), 0.3, inplace=True),
        lambda: F.dropout(x, 1.0),
        lambda: nn.Dropout(0.3)(x),
    ):
        assert call().shape == (8, 3)
    everyone = DeviceMesh("cpu", [0, 1, 2, 3])
    assert ours.rand(8, device_mesh=everyone).full_tensor().unique().numel() > 1
    states = [torch.empty_like(torch.get_rng_state()) for _ in range(4)]
    dist.all_gather(states, torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)
    # What is checked across the mesh is nobody else's affair.
    ours.DTensor.from_local(torch.ones(dist.get_rank() + 1), mesh, run_check=not inside)


def test_results_are_pytorchs():
    run_ranks(4, check_as_in_pytorch)


def test_backward_runs_everywhere():
    run_ranks(4, check_backward_and_values)
