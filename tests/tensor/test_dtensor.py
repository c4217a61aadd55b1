"""The class: conversions, autograd's surface, writes, indices, scalars, copies, errors. Each against one device."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ranks import device_type, run_ranks
from terrazzo.errors import DTensorError, MixedTensorError
from terrazzo.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    empty,
    full,
    init_device_mesh,
    linspace,
    logspace,
    ones,
    rand,
    randn,
    zeros,
)
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.dispatch import keys
from terrazzo.tensor.dtensor import key_of_call

pytestmark = pytest.mark.on_late(both=True)

R, P, S0 = Replicate(), Partial(), Shard(0)


def line():
    return init_device_mesh(device_type(), (4,))


def square():
    return init_device_mesh(device_type(), (2, 2), mesh_dim_names=("a", "b"))


def everywhere(shape):
    """(mesh, placements) that hold a tensor of this shape in all kinds of ways."""
    for mesh, kinds in ((line(), [[R], [Shard(0)]]), (square(), [[Shard(0), R], [Shard(0), Shard(0)]])):
        for placements in kinds:
            yield mesh, placements
        if len(shape) > 1:
            yield mesh, [Shard(1)] * mesh.ndim if mesh.ndim == 1 else [Shard(1), Shard(0)]


def equal(x: DTensor, expected: torch.Tensor) -> None:
    assert isinstance(x, DTensor)
    assert x.shape == expected.shape and x.dtype == expected.dtype
    torch.testing.assert_close(x.full_tensor().detach(), expected.detach())


# ------------------------------------------------------------------ conversions


def conversions() -> None:
    mesh, rank = line(), dist.get_rank()
    whole = torch.randn(5, 6)
    for mesh_, placements in everywhere(whole.shape):
        x = distribute_tensor(whole, mesh_, placements)
        assert x.placements == tuple(placements) and x.device_mesh == mesh_
        assert torch.equal(x.to_local(), whole[x._layout.box().slices()])
        assert torch.equal(x.full_tensor(), whole)
        equal(DTensor.from_local(x.to_local(), mesh_, placements, shape=whole.shape), whole)
    # The first rank's values count, unless the caller says that all have the same.
    equal(distribute_tensor(whole + rank, mesh, [Shard(0)]), whole)
    equal(distribute_tensor(whole + rank, mesh, [R], src_data_rank=2), whole + 2)
    mine = distribute_tensor(whole + rank, mesh, [Shard(1)], src_data_rank=None)
    assert torch.equal(mine.to_local(), (whole + rank)[mine._layout.box().slices()])
    with mesh:
        equal(distribute_tensor(whole, placements=[Shard(0)]), whole)
        assert ones(3).device_mesh == mesh
    parameter = distribute_tensor(nn.Parameter(whole), mesh, [Shard(0)])
    assert parameter.requires_grad and isinstance(parameter, nn.Parameter)
    with pytest.raises(DTensorError, match="leaf"):
        distribute_tensor(nn.Parameter(whole) * 2, mesh, [R])
    terms = distribute_tensor(whole + rank, mesh, [P])
    assert terms.placements == (P,)
    equal(terms, whole)
    with pytest.raises(DTensorError, match="is not this rank's part"):
        DTensor.from_local(whole, mesh, [Shard(0)], shape=(5, 6))
    with pytest.raises(DTensorError, match="no device mesh"):
        distribute_tensor(whole)
    with pytest.raises(DTensorError, match="Use distribute_tensor"):
        DTensor(whole)
    with pytest.raises(AttributeError):
        x.placements = (R,)
    checked = DTensor.from_local(torch.full((2,), float(rank)), mesh, [R], run_check=True)
    assert checked.to_local().tolist() == [0.0, 0.0]
    wrong = torch.ones(2, dtype=torch.float64 if rank == 1 else torch.float32)
    with pytest.raises(DTensorError, match="do not fit together"):
        DTensor.from_local(wrong, mesh, [R], run_check=True)


def test_conversions() -> None:
    run_ranks(4, conversions)


def gradients_of_conversions() -> None:
    mesh = line()
    local = torch.randn(2, 3, requires_grad=True)
    scale = 2.0 + dist.get_rank()
    (DTensor.from_local(local, mesh, [Shard(0)]).to_local() * scale).sum().backward()
    torch.testing.assert_close(local.grad, torch.full((2, 3), scale))
    # A replica that ranks use differently: the hint says that its gradients are terms.
    x = distribute_tensor(torch.randn(3), mesh, [R]).requires_grad_()
    (x.to_local(grad_placements=[P]) * scale).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((3,), sum(2.0 + r for r in range(4))))
    x = distribute_tensor(torch.randn(6), mesh, [Shard(0)]).requires_grad_()
    (x.full_tensor(grad_placements=[P]) * scale).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((6,), sum(2.0 + r for r in range(4))))
    x = distribute_tensor(torch.randn(6), mesh, [Shard(0)]).requires_grad_()
    (x.full_tensor() * 3).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((6,), 3.0))


def test_conversions_are_differentiable() -> None:
    run_ranks(4, gradients_of_conversions)


def placed_gradients_and_types() -> None:
    """`from_local` says where its gradient goes, `redistribute` in which types it sends: as PyTorch's do."""
    from torch.distributed import tensor as theirs

    from terrazzo import tensor as ours

    mesh = init_device_mesh(device_type(), (2,))
    rank = dist.get_rank()
    asked = [([R], [P]), ([R], None), ([P], [P]), ([P], None), ([S0], None)]
    if "grad_placements" not in inspect.signature(theirs.DTensor.from_local).parameters:  # PyTorch 2.11
        asked = [(placements, None) for placements in ([R], [P], [S0])]
    for placements, grad_placements in asked:
        found = []
        for t in (theirs, ours):
            named = {R: t.Replicate(), P: t.Partial(), S0: t.Shard(0)}
            local = torch.arange(8.0).reshape(4, 2).requires_grad_()
            to = {} if grad_placements is None else {"grad_placements": [named[p] for p in grad_placements]}
            x = t.DTensor.from_local(local, mesh, [named[p] for p in placements], **to)
            x.mul_(2)  # a result of the leaf, not a view of it
            if t is ours and placements == [R]:
                other = torch.full((4, 2), float(rank), requires_grad=True)
                same = t.DTensor.from_local(other, mesh, [R], run_check=True, **to)
                assert not same.to_local().any()
            (x.redistribute(placements=[named[R]]).to_local() * 3).sum().backward()
            if grad_placements == [P]:  # which terms make it is not said
                dist.all_reduce(local.grad)
            found.append(local.grad)
        assert torch.equal(*found), (placements, grad_placements)
    x = torch.randn(4, 3, dtype=torch.float64)
    for src, dst in (([S0], [R]), ([R], [S0]), ([P], [R]), ([P], [S0]), ([S0], [S0]), ([S0], [Shard(1)])):
        for forward_dtype, backward_dtype in (
            (torch.bfloat16, None),
            (torch.float32, torch.float16),
            (None, torch.half),
        ):
            found = []
            for t in (theirs, ours):
                named = {R: t.Replicate(), P: t.Partial(), S0: t.Shard(0), Shard(1): t.Shard(1)}
                local = (x[2 * rank : 2 * rank + 2] if src == [S0] else x).clone().requires_grad_()
                made = t.DTensor.from_local(local, mesh, [named[p] for p in src]).redistribute(
                    placements=[named[p] for p in dst], forward_dtype=forward_dtype, backward_dtype=backward_dtype
                )
                if t is ours:
                    made.mul_(1)
                (made.to_local() ** 2).sum().backward()
                found.append((made.dtype, made.full_tensor(), local.grad))
            (dtype, value, grad), (own_dtype, own_value, own_grad) = found
            assert dtype == own_dtype == (forward_dtype or torch.float64) and own_grad.dtype == torch.float64
            assert torch.equal(value, own_value) and torch.equal(grad, own_grad), (src, dst, forward_dtype)


