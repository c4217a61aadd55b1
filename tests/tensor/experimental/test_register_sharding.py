"""Users' sharding rules: for operators of ATen and of torch.library, over our own rules, with gradients."""

import importlib

import pytest
import torch

import terrazzo
from ranks import run_ranks
from terrazzo.errors import DTensorError
from terrazzo.layout.placement import _StridedShard
from terrazzo.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.experimental import register_sharding, register_single_dim_strategy, unregister_sharding

aten = torch.ops.aten


def check_softmax():
    """The example of the reference, as written."""
    asked = []

    @register_sharding(aten._softmax.default)
    def custom_softmax_sharding(x, dim, half_to_float):
        asked.append(dim)
        softmax_dim = dim if dim >= 0 else dim + x.ndim
        acceptable_shardings = []

        all_replicate = ([Replicate()], [Replicate(), None, None])
        acceptable_shardings.append(all_replicate)

        for sharding_dim in range(x.ndim):
            if sharding_dim != softmax_dim:
                all_sharded = (
                    [Shard(sharding_dim)],
                    [Shard(sharding_dim), None, None],
                )
                acceptable_shardings.append(all_sharded)

        return acceptable_shardings

    try:
        mesh = init_device_mesh("cpu", (4,))
        whole = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
        weight = torch.linspace(-1, 1, 30).view(5, 6)
        for placement in (Shard(0), Shard(1), Replicate()):
            for dim in (-1, 0):
                for function in (torch.softmax, torch.nn.functional.softmax):
                    plain = whole.clone().requires_grad_()
                    expected = function(plain, dim)
                    (expected * weight).sum().backward()
                    x = distribute_tensor(whole, mesh, [placement]).requires_grad_()
                    result = function(x, dim)
                    # An all-to-all is cheaper than a gather.
                    kept = placement if placement != Shard(dim % 2) else Shard(1 - dim % 2)
                    assert result.placements == (kept,), (placement, dim, result.placements)
                    (result * distribute_tensor(weight, mesh, result.placements)).sum().backward()
                    torch.testing.assert_close(result.full_tensor(), expected)
                    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        assert asked
        count = len(asked)
        with CommDebugMode() as mode:
            torch.softmax(distribute_tensor(whole, mesh, [Shard(0)]), -1)
        assert mode.get_comm_counts()["all_gather"] == 0 and len(asked) == count  # the plan is kept
    finally:
        unregister_sharding(aten._softmax.default)
    torch.softmax(distribute_tensor(whole, mesh, [Shard(0)]), -1)
    assert len(asked) == count


def define_operators():
    library = torch.library.Library("terrazzo_tests", "FRAGMENT")
    library.define("scaled_add(Tensor x, Tensor[] others, float scale) -> Tensor")
    library.impl("scaled_add", lambda x, others, scale: x + scale * sum(others), "CompositeExplicitAutograd")
    library.define("row_sum(Tensor x) -> (Tensor, int)")
    library.impl("row_sum", lambda x: (x.sum(0), x.shape[1]), "CompositeExplicitAutograd")
    library.define("shapeless(Tensor x) -> Tensor")
    library.impl("shapeless", lambda x: x.clone(), "CPU")
    return library


def check_custom_operators():
    library = define_operators()
    operators = torch.ops.terrazzo_tests
    torch.library.register_autograd(
        "terrazzo_tests::scaled_add",
        lambda ctx, grad: (grad, [ctx.scale * grad] * 2, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[2]),
        lib=library,
    )

    @register_sharding([operators.scaled_add.default])
    def scaled_add(x, others, scale):
        assert scale == 0.5 and len(others) == 2
        return [
            ([Replicate()], [Replicate(), Replicate(), Replicate(), None]),
            *(([Shard(d)], [Shard(d), Shard(d), Shard(d), None]) for d in range(x.ndim)),
        ]

    @register_sharding(operators.row_sum.default)
    def row_sum(x):
        return [([Replicate(), None], [Replicate()]), ([Partial(), None], [Shard(0)]), ([Shard(0), None], [Shard(1)])]

    @register_sharding(operators.shapeless.default)
    def shapeless(x):
        return [([Replicate()], [Replicate()])]

    try:
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(20.0).view(5, 4)
        placements = [Shard(0), Shard(1)]
        x = distribute_tensor(whole, mesh, placements).requires_grad_()
        others = [distribute_tensor(whole, mesh, p).requires_grad_() for p in (placements, [Replicate(), Replicate()])]
        for operator in (operators.scaled_add, operators.scaled_add.default):
            with CommDebugMode() as mode:
                y = operator(x, others, 0.5)
            assert y.placements == tuple(placements) and mode.get_total_counts() == 0
            torch.testing.assert_close(y.full_tensor(), 2 * whole)
        y.sum().backward()
        assert x.grad.full_tensor().unique().tolist() == [1.0]
        assert [o.grad.full_tensor().unique().tolist() for o in others] == [[0.5], [0.5]]
        total, columns = operators.row_sum(x.detach())
        assert total.placements == (Partial(), Shard(0)) and columns in (2, 4)
        torch.testing.assert_close(total.full_tensor(), whole.sum(0))
        with pytest.raises(DTensorError, match="register_fake"):
            operators.shapeless(x)

        @register_sharding(operators.row_sum.default)
        def wrong(x):
            return [([Replicate(), None], [Replicate(), Replicate()])]

        with pytest.raises(DTensorError, match="2 inputs and 1 outputs"):
            operators.row_sum(x)
    finally:
        unregister_sharding([operators.scaled_add.default, operators.row_sum.default, operators.shapeless.default])
        library._destroy()


