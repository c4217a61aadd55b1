"""Ranks outside a tensor's mesh run the same program, as they do with PyTorch's DTensor, which is what is compared."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import terrazzo.tensor as ours
from ranks import run_ranks
from terrazzo.errors import DTensorArgumentError, DTensorError


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


def kind(value):
    """What a program may ask of a result without its values."""
    if isinstance(value, ours.DTensor):
        asked = (value.dtype, tuple(value.shape), value.placements, value.requires_grad, value.device, value.stride())
        return (*asked, value.is_contiguous(), value.is_leaf)
    return (type(value).__name__, [kind(v) for v in value]) if isinstance(value, (list, tuple)) else repr(value)


def written(x, index, value):
    target = x.detach().clone()
    target[index] = value
    return target


CALLS = {
    "half": lambda x: x.half(),
    "double": lambda x: x.to(torch.float64),
    "the same": lambda x: x.to(torch.float32),
    "greater": lambda x: x > 3,
    "integers": lambda x: x.long().sum(),
    "mean": lambda x: x.mean(0),
    "half mean": lambda x: x.half().mean(),
    "largest": lambda x: x.amax(1),
    "promoted": lambda x: x.half() * x,
    "divided": lambda x: x.long() / 2,
    "complex": lambda x: torch.complex(x, x).abs(),
    "detached": lambda x: x.detach() * 2,
    "transposed": lambda x: x.t() * 2,
    "a view": lambda x: x.t().reshape(3, 2, 4),
    "split": lambda x: x.split([1, 2], dim=1),
    "whole": lambda x: torch.fft.fft(x, dim=0),
    "body": lambda x: torch.diff(x, dim=1),
    "decomposed": lambda x: F.glu(torch.cat([x, x], 1)),
    "loss": lambda x: F.cross_entropy(x, torch.zeros_like(x[:, 0], dtype=torch.int64)),
    "softmax": lambda x: F.softmax(x, 1, dtype=torch.float64),
    "product": lambda x: F.linear(x, x),
    "in place": lambda x: x.detach().clone().mul_(x),
    "in place, reshaped": lambda x: x.detach().clone().t_(),
    "in place, by a flag": lambda x: F.relu(x.clone(), inplace=True),
    "variance": lambda x: x.var(),
    "deviation": lambda x: torch.std_mean(x, 1),
    "written where a mask is": lambda x: written(x, x > 0, 1.0),
    "a value with a graph where a mask is": lambda x: written(x, x > 0, x.sum()),
    "a written row": lambda x: written(x, 0, x[1]),
    "written columns": lambda x: written(x, (slice(None), slice(1, 3)), x[:, 1:]),
    "no graph": lambda x: torch.no_grad()(lambda: x * 2)(),
    "autocast": lambda x: torch.autocast("cpu", torch.bfloat16)(lambda: F.linear(x, x))(),
}


VALUES = {
    "nonzero": lambda x, cuts, number: x.nonzero(),
    "max": lambda x, cuts, number: x.max(0),
    "argmax": lambda x, cuts, number: x.t().argmax(1),
    "argmin": lambda x, cuts, number: x.argmin(),
    "mask": lambda x, cuts, number: x[x > 0],
    "cuts": lambda x, cuts, number: x.tensor_split(cuts),
    "start": lambda x, cuts, number: x.narrow(0, number, 1),
    "count": lambda x, cuts, number: x.topk(number, 0),
    "bound": lambda x, cuts, number: x[number:],
    "bound in a tuple": lambda x, cuts, number: x[:, None, :number],
}
"""What needs values, or communicates."""

WRONG = {
    "shape in place": lambda x: x.detach().clone()[0].add_(x),
    "shape of a matrix in place": lambda x: x.detach().clone().addmm_(x, x.t()),
    "shape of a product in place": lambda x: x.detach().sum().addr_(x.detach().sum(0), x.detach().sum(0)),
    "kind in place": lambda x: x.long().cos_(),
    "kind of a logit in place": lambda x: x.long().logit_(),
    "kind of a quotient in place": lambda x: x.long().div_(x),
    "leaf": lambda x: x.mul_(2),
    "leaf where a mask is": lambda x: x.__setitem__(x > 0, 1.0),
    "shape of a value": lambda x: written(x, 0, x[:, 0]),
    "shape of a value for a slice": lambda x: written(x, slice(0, 2), x),
    "shape of a mask": lambda x: written(x, (x > 0)[:3], 1.0),
    "bound": lambda x: written(x, 99, 1.0),
}
"""What raises whatever the values are."""


def check_kinds():
    mesh = DeviceMesh("cpu", [0, 2])
    for placements in ([ours.Shard(0)], [ours.Shard(1)], [ours.Replicate()], [ours.Partial()]):
        x = ours.distribute_tensor(torch.rand(8, 3), mesh, placements).requires_grad_()
        for name, call in CALLS.items():
            seen = [None] * 4
            for _ in range(2):  # the second time from the cached route
                dist.all_gather_object(seen, kind(call(x)))
                assert all(s == seen[0] for s in seen), (name, placements, seen)
        for name, call in WRONG.items():
            with pytest.raises((RuntimeError, IndexError)):
                pytest.fail(f"{name} gave {kind(call(x))} where x is {placements}")
    x = ours.distribute_tensor(torch.rand(8, 3), mesh, [ours.Shard(0)])
    cuts, number = (ours.distribute_tensor(torch.tensor(v), mesh, [ours.Replicate()]) for v in ([1, 3], 2))
    if dist.get_rank() in (1, 3):  # these need values, or communicate
        for name, call in VALUES.items():
            with pytest.raises(DTensorError, match="outside the mesh"):
                pytest.fail(f"{name} gave {kind(call(x, cuts, number))}")


def check_transfers():
    a, b = DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [3, 1])
    whole = torch.arange(8.0)
    x = ours.distribute_tensor(whole, a, [ours.Shard(0)]).requires_grad_()
    for convert in (lambda t: t.half(), lambda t: t > 3, lambda t: t.long().sum(), lambda t: t.double() * t):
        moved = convert(x).redistribute(b, [ours.Replicate()])
        expected = convert(whole)
        assert moved.dtype == expected.dtype
        if dist.get_rank() in (1, 3):
            torch.testing.assert_close(moved.to_local().detach(), expected)
    inside = dist.get_rank() in (0, 2)
    local = torch.ones(4, dtype=torch.bfloat16 if inside else torch.float32)
    y = ours.DTensor.from_local(local, a, [ours.Shard(0)])
    with pytest.raises(DTensorArgumentError, match="rank 0 torch.bfloat16, rank 1 torch.float32"):
        y.redistribute(b, [ours.Replicate()])


def test_results_are_of_the_same_kind_as_inside():
    run_ranks(4, check_kinds)


def test_a_transfer_has_the_dtype_of_the_tensor():
    run_ranks(4, check_transfers)


def test_results_are_pytorchs():
    run_ranks(4, check_as_in_pytorch)


def test_backward_runs_everywhere():
    run_ranks(4, check_backward_and_values)