def test_placed_gradients_and_types() -> None:
    run_ranks(2, placed_gradients_and_types)


def factories() -> None:
    mesh = line()
    for placements in ([R], [Shard(0)], [Shard(1)], [P]):
        options = {"device_mesh": mesh, "placements": placements}
        equal(zeros(5, 3, **options), torch.zeros(5, 3))
        equal(ones((5, 3), **options, dtype=torch.float64), torch.ones(5, 3, dtype=torch.float64))
        equal(full((5, 3), 7, **options), torch.full((5, 3), 7))
        assert empty([5, 3], **options, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert rand(5, 3, **options, requires_grad=True).requires_grad
    for placements in ([R], [Shard(0)], [P]):
        options = {"device_mesh": mesh, "placements": placements}
        for dtype in (None, torch.float64, torch.int64, torch.complex64):
            equal(linspace(-1.5, 4, 11, dtype=dtype, **options), torch.linspace(-1.5, 4, 11, dtype=dtype))
            equal(logspace(-1, 2, 3, dtype=dtype, **options), torch.logspace(-1, 2, 3, dtype=dtype))
        equal(linspace(torch.tensor(0), torch.tensor(3.0), 2, **options), torch.linspace(0, 3, 2))
        equal(logspace(0, zeros((), device_mesh=mesh) + 3, 5, 2.0, **options), torch.logspace(0, 3, 5, 2.0))
        equal(linspace(0, 1j, 5, **options), torch.linspace(0, 1j, 5))
    with pytest.raises(DTensorError, match="0-dimensional"):
        linspace(torch.zeros(2), 1, 3, device_mesh=mesh)
    torch.manual_seed(7)
    values = {}
    for make in (rand, randn):
        drawn = []
        for mesh_, placements in [*everywhere((9, 5)), (mesh, [P])]:
            torch.manual_seed(7)
            drawn.append(make(9, 5, device_mesh=mesh_, placements=placements).full_tensor())
        assert all(torch.allclose(drawn[0], d) for d in drawn)
        values[make] = drawn[0]
    torch.manual_seed(8)
    assert not torch.equal(rand(9, 5, device_mesh=mesh).full_tensor(), values[rand])
    many = rand(100, 1000, device_mesh=mesh, placements=[Shard(1)]).full_tensor()
    assert 0 <= many.min() and many.max() < 1 and abs(many.mean() - 0.5) < 0.01 and abs(many.var() - 1 / 12) < 0.002
    bell = randn(100, 1000, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    assert abs(bell.mean()) < 0.02 and abs(bell.std() - 1) < 0.02 and abs((bell**4).mean() - 3) < 0.15
    with pytest.raises(DTensorError, match="strided"):
        zeros(3, layout=torch.sparse_coo, device_mesh=mesh)


def test_factories() -> None:
    run_ranks(4, factories)


# ------------------------------------------------------------------ autograd's surface


def autograd_surface() -> None:
    mesh = line()
    whole = torch.randn(8, 4)
    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    assert x.is_leaf and x.grad is None and x.requires_grad
    y = x * 2
    assert not y.is_leaf and y.grad_fn is not None and not y.detach().requires_grad
    y.retain_grad()
    seen = []
    y.register_hook(lambda g: seen.append((type(g), g.placements, tuple(g.shape))))
    y.sum().backward()
    assert seen == [(DTensor, (Shard(0),), (8, 4))]
    equal(y.grad, torch.ones(8, 4))
    assert x.grad is x.grad
    equal(x.grad, torch.full((8, 4), 2.0))
    x.grad = distribute_tensor(whole, mesh, [R])
    assert x.grad.placements == (Shard(0),)
    with pytest.raises(DTensorError, match="must be a DTensor"):
        x.grad = whole
    x.grad = None
    assert x.grad is None
    with pytest.raises(RuntimeError, match="scalar outputs"):
        (x * 1).backward()
    (x * 3).backward(distribute_tensor(whole, mesh, [R]))
    equal(x.grad, 3 * whole)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        assert (x * 2).is_inference()
    data = distribute_tensor(whole, mesh, [Shard(0)])
    data.data = data.data * 2
    equal(data, whole * 2)
    calls = []
    x.grad = None
    x.register_post_accumulate_grad_hook(lambda p: calls.append(p is x))
    x.sum().backward()
    assert calls == [True]


def test_autograds_surface() -> None:
    run_ranks(4, autograd_surface)


# ------------------------------------------------------------------ writes


def in_place(x):
    h = x * 1
    h.add_(1).mul_(2)
    h[0] = 5.0
    h[:, 1] = h[:, 0] * 2
    h[1:3, 2:] = -1
    h += x
    h.clamp_(-3, 3)
    return h.sin()


def through_views(x):
    h = x * 1
    h.t().mul_(2)
    h[:, :].add_(1)
    h.unsqueeze(0).div_(3)
    h.view(2, 2, 4)[..., None].sub_(1)
    return h * x


def cumulative(x):
    h = x * 1
    h.cumsum_(0)
    h.cumsum_(1)
    return h * x


def masks(x):
    h = x * 1
    h[h > 0.3] = 0.5
    h.masked_fill_(x < -0.5, 2.0)
    return h * x


def reshaping(x):
    h = x * 1
    h.unsqueeze_(0)
    h.squeeze_(0)
    h.t_()
    return h @ x


def steps_of_index(x):
    h = x * 1
    h[::2, 1] = 7
    h[-1] = h[0]
    h[..., 3:0] = 9  # nothing
    h[[0, 2]] = h[[2, 0]] * 3
    return h * x


WRITES = [in_place, through_views, cumulative, masks, reshaping, steps_of_index]


def writes() -> None:
    whole = torch.randn(4, 4, dtype=torch.float64)
    for function in WRITES:
        plain = whole.clone().requires_grad_()
        expected = function(plain)
        expected.square().sum().backward()
        for mesh, placements in everywhere((4, 4)):
            if function is through_views and not all(p.is_replicate() for p in placements):
                continue  # what no index says is tested below
            x = distribute_tensor(whole, mesh, placements).requires_grad_()
            result = function(x)
            where = f"{function.__name__} {placements}"
            torch.testing.assert_close(result.full_tensor(), expected, msg=where)
            result.square().sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad, msg=where)


def test_writes_equal_one_device() -> None:
    run_ranks(4, writes)


def refused_writes() -> None:
    mesh = line()
    x = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])
    with pytest.raises(DTensorError, match="would not reach the viewed tensor"):
        x.unfold(0, 3, 3)[1].zero_()
    with pytest.raises(DTensorError, match="would not reach"):
        x.view(2, 16).zero_()
    with pytest.raises(DTensorError, match="would not reach"):
        torch._foreach_add_([x.view(2, 16)], 1.0)
    with pytest.raises(DTensorError, match="change of the shape"):
        x[1:3].t_()
    with pytest.raises(DTensorError, match="would not reach"):
        x.view(2, 16)[0].view(4, 4)[0] = 1  # a view of a view that was gathered
    x[1] = 5.0  # assignment finds the tensor itself
    expected = torch.zeros(8, 4)
    expected[1] = 5
    equal(x, expected)
    x[:, 1:3].mul_(2)  # a dim that is not sharded
    expected[:, 1:3].mul_(2)
    equal(x, expected)
    with pytest.raises(IndexError, match="out of bounds"):
        x[9] = 1
    view, none = x[2:4], distribute_tensor(torch.zeros(0, 4), mesh, [Shard(0)])
    empty = none[0:0]
    for wrong in (lambda: x.__setitem__((0, 0, 0), 1), lambda: x.__setitem__(-9, 1), lambda: none.__setitem__(0, 1)):
        with pytest.raises(IndexError):
            wrong()
    assert view.shape == (2, 4) and empty.shape == (0, 4)
    with pytest.raises(IndexError, match="out of bounds"):
        x[-9]
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        leaf.add_(1)
    with pytest.raises(MixedTensorError, match="argument 0 is a plain Tensor"):
        torch.zeros(8, 4).add_(x)