def test_softmax():
    run_ranks(4, check_softmax)


def test_custom_operators():
    run_ranks(4, check_custom_operators)


def test_what_can_be_registered():
    with pytest.raises(DTensorError, match="pass an overload"):
        register_sharding(aten.relu)
    with pytest.raises(DTensorError, match="functional form"):
        register_sharding(aten.relu_.default)


def check_strategies_of_one_mesh_dim():
    """Functions for PyTorch's `register_single_dim_strategy`, also PyTorch's own, are taken as they are."""
    terrazzo.install()
    try:
        single = importlib.import_module("torch.distributed.tensor._ops.single_dim_strategy")
        assert single.register_single_dim_strategy is register_single_dim_strategy
        with torch.library._scoped_library("single", "FRAGMENT") as library:
            library.define("halves(Tensor x, Tensor w, int k) -> (Tensor, Tensor)")
            library.impl("halves", lambda x, w, k: (x * w + k, (x * w).sum(1)), "CompositeExplicitAutograd")
            op, seen = torch.ops.single.halves.default, []

            @single.register_single_dim_strategy(op, allow_uneven_sharding=True)
            def strategy(op, args, kwargs):
                seen.append((op, args, kwargs))
                cut, total = single._ShardingPlaceholder, Partial("sum")
                return [[cut(0), cut(0), cut(0), Replicate()], [cut(1), total, cut(1), cut(0)]]

            mesh = init_device_mesh("cpu", (2, 2))
            x, w = torch.randn(5, 8), torch.randn(8)
            expected, everywhere = op(x, w, 3), distribute_tensor(w, mesh)
            for placements, found in (
                ((Shard(0), Shard(1)), [(Shard(0), Shard(1)), (Shard(0), Partial("sum"))]),
                ((Replicate(), Shard(0)), [(Replicate(), Shard(0)), (Replicate(), Shard(0))]),
                ((Replicate(), _StridedShard(1, split_factor=2)), None),
            ):
                given = distribute_tensor(x, mesh, placements)
                with CommDebugMode() as mode:
                    results = op(given, everywhere, 3)
                if found is not None:
                    assert [result.placements for result in results] == found
                else:  # the same kind of sharding goes through
                    assert results[0].placements == placements
                assert not mode.get_total_counts()
                for result, whole in zip(results, expected, strict=True):
                    torch.testing.assert_close(result.full_tensor(), whole)
            assert seen[0][0] is op and seen[0][1][0].shape == x.shape and seen[0][1][2] == 3
            unregister_sharding(op)
        # PyTorch's own function for a product, in place of our rule.
        rules = importlib.import_module("torch.distributed.tensor._ops._matrix_ops")
        register_single_dim_strategy(aten.mm.default)(rules.mm_single_dim_strategy)
        a, b = distribute_tensor(x, mesh, [Shard(0), Shard(1)]), distribute_tensor(x.T, mesh, [Replicate(), Shard(0)])
        product = aten.mm.default(a, b)
        assert product.placements == (Shard(0), Partial("sum"))
        torch.testing.assert_close(product.full_tensor(), x @ x.T)
        with pytest.raises(DTensorError, match="different_mesh_args"):
            register_single_dim_strategy(aten.mm.default, different_mesh_args=[0])
    finally:
        unregister_sharding(aten.mm.default)
        terrazzo.uninstall()


def test_strategies_of_one_mesh_dim():
    run_ranks(4, check_strategies_of_one_mesh_dim)
