"""`local_map` and `implicit_replication`: the reference's example, what is refused, gradients against one device."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from ranks import run_ranks
from terrazzo.comm import axis_of
from terrazzo.comm.differentiable import reduce_replicate
from terrazzo.errors import MixedTensorError
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.experimental import implicit_replication, local_map


def check_reference_example():
    device_mesh = init_device_mesh("cpu", (4,))

    def mm_allreduce_forward(device_mesh, W, X):
        partial_sum_tensor = torch.mm(W, X)
        reduced_tensor = funcol.all_reduce(partial_sum_tensor, "sum", device_mesh)
        return reduced_tensor

    W = torch.randn(12, 8, requires_grad=False)
    X = torch.randn(8, 16, requires_grad=False)
    dist.broadcast(W, 0), dist.broadcast(X, 0)
    Y = torch.mm(W, X)
    row_wise = [Shard(0)]  # row-wise sharding placements on 1-d mesh
    col_wise = [Shard(1)]  # col-wise sharding placements on 1-d mesh

    # local_mm_allreduce_forward is the function wrapped with DTensor/Tensor convertion
    local_mm_allreduce_forward = local_map(
        mm_allreduce_forward,
        out_placements=[Replicate()],
        in_placements=[col_wise, row_wise],
        device_mesh=device_mesh,
    )

    W_dt = distribute_tensor(W, device_mesh, (col_wise))  # col-wisely sharded W tensor
    X_dt = distribute_tensor(X, device_mesh, (row_wise))  # row-wisely sharded X tensor
    Y_dt = local_mm_allreduce_forward(device_mesh, W_dt, X_dt)  # apply local_mm_allreduce_forward to DTensors

    assert type(Y_dt) is DTensor and Y_dt.placements == (Replicate(),)
    torch.testing.assert_close(Y_dt.to_local(), Y)
    torch.testing.assert_close(Y_dt.full_tensor(), Y)
    full_form = local_map(mm_allreduce_forward, [Replicate()], (None, col_wise, row_wise))
    torch.testing.assert_close(full_form(device_mesh, W_dt, X_dt).to_local(), Y)
    assert mm_allreduce_forward.__name__ == full_form.__name__


def check_redistribution_and_errors():
    mesh = init_device_mesh("cpu", (2,))
    other = init_device_mesh("cpu", (1, 2))
    x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    double = local_map(lambda t: t * 2, [Shard(1)], ([Shard(1)],))
    with pytest.raises(ValueError, match="redistribute_inputs=True"):
        double(x)
    moved = local_map(lambda t: t * 2, [Shard(1)], ([Shard(1)],), redistribute_inputs=True)(x)
    assert moved.placements == (Shard(1),) and torch.equal(moved.full_tensor(), x.full_tensor() * 2)
    on_other = distribute_tensor(torch.ones(4, 2), other, [Replicate(), Replicate()])
    with pytest.raises(AssertionError, match="mesh"):
        local_map(torch.add, [Shard(0)])(x, on_other)
    with pytest.raises(AssertionError, match="mesh"):
        local_map(torch.neg, [Shard(0)], device_mesh=other)(x)
    with pytest.raises(AssertionError, match="must have None"):
        local_map(lambda t: t.shape[0], [Shard(0)])(x)
    with pytest.raises(AssertionError, match="out_placements has None"):
        local_map(lambda t: t, None)(x)
    with pytest.raises(AssertionError, match="returned 2 values"):
        local_map(lambda t: (t, t), [Shard(0)])(x)
    with pytest.raises(AssertionError, match="not a tensor"):
        local_map(lambda t, n: t, [Shard(0)], ([Shard(0)], [Shard(0)]))(x, 3)
    with pytest.raises(AssertionError, match="None for it"):
        local_map(lambda t, n: t, [Shard(0)], (None, None))(x, 3)
    with pytest.raises(AssertionError, match="3 in_placements"):
        local_map(lambda t, n: t, [Shard(0)], (None, None, None))(x, 3)
    with pytest.raises(AssertionError, match="returned a DTensor"):
        local_map(lambda t: x, [Shard(0)])(x)
    with pytest.raises(NotImplementedError, match="in_grad_placements"):
        local_map(torch.neg, [Shard(0)], spmd_types=True)
    # Without any DTensor it is the function itself; plain tensors among DTensors are handed through.
    assert local_map(lambda a, b: a + b, [Shard(0)], ([Shard(0)], None))(2, 3) == 5
    assert type(local_map(torch.neg, [Shard(0)])(torch.ones(2))) is torch.Tensor
    plain = torch.full((2, 2), float(dist.get_rank()))
    mixed = local_map(torch.add, [Shard(0)], ([Shard(0)], [Shard(0)]))(x, plain)
    assert mixed.full_tensor()[:, 0].tolist() == [0.0, 2.0, 5.0, 7.0]
    several = local_map(lambda t, *, scale: {"n": t.shape[0], "t": t * scale}, (None, (Shard(0),)))(x, scale=3)
    assert several["n"] == 2 and torch.equal(several["t"].full_tensor(), x.full_tensor() * 3)


def check_uneven():
    mesh = init_device_mesh("cpu", (2, 2))
    for shape in ((5, 3), (1, 6), (8, 4)):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).requires_grad_()
        y = local_map(lambda t: t.unsqueeze(0) * 2, [Shard(1), Shard(-1)])(x)
        assert y.shape == (1, *shape) and torch.equal(y.full_tensor(), 2 * whole.unsqueeze(0))
        row_sums = local_map(lambda t: t.sum(1), [Shard(0), Partial()])(x)
        torch.testing.assert_close(row_sums.full_tensor(), whole.sum(1))
        (y * y).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 8 * whole)


def check_gradients():
    mesh = init_device_mesh("cpu", (4,))
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(6, 8, generator=generator), torch.randn(8, 5, generator=generator)
    xr, wr = x.clone().requires_grad_(), w.clone().requires_grad_()
    (xr @ wr).square().sum().backward()
    # Replicated weights meet sharded rows: each rank has a term of the gradient.
    xd = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    wd = distribute_tensor(w, mesh).requires_grad_()
    local_map(lambda a, b: (a @ b).square(), [Shard(0)])(xd, wd).sum().backward()
    torch.testing.assert_close(xd.grad.full_tensor(), xr.grad)
    torch.testing.assert_close(wd.grad.full_tensor(), wr.grad)
    # The function reduces by itself, with a typed collective.
    xd = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    wd = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
    product = local_map(lambda a, b: reduce_replicate(a @ b, axis_of(mesh, 0)), [Replicate()])(xd, wd)
    product.square().sum().backward()
    torch.testing.assert_close(xd.grad.full_tensor(), xr.grad)
    torch.testing.assert_close(wd.grad.full_tensor(), wr.grad)
    # Partial results, and gradients that the function has already summed.
    pd = distribute_tensor(w, mesh).requires_grad_()
    terms = local_map(lambda b: b / 4, [Partial()])(pd)
    terms.full_tensor().sum().backward()
    torch.testing.assert_close(pd.grad.full_tensor(), torch.ones_like(w))
    pd = distribute_tensor(w, mesh).requires_grad_()
    same = local_map(lambda b: b * 1, [Shard(0)], in_grad_placements=([Replicate()],))(pd)
    same.sum().backward()
    assert pd.grad.to_local().unique().tolist() == [1.0] and same.shape == (32, 5)


def check_implicit_replication():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).requires_grad_()
    plain = torch.arange(3.0).requires_grad_()
    with pytest.raises(MixedTensorError, match="implicit_replication"):
        x + plain
    with implicit_replication():
        y = x * plain
        with pytest.raises(ZeroDivisionError), implicit_replication():
            raise ZeroDivisionError
        x + plain
    assert y.placements == (Shard(0),)
    y.sum().backward()
    assert x.grad.full_tensor()[0].tolist() == [0.0, 1.0, 2.0] and plain.grad.tolist() == [4.0] * 3
    with pytest.raises(MixedTensorError):
        x + plain


def test_reference_example():
    run_ranks(4, check_reference_example)


def test_redistribution_and_errors():
    run_ranks(2, check_redistribution_and_errors)


def test_uneven():
    run_ranks(4, check_uneven)


def test_gradients():
    run_ranks(4, check_gradients)


def test_implicit_replication():
    run_ranks(2, check_implicit_replication)