def test_writes_that_would_be_lost_are_refused() -> None:
    run_ranks(4, refused_writes)


def indexed_writes(x):
    """Through copies of what is sharded, and views of these."""
    x[1:3] += 5
    x[0].add_(1)
    x.t()[1].mul_(3)
    part = x[2:7]
    part.t()[0] += 1
    part[0] += 2
    part[1:3].mul_(2)
    part.clamp_(max=9)
    x.select(0, -1).fill_(4)
    x.narrow(0, 5, 2).sub_(1)
    x[..., 2:3].t()[0][4] = 8
    torch._foreach_add_([x[3], x[4:6]], 1.5)
    for i, row in enumerate(x):
        row.mul_(i)
        x[i] = row + 1
    first, last = x.split([3, 5])
    last.sub_(first.sum())
    first[0] = 2
    _, right = x.chunk(2, dim=1)
    right.t()[0].add_(3)
    torch._foreach_mul_(x.unbind(1), 0.5)
    x[x[:, 0] > 2] -= 1
    return x


def writes_through_copies() -> None:
    whole = torch.arange(32.0).reshape(8, 4)
    expected = indexed_writes(whole.clone())
    for mesh, placements in everywhere((8, 4)):
        if any(p.is_partial() for p in placements):
            continue
        equal(indexed_writes(distribute_tensor(whole, mesh, placements)), expected)
    x, y = distribute_tensor(whole, line(), [Shard(0)]), whole.clone()
    for t in (x, y):
        t.view(4, 2, 2, 2)[0].transpose(0, 1)[0] = 1
    equal(x, y)
    x = distribute_tensor(whole, line(), [Shard(0)])
    torch.manual_seed(0)
    x[5].uniform_(40, 41)
    changed = x.full_tensor()
    assert (changed[5] >= 40).all() and changed[[0, 1, 2, 3, 4, 6, 7]].equal(whole[[0, 1, 2, 3, 4, 6, 7]])
    leaf = x.clone().detach().requires_grad_()
    leaf[1:3].detach().mul_(0)
    leaf.data[4] = leaf[6].data.zero_()[0]
    changed[[1, 2, 4, 6]] = 0
    equal(leaf.detach(), changed)
    weights = torch.ones(8, 4, requires_grad=True)
    grown = distribute_tensor(torch.ones(8, 4), line(), [Shard(0)]).requires_grad_()
    for w in (weights, grown):
        y = w * 2
        y[1:4] *= w[2:5]
        y[0] += w[7] ** 2
        (y * y).sum().backward()
    equal(grown.grad, weights.grad)


