"""Redistribution on real ranks: values, gradients of both kinds of consumers, second order, bytes, other meshes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from ranks import device_type, run_ranks
from terrazzo.comm import CommEvent, add_observer, remove_observer
from terrazzo.errors import DTensorError
from terrazzo.layout import Placement
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.convert import redistribute

pytestmark = pytest.mark.on_late(both=True)

R, P = Replicate(), Partial()


def placed(whole: torch.Tensor, mesh, placements: Sequence[Placement]) -> DTensor:
    """A leaf placed so; terms are made by giving the value to the first rank only."""
    plain = distribute_tensor(whole, mesh, [p if p.is_shard() else R for p in placements])
    return plain.redistribute(placements=placements).detach()


def same_on_all(t: torch.Tensor) -> bool:
    held = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(held, t.contiguous())
    return all(torch.equal(held[0], h) for h in held)


def check_pair(mesh, shape, src, dst, dtype=torch.float64) -> None:
    generator = torch.Generator().manual_seed(3)
    whole, weight = (torch.randn(shape, dtype=dtype, generator=generator) for _ in range(2))
    matrix = torch.randn(shape[-1], 3, dtype=dtype, generator=generator)
    where = f"{src} -> {dst} of {tuple(shape)}"

    x = placed(whole, mesh, src).requires_grad_()
    y = x.redistribute(placements=dst)
    assert y.placements == tuple(dst) and tuple(y._local.shape) == tuple(y._layout.local_shape), where
    torch.testing.assert_close(y.full_tensor().detach(), whole, msg=where)

    # A replicated consumer and varying ones.
    w, m = (distribute_tensor(t, mesh, [R] * mesh.ndim) for t in (weight, matrix))
    loss = (y * w).sum() + (y @ m).sin().sum()
    loss.backward()
    plain = whole.clone().requires_grad_()
    ((plain * weight).sum() + (plain @ matrix).sin().sum()).backward()
    assert x.grad.placements == x._layout.dual.placements, where
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad, msg=where)
    if all(p.is_replicate() for p in x.grad.placements):
        assert same_on_all(x.grad._local), where

    x = placed(whole, mesh, src).requires_grad_()
    (first,) = torch.autograd.grad((x.redistribute(placements=dst).sin() * w).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), x)
    plain = whole.clone().requires_grad_()
    (first_plain,) = torch.autograd.grad((plain.sin() * weight).sum(), plain, create_graph=True)
    (second_plain,) = torch.autograd.grad((first_plain * first_plain).sum(), plain)
    torch.testing.assert_close(second.full_tensor(), second_plain, msg=f"second order, {where}")


def pairs_on_a_line() -> None:
    mesh = init_device_mesh(device_type(), (4,))
    for shape in [(8, 4), (5, 6), (2, 3)]:
        for src, dst in product([R, Shard(0), Shard(1), P], repeat=2):
            check_pair(mesh, shape, [src], [dst])


def pairs_on_a_square() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    choices = [[R, R], [Shard(0), R], [R, Shard(1)], [Shard(0), Shard(0)], [Shard(1), Shard(0)], [P, Shard(0)], [P, P]]
    for src, dst in product(choices, repeat=2):
        check_pair(mesh, (5, 3), src, dst)


def test_every_pair_on_a_line() -> None:
    run_ranks(4, pairs_on_a_line)


def test_every_pair_on_a_square() -> None:
    run_ranks(4, pairs_on_a_square)


def other_reductions() -> None:
    mesh = init_device_mesh(device_type(), (4,))
    rank = dist.get_rank()
    local = torch.arange(6.0).reshape(2, 3) + rank
    every = torch.stack([torch.arange(6.0).reshape(2, 3) + r for r in range(4)])
    expected = {
        "sum": every.sum(0), "avg": every.mean(0), "product": every.prod(0), "max": every.amax(0), "min": every.amin(0),
    }  # fmt: skip
    for op, value in expected.items():
        for dtype in (torch.float32, torch.bfloat16):
            x = DTensor.from_local(local.to(dtype), mesh, [Partial(op)])
            torch.testing.assert_close(x.full_tensor(), value.to(dtype))
            sharded = x.redistribute(placements=[Shard(1)])
            torch.testing.assert_close(sharded.full_tensor(), value.to(dtype))
            back = x.redistribute(placements=[R]).redistribute(placements=[Partial(op)])
            torch.testing.assert_close(back.full_tensor(), value.to(dtype))


def test_reductions_other_than_the_sum() -> None:
    run_ranks(4, other_reductions)


def events_of(run) -> list[CommEvent]:
    seen: list[CommEvent] = []
    add_observer(seen.append)
    try:
        run()
    finally:
        remove_observer(seen.append)
    return seen


def bytes_moved() -> None:
    mesh, line = init_device_mesh(device_type(), (2, 2)), init_device_mesh(device_type(), (4,))
    whole = torch.randn(8, 8)
    size = whole.numel() * 4

    def moved(mesh, src, dst) -> list[tuple[str, int]]:
        x = placed(whole, mesh, src)
        return [(e.kind, e.bytes) for e in events_of(lambda: x.redistribute(placements=dst))]

    assert moved(line, [Shard(0)], [Shard(1)]) == [("all_to_all", size * 3 // 16)]
    assert moved(line, [Shard(0)], [R]) == [("all_gather", size * 3 // 4)]
    assert moved(line, [P], [R]) == [("all_reduce", size * 3 // 2)]
    assert moved(line, [P], [Shard(1)]) == [("reduce_scatter", size * 3 // 4)]
    assert moved(line, [R], [Shard(0)]) == moved(line, [R], [P]) == []
    # Neighbouring mesh dims share one collective.
    assert moved(mesh, [Shard(0), Shard(0)], [R, R]) == [("all_gather", size * 3 // 4)]
    assert moved(mesh, [P, P], [R, R]) == [("all_reduce", size * 3 // 2)]
    assert [kind for kind, _ in moved(mesh, [Shard(0), Shard(1)], [Shard(1), Shard(0)])] == ["exchange"]


def test_the_fewest_bytes_move() -> None:
    run_ranks(4, bytes_moved)


def explicit_order() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    whole = torch.arange(10.0).reshape(10, 1)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(0)]).requires_grad_()
    y = redistribute(x, None, [Shard(0), Shard(0)], order=(1, 0))
    assert y._layout.shard_order(0) == (1, 0)
    assert torch.equal(y._local, whole[y._layout.box().slices()])
    assert not all(torch.equal(a, b) for a, b in [(x._local, y._local)]) or dist.get_rank() in (0, 3)
    torch.testing.assert_close((y * 2).full_tensor(), whole * 2)
    (y * y).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * whole)


def test_shards_of_one_dim_in_another_order() -> None:
    run_ranks(4, explicit_order)


def in_the_background() -> None:
    mesh = init_device_mesh(device_type(), (4,))
    whole = torch.randn(5, 4, dtype=torch.float64)
    for src, dst in product([Shard(0), Shard(1), P], [R, Shard(0), Shard(1)]):
        x = placed(whole, mesh, [src]).requires_grad_()
        y = x.redistribute(placements=[dst], async_op=True)
        assert y.shape == whole.shape and y.dtype == whole.dtype  # answered without waiting
        (y * y).sum().backward()
        assert type(y) is DTensor
        torch.testing.assert_close(x.grad.full_tensor(), 2 * whole)


def backward_of_a_gather() -> None:
    mesh = init_device_mesh(device_type(), (4,))
    weight = placed(torch.randn(4, 8), mesh, [Shard(1)]).requires_grad_()

    def step(async_op: bool) -> None:
        x = placed(torch.randn(8, 4), mesh, [Shard(0)]).requires_grad_()
        (x.redistribute(placements=[R], async_op=async_op) @ weight).square().sum().backward()

    moved = [[(e.kind, e.bytes) for e in events_of(partial(step, async_op))] for async_op in (False, True)]
    assert moved[0] == moved[1] and "reduce_scatter" in [kind for kind, _ in moved[0]]


def test_async_redistribution() -> None:
    run_ranks(4, in_the_background)
    run_ranks(4, backward_of_a_gather)


def across_meshes() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    line, square = init_device_mesh(device_type(), (4,)), init_device_mesh(device_type(), (2, 2))
    pair, rest = DeviceMesh(device_type(), [1, 2]), DeviceMesh(device_type(), [3, 0])
    whole = torch.randn(5, 6, dtype=torch.float64)
    weight = torch.randn(5, 6, dtype=torch.float64)
    rank = dist.get_rank()
    cases = [
        (line, [Shard(0)], square, [Shard(1), Shard(0)]),
        (square, [Shard(0), R], line, [Shard(1)]),
        (line, [P], square, [R, Shard(0)]),
        (line, [R], square, [P, Shard(0)]),
        (line, [Shard(0)], pair, [Shard(0)]),
        (pair, [Shard(1)], line, [Shard(0)]),
        (pair, [R], rest, [R]),
        (pair, [Shard(0)], rest, [P]),
    ]
    for source, src, target, dst in cases:
        x = distribute_tensor(whole, source, [p if p.is_shard() else R for p in src])
        if source.get_coordinate() is not None:
            x = x.redistribute(placements=src).detach()
        x.requires_grad_()
        y = x.redistribute(target, dst)
        assert y.device_mesh == target and y.shape == whole.shape
        inside = target.get_coordinate() is not None
        if inside:
            torch.testing.assert_close(y.full_tensor().detach(), whole)
        # The way back carries the gradient home.
        w = distribute_tensor(weight, target, [R] * target.ndim)
        upstream = w.redistribute(placements=y._layout.dual.placements) if inside else w
        y._local.backward(upstream._local if inside else torch.zeros_like(y._local))
        if source.get_coordinate() is not None:
            torch.testing.assert_close(x.grad.full_tensor(), weight, msg=f"rank {rank}: {src} -> {dst}")


def test_redistribution_across_meshes() -> None:
    run_ranks(4, across_meshes)


def assigned_across_meshes() -> None:
    """A value is gathered on its mesh; what ranks use of it differs along the mesh of the target."""
    line, square = init_device_mesh(device_type(), (4,)), init_device_mesh(device_type(), (2, 2))
    tall = init_device_mesh(device_type(), (4, 1))
    whole, row = torch.randn(4, 6), torch.randn(6)
    targets = [(line, [Shard(0)]), (square, [Shard(0), Shard(1)]), (square, [R, Shard(0)])]
    values = [(line, [R]), (line, [Shard(0)]), (square, [R, Shard(0)]), (tall, [R, R]), (tall, [Shard(0), R])]
    for (mesh, placements), (other, of_value) in product(targets, values):
        for index in (1, slice(1, 3), [0, 2]):
            x, y = distribute_tensor(whole, mesh, placements), distribute_tensor(row, other, of_value).requires_grad_()
            plain, given = whole.clone(), row.clone().requires_grad_()
            x[index], plain[index] = y, given
            torch.testing.assert_close(x.full_tensor(), plain)
            weight = torch.arange(24.0).view(4, 6)
            (x * distribute_tensor(weight, mesh, [R] * mesh.ndim)).sum().backward()
            (plain * weight).sum().backward()
            torch.testing.assert_close(y.grad.full_tensor(), given.grad)


def test_values_of_another_mesh_are_assigned() -> None:
    run_ranks(4, assigned_across_meshes)


def refusals() -> None:
    mesh, other = init_device_mesh(device_type(), (4,)), init_device_mesh(device_type(), (2, 2))
    x, y = distribute_tensor(torch.ones(4), mesh, [Shard(0)]), distribute_tensor(torch.ones(4), other, [R, R])
    with pytest.raises(DTensorError, match="different meshes"):
        x + y
    with pytest.raises(ValueError, match="2 placements"):
        x.redistribute(placements=[R, R])


def test_what_cannot_be_is_refused() -> None:
    run_ranks(4, refusals)


def outside_the_mesh() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    everyone, pair = init_device_mesh(device_type(), (4,)), DeviceMesh(device_type(), [0, 1])
    whole = torch.randn(6, 4)
    x = distribute_tensor(whole, everyone, [Shard(0)]).redistribute(pair, [Shard(0)])
    # The same program everywhere; the ranks outside hold nothing and are in nobody's way.
    y = ((x * 2).relu() @ x.t()).sum(0)
    assert y.shape == (6,) and y.device_mesh == pair
    y.add_(1)
    total = y.redistribute(everyone, [R])
    torch.testing.assert_close(total.to_local(), ((whole * 2).relu() @ whole.t()).sum(0) + 1)
    if pair.get_coordinate() is None:
        with pytest.raises(DTensorError, match="outside the mesh"):
            torch.nonzero(x)
        assert torch.histc(x, 5).shape == (5,)  # it has no rule, but its shape needs no values


def test_ranks_outside_the_mesh_run_the_same_program() -> None:
    run_ranks(4, outside_the_mesh)