def assignments() -> None:
    """Values placed as their target are assigned where they are; others are brought there."""
    torch.manual_seed(0)
    whole, value = torch.randn(8, 4, 6), torch.randn(8, 6)
    for mesh, placements in everywhere((8, 4, 6)):
        if any(p.is_partial() for p in placements):
            continue
        for source in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()]):
            cache, kept = whole.clone().requires_grad_(), distribute_tensor(whole, mesh, placements).requires_grad_()
            plain = value.clone().requires_grad_()
            mine = distribute_tensor(value, mesh, (source * 2)[: mesh.ndim]).requires_grad_()
            results = []
            for x, v in ((cache, plain), (kept, mine)):
                y = x * 2
                y[:, 1] = v
                y[2:6, 3, None] = v[1:5, None]
                y[:, -2:, 0] = v[:, :2]
                y[5] = v[3]
                (y * y).sum().backward()
                results.append((y, x.grad, v.grad))
            for expected, got in zip(*results, strict=True):
                equal(got.detach(), expected.detach())
    line4 = line()
    cache, value = (distribute_tensor(torch.zeros(s), line4, [Shard(0)]) for s in ((8, 4, 6), (8, 6)))
    with CommDebugMode() as seen:
        cache[:, 2] = value
        cache[:, 1:3, :] = value[:, None, :]
    assert seen.get_total_counts() == 0


def test_assigned_values_stay_where_the_target_is() -> None:
    run_ranks(4, assignments)


def test_writes_through_copied_views_reach_the_tensor() -> None:
    run_ranks(4, writes_through_copies)


def floats_in_plans() -> None:
    """What a plan was made for: other numbers may mean other shapes, and other things to terms."""
    mesh = line()
    image = torch.randn(2, 3, 4, 4)
    for placement in (Shard(0), Shard(1), Shard(2), R):
        x = distribute_tensor(image, mesh, [placement])
        for factor in (1.7, 0.6, 2.0, 1.7):
            for mode in ("nearest", "bilinear"):
                equal(
                    F.interpolate(x, scale_factor=factor, mode=mode),
                    F.interpolate(image, scale_factor=factor, mode=mode),
                )
    for value in (0.0, 1.5, 0.0, -2.0):
        terms = DTensor.from_local(torch.full((2, 2), 1.0), mesh, [P])
        equal(terms * value, torch.full((2, 2), 4 * value))
        equal(F.pad(terms, (1, 1), value=value), F.pad(torch.full((2, 2), 4.0), (1, 1), value=value))
        equal(torch.full_like(terms, value), torch.full((2, 2), value))
        equal(terms.masked_fill(terms > 0, value), torch.full((2, 2), value))
        equal(torch.linalg.vector_norm(terms, value), torch.linalg.vector_norm(torch.full((2, 2), 4.0), value))
        equal(terms.clone().fill_(value), torch.full((2, 2), value))
        terms.fill_(value)
        equal(terms, torch.full((2, 2), value))
    x = distribute_tensor(image, mesh, [Shard(0)])
    for size in (2, 4, 2, 4):  # one part only, and its plan again
        for mine, theirs in zip(x.split(size, 2), image.split(size, 2), strict=True):
            equal(mine, theirs)


def test_numbers_that_plans_depend_on() -> None:
    run_ranks(4, floats_in_plans)


def stale_views() -> None:
    mesh = line()
    writes = [
        lambda x: x.add_(1),
        lambda x: x.__setitem__(2, 1.0),
        lambda x: x.__setitem__((slice(1, None, 2), -1), x[1, 0] * 1),
        lambda x: x.t().mul_(2),
        lambda x: torch._foreach_mul_([x], 2.0),
        lambda x: torch.optim.SGD([x.requires_grad_()], lr=0.1).step(lambda: (x * x).sum().backward()),
        lambda x: x[2:4].zero_(),
    ]
    uses = [
        lambda v: v + 1,
        lambda v: v.full_tensor(),
        lambda v: v.to_local(),
        lambda v: v.t().sum(),
        lambda v: v.add_(1),
    ]
    for write in writes:
        for use in uses:
            x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
            view, kept = x[2:5], x[2:5].clone()
            write(x)
            with pytest.raises(DTensorError, match="was written to after the copy was made"):
                use(view)
            with pytest.raises(DTensorError, match="was written to after"):
                view[0].sum()
            equal(kept, torch.ones(3, 4))
            assert x[2:5].shape == view.shape
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    view, beside = x[2:5], x[5:, 1:3]
    x[0] = x[1, :3:2] = x[5:, 3] = 1.0  # nothing of which the views show
    with torch.no_grad():
        view += 1  # its own write does not make it old
        view[0] += 1
    equal(view, torch.tensor([3.0, 2, 2])[:, None].expand(3, 4))
    equal(beside, torch.ones(3, 2))
    x[7, 2] = 1.0
    with pytest.raises(DTensorError, match="was written to after"):
        beside.sum()
    rows = x.t().reshape(-1)  # on one device this is no view
    x.zero_()
    assert rows.sum() == 32 + 3 * 4 + 4
    x.data = x + 1  # other memory
    with torch.inference_mode():
        y = x * 2
        y[1:3] += 1
        assert y.sum() == 64 + 8


def test_views_that_are_out_of_date_say_so() -> None:
    run_ranks(4, stale_views)


def outs() -> None:
    mesh = line()
    whole = torch.randn(8, 4)
    x, out = distribute_tensor(whole, mesh, [Shard(0)]), zeros(8, 4, device_mesh=mesh, placements=[Shard(1)])
    assert torch.add(x, 1, out=out) is out and out.placements == (Shard(1),)
    equal(out, whole + 1)
    values, indices = zeros(8, device_mesh=mesh), zeros(8, dtype=torch.int64, device_mesh=mesh)
    torch.max(x, 1, out=(values, indices))
    equal(values, whole.max(1).values)
    with pytest.raises(MixedTensorError):
        torch.add(x, 1, out=torch.empty(8, 4))
    with pytest.raises(DTensorError, match="out has shape"):
        torch.add(x, 1, out=zeros(3, device_mesh=mesh))


def test_out_arguments() -> None:
    run_ranks(4, outs)


# ------------------------------------------------------------------ reading


def reading() -> None:
    whole = torch.randn(5, 4)
    index = torch.tensor([3, 0, 0])
    for mesh, placements in everywhere((5, 4)):
        x = distribute_tensor(whole, mesh, placements)
        i = distribute_tensor(index, mesh, [R] * mesh.ndim)
        for key in (
            0,
            -1,
            slice(1, 3),
            (slice(None), 2),
            (..., None, 1),
            (slice(0, 5, 2), slice(1, None)),
            [0, 2],
            None,
        ):
            equal(x[key], whole[key])
        equal(x[i], whole[index])
        equal(x[:, i], whole[:, index])
        equal(x[i, :, None], whole[index, :, None])
        equal(x[i, i], whole[index, index])
        equal(x[x > 0], whole[whole > 0])
        equal(x[i[0]], whole[index[0]])
        equal(x[: i[0]], whole[: index[0]])
        equal((x > 0).nonzero(), (whole > 0).nonzero())
        for mine, theirs in zip(torch.where(x > 0), torch.where(whole > 0), strict=True):
            equal(mine, theirs)
        equal(i.unique(), index.unique())
        for a, b in zip(x, whole, strict=True):
            equal(a, b)
        for a, b in zip(x.split([1, 4]), whole.split([1, 4]), strict=True):
            equal(a, b)
        assert x.tolist() == whole.tolist() and len(x) == 5
        total = x.sum()
        assert total.item() == pytest.approx(whole.sum().item(), rel=1e-5)
        assert float(total) == total.item() and bool((x > -100).all())
        assert f"{total.redistribute():.2f}" == f"{total.item():.2f}"
        assert (x == x).all() and torch.equal(x, x) and torch.allclose(x, x * 1)
        # With a whole, plain tensor; all ranks have the same answer if it differs on one of them.
        assert torch.equal(x, whole) and torch.equal(whole, x)
        assert not torch.equal(whole + float(dist.get_rank() == 1), x)
        assert "DTensor" in repr(x) and x.stride() == whole.stride() and x.is_contiguous()
        assert (x + 1.5).dtype == torch.float32 and (2 - x).shape == (5, 4)
        equal(2 - x, 2 - whole)
        equal(x + torch.tensor(2.0), whole + 2)
    with pytest.raises(RuntimeError, match="one element"):
        bool(x)
    with pytest.raises(IndexError, match="too many indices"):
        x[0, 0, 0]


def formatting() -> None:
    """One rank alone: a rank that waited for the others here would wait until the time limit."""
    mesh, part = init_device_mesh(device_type(), (2, 2)), DeviceMesh(device_type(), [1, 2])
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0), R])
    total, known = x.sum(), x.sum().redistribute()
    apart = distribute_tensor(torch.tensor(1.5), part, [R])
    y = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0), Shard(1)])
    later = y.redistribute(placements=[R, R], async_op=True)  # two gathers, of which the first is running
    if dist.get_rank() == 0:
        assert "in communication" in repr(later) and "in communication" in f"{later}"
        assert f"{known}" == "6.0" and f"{known:.3f}" == "6.000" and f"{known:>6}" == "   6.0"
        for t in (total, x, apart):  # what this rank does not know is shown as it is held
            assert f"{t}" == str(t) == repr(t) == "{}".format(t) == "%s" % t == f"{t!s}"  # noqa: UP031, UP032
            assert f"placements={t.placements}" in f"{t}" and repr(t.to_local()) in f"{t}"
            with pytest.raises(TypeError, match="item" if t.ndim == 0 else "unsupported format string"):
                f"{t:.3f}"
        with pytest.raises(DTensorError, match=r"placed \[Partial\(sum\), Replicate\(\)\]"):
            f"{total:.3f}"
    dist.barrier()
    assert repr(later.to_local()) in repr(later)
    assert f"{total.item():.3f}" == f"{float(total):.3f}" == "6.000"


def test_formatting_does_not_communicate() -> None:
    run_ranks(4, formatting)


def test_reading_equals_one_device() -> None:
    run_ranks(4, reading)


# ------------------------------------------------------------------ copies


def copies() -> None:
    for mesh, placements in everywhere((5, 4)):
        whole = torch.randn(5, 4)
        x = nn.Parameter(distribute_tensor(whole, mesh, placements))
        (x * 2).sum().backward()
        y = copy.deepcopy(x)
        assert isinstance(y, nn.Parameter) and y.placements == x.placements and y.to_local() is not x.to_local()
        equal(y, whole)
        equal(y.grad, torch.full((5, 4), 2.0))
        equal(pickle.loads(pickle.dumps(x)), whole)
        buffer = io.BytesIO()
        torch.save({"x": x}, buffer)
        loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)["x"]
        assert isinstance(loaded, nn.Parameter) and loaded.device_mesh == mesh
        equal(loaded, whole)
        equal(loaded + x, 2 * whole)
        assert [tuple(c.offsets) for c in x.__create_chunk_list__()] == [x._layout.box().offsets]
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x * 2)
    with pytest.raises(DTensorError, match="terms"):
        DTensor.from_local(torch.ones(2), line(), [P]).__create_chunk_list__()


def test_copies() -> None:
    run_ranks(4, copies)


# ------------------------------------------------------------------ refusals


def shapes_that_do_not_fit() -> None:
    """Also if ranks disagree on them, every rank raises before anything is sent, for which gloo would end processes."""
    mesh, size = line(), 1 if dist.get_rank() == 3 else 2  # the parts of 7 columns, of which 8 or 4 are assumed
    uneven = DTensor.from_local(torch.ones(3, size), mesh, [Shard(1)])
    weight, terms = (distribute_tensor(torch.ones(5, 7), mesh, [placement]) for placement in (Shard(1), P))
    bias, columns, short = (distribute_tensor(torch.ones(n), mesh, [R]) for n in (5, (3, 2), 6))
    whole = DTensor.from_local(torch.ones(3, size), mesh, [Shard(1)], shape=(3, 7))
    calls = [
        lambda x: F.linear(x, weight),
        lambda x: x @ weight.t(),
        lambda x: torch.addmm(bias, x, weight.t()),
        lambda x: torch.addmm(columns, whole, weight.t()),
        lambda x: F.linear(whole, weight, short),
        lambda x: torch.bmm(x.unsqueeze(0), weight.t().unsqueeze(0)),
        lambda x: x + weight[:3],
        lambda x: x.mul_(terms[:3]),
        lambda x: torch.cat([x, weight]),
        lambda x: torch.where(x > 0, x, terms[:3]),
    ]
    for call in calls:
        for x in (uneven, distribute_tensor(torch.ones(3, 9), mesh, [Shard(0)])):
            with CommDebugMode() as sent, pytest.raises(DTensorError, match="shape="):
                call(x)
            assert sent.get_total_counts() == 0
    equal(F.linear(whole, weight), torch.full((3, 5), 7.0))


def test_shapes_that_do_not_fit_raise_before_anything_is_sent() -> None:
    run_ranks(4, shapes_that_do_not_fit)


def refusals() -> None:
    mesh = line()
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    plain = torch.randn(4, 4)
    with pytest.raises(
        MixedTensorError, match=r"add: argument 1 is a plain Tensor of shape \(4, 4\).*distribute_tensor"
    ):
        x + plain
    with pytest.raises(MixedTensorError, match="argument 0"):
        plain + x
    with pytest.raises(MixedTensorError, match=r"argument 0\[1\]"):
        torch.cat([x, plain])
    with pytest.raises(MixedTensorError, match="equal: argument 1"):
        torch.equal(x, x.to_local())
    for access in (
        lambda: x.numpy(),
        lambda: x.data_ptr(),
        lambda: x.untyped_storage(),
        lambda: x.__dlpack__(),
        lambda: torch.from_dlpack(x),
        lambda: torch.utils.dlpack.to_dlpack(x),
        lambda: x.__array__(),
        lambda: x.resize_(2, 2),
        lambda: x.set_(torch.zeros(2)),
        lambda: x.share_memory_(),
    ):
        with pytest.raises(DTensorError, match="to_local"):
            access()
    with pytest.raises(RuntimeError, match="size of tensor"):
        x + distribute_tensor(torch.randn(3, 3), mesh, [R])


def test_what_has_no_meaning_is_refused() -> None:
    run_ranks(4, refusals)


def indices_out_of_bounds() -> None:
    mesh = line()
    table = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
    logits = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)])
    for wrong in (8, -1):
        indices = distribute_tensor(torch.tensor([0, 1, wrong, 3]), mesh, [R])
        with pytest.raises(IndexError, match="out of bounds"):
            nn.functional.embedding(indices, table)
        with pytest.raises(IndexError, match="out of bounds"):
            nn.functional.cross_entropy(logits, indices)
    ignored = distribute_tensor(torch.tensor([0, 1, -100, 3]), mesh, [R])
    assert nn.functional.cross_entropy(logits, ignored).isfinite()
    few = torch.randn(3, 2)  # some rank has no row
    for placement in (R, Shard(0), Shard(1)):
        with pytest.raises(IndexError, match="out of bounds"):
            distribute_tensor(few, mesh, [placement])[[0, 5]]
        nothing = distribute_tensor(few[:, :0], mesh, [placement])[[0, 5]]  # of which PyTorch looks at none
        assert nothing.shape == few[:, :0][[0, 5]].shape
        assert distribute_tensor(few, mesh, [placement])[[0, 5], 0:0].shape == few[[0, 5], 0:0].shape


@pytest.mark.cpu_only("an accelerator finds out later")
def test_indices_that_no_rank_owns_are_refused() -> None:
    run_ranks(4, indices_out_of_bounds)


# ------------------------------------------------------------------ many threads, many shapes


def many_threads() -> None:
    mesh = init_device_mesh(device_type(), (1,))
    failures: list[object] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(8, 8, generator=generator)
        for n in range(2, 40):
            rows = torch.full((n, 8), 0.1 * seed)
            w = distribute_tensor(weight, mesh, [R]).requires_grad_()
            x = distribute_tensor(rows, mesh, [Shard(0)])
            (x @ w).relu().softmax(-1)[:, 0].sum().backward()
            plain = weight.clone().requires_grad_()
            (rows @ plain).relu().softmax(-1)[:, 0].sum().backward()
            if not torch.allclose(w.grad.full_tensor(), plain.grad, atol=1e-6):
                failures.append((seed, n))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_threads_share_the_plans() -> None:
    run_ranks(1, many_threads)


def kinds_of_numbers() -> None:
    """What Python takes for equal and PyTorch does not has keys of its own."""
    x = distribute_tensor(torch.ones(2, 2), init_device_mesh(device_type(), (1,)), [Replicate()])
    numbers = [0, 0.0, -0.0, False, 0j, complex(0, -0.0)]
    numbers += [np.float64(0), np.float64(-0.0), np.float32(-0.0), np.int64(0)]
    found = {key_of_call(F.pad, (x, (1, 1)), {"value": number}) for number in numbers}
    assert len(found) == len(numbers)


def test_numbers_that_python_takes_for_equal_have_other_routes() -> None:
    run_ranks(1, kinds_of_numbers)


def many_shapes() -> None:
    mesh = init_device_mesh(device_type(), (1,))
    limit, keys.ROUTE_LIMIT = keys.ROUTE_LIMIT, 64
    try:
        for n in range(1, 200):
            equal(zeros(n, device_mesh=mesh) + 1, torch.ones(n))
        assert len(keys.routes) <= 64
    finally:
        keys.ROUTE_LIMIT = limit


def test_changing_shapes_do_not_grow_the_plans() -> None:
    run_ranks(1, many_shapes)


def shapes_in_turn() -> None:
    """Shapes that are used now and then stay while others come and go."""
    mesh = init_device_mesh(device_type(), (1,))
    often = zeros(3, 5, device_mesh=mesh)
    keys.forget()
    limit, keys.ROUTE_LIMIT = keys.ROUTE_LIMIT, 64
    try:
        often.sum(1)
        (route,) = [route for key, route in keys.routes.items() if key[0] is torch.Tensor.sum]
        for n in range(1, 500):
            zeros(n, device_mesh=mesh).sum(0)
            if n % 40 == 0:
                equal(often.sum(1), torch.zeros(3))
            assert len(keys.routes) + len(keys._earlier) <= 2 * 64
        kept = [*keys.routes.values(), *keys._earlier.values()]
        assert route in kept
    finally:
        keys.ROUTE_LIMIT = limit


def test_plans_that_are_used_are_not_forgotten() -> None:
    run_ranks(1, shapes_in_turn)


def with_items(x: Any, index: Any, value: Any) -> Any:
    x[index] = value
    return x


def many_numbers() -> None:
    mesh = line()
    whole = torch.arange(-8, 16.0).view(8, 3)
    numbers = [1, 2, 0, -1, 2**40, np.int64(3), np.float32(0.5), 0]
    functions: list[Callable[[Any, Any], Any]] = [
        lambda x, n: x * n,
        lambda x, n: n * x,
        lambda x, n: n - x,
        lambda x, n: x / (n or 5),
        lambda x, n: x // (n or 5),
        lambda x, n: x % (n or 5),
        lambda x, n: x**n,
        lambda x, n: x > n,
        lambda x, n: torch.add(x, n, alpha=3),
        lambda x, n: torch.sub(x, x + 1, alpha=int(n)),
        lambda x, n: torch.clamp(x, -2, n),
        lambda x, n: torch.clamp(x, min=n),
        lambda x, n: torch.where(x > 0, x, n),
        lambda x, n: x.clone().add_(n).mul_(n),
        lambda x, n: x.clone().fill_(n),
        lambda x, n: x.masked_fill(x > 1, n),
        lambda x, n: x.sum(int(n) % 2),
        lambda x, n: x.roll(int(n) % 5, 0),
        lambda x, n: torch.full_like(x, n),
        lambda x, n: torch.nn.functional.threshold(x, n, 1),
        lambda x, n: torch.nn.functional.pad(x, (abs(int(n)) % 3, 1)),
        lambda x, n: with_items(x.clone(), 0, n),
        lambda x, n: with_items(x.clone(), (slice(2, 4), int(n) % 3), n),
        lambda x, n: with_items(x.clone(), x > 1, n),
        lambda x, n: torch.addmm(x, x, x[:3], beta=int(n) % 3, alpha=int(n) % 2),
        lambda x, n: torch.nn.functional.smooth_l1_loss(x * 1.0, x + 3.0, beta=abs(int(n)) % 5),
    ]
    for placements in ([Shard(0)], [Replicate()], [Partial()]):
        for dtype in (torch.float32, torch.int64):
            plain = whole.to(dtype)
            x = distribute_tensor(plain, mesh, [Replicate() if placements[0].is_partial() else placements[0]])
            if placements[0].is_partial():
                x = x.redistribute(placements=placements)
            for f in functions:
                for n in numbers:
                    try:
                        expected = f(plain, n)
                    except (RuntimeError, TypeError) as error:
                        with pytest.raises(type(error)):
                            f(x, n)
                    else:
                        given = f(x, n)
                        assert given.dtype == expected.dtype
                        torch.testing.assert_close(given.full_tensor(), expected, equal_nan=True)


def test_changing_numbers_give_what_they_give_on_one_device() -> None:
    run_ranks(4, many_numbers)


def routes_of_numbers() -> None:
    mesh = line()
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    written, mask, square = x.clone(), x > 0, distribute_tensor(torch.eye(2), mesh)
    functions: list[Callable[[int], Any]] = [
        lambda n: x * n,
        lambda n: n - x,
        lambda n: x // n,
        lambda n: torch.add(x, n, alpha=n),
        lambda n: torch.clamp(x, 0, n),
        lambda n: torch.full_like(x, n),
        lambda n: x * np.float32(n),
        lambda n: written.fill_(n),
        lambda n: written.zero_().uniform_(0, n),
        lambda n: written.normal_(n, n),
        lambda n: with_items(written, 0, n),
        lambda n: with_items(written, (slice(1, 3), 1), n / 7),
        lambda n: with_items(written, mask, n),
        lambda n: torch.addmm(x, x, square, beta=n, alpha=n),
        lambda n: torch.nn.functional.huber_loss(x, written, delta=n),
        lambda n: torch.nn.functional.glu(x).prelu(square[0, :1] * n),
        lambda n: torch.nn.functional.feature_alpha_dropout(x, n / 200),
    ]
    for f in functions:
        f(2), f(3)
        before = len(keys.routes)
        for n in range(4, 200):
            f(n)
        assert len(keys.routes) == before


def test_numbers_do_not_grow_the_plans_of_what_they_do_not_change() -> None:
    run_ranks(4, routes_of_numbers)


# ------------------------------------------------------------------ modules


def modules() -> None:
    mesh = line()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[2].weight = nn.Parameter(model[0].weight.detach().clone())
    plain = copy.deepcopy(model)
    inputs = torch.randn(8, 4)

    def shard_first(name, module, mesh):
        if name == "0":
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))

    plain[2] = nn.Linear(8, 4)
    model[2] = copy.deepcopy(plain[2])
    distribute_module(
        model,
        mesh,
        shard_first,
        input_fn=lambda module, args, mesh: tuple(distribute_tensor(a, mesh, [Shard(0)]) for a in args),
        output_fn=lambda module, output, mesh: output.full_tensor(),
    )
    assert model[0].weight.placements == (Shard(0),) and model[0].bias.placements == (R,)
    assert all(isinstance(b, DTensor) for b in model.buffers())
    result, expected = model(inputs), plain(inputs)
    torch.testing.assert_close(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5)


def test_distribute_module() -> None:
    run_ranks(4, modules)
