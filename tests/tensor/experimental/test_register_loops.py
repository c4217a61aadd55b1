"""Operations of users: loops in a sentence, decompositions, and the check that compares a rule with one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ranks import run_ranks
from terrazzo.errors import DTensorArgumentError, DTensorError
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.experimental import register_decomposition, register_loops, register_sharding, unregister_sharding
from terrazzo.testing import check_rule


def define() -> Any:
    library = torch.library.Library("terrazzo_loops", "FRAGMENT")
    library.define("gated(Tensor x, Tensor gate) -> Tensor")
    library.impl("gated", lambda x, gate: x * gate.sigmoid(), "CompositeImplicitAutograd")
    library.define("moments(Tensor x, float scale) -> (Tensor, Tensor)")
    library.impl("moments", lambda x, s: (x.sum(-1) * s, x.amax(-1)), "CompositeExplicitAutograd")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.define("picky(Tensor x) -> Tensor")
    library.impl("picky", picky, "CompositeImplicitAutograd")
    return library


def picky(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float64 and not x.numel():
        raise RuntimeError("no empty tensors of float64")
    return x * 2


def empty_shards_of_some_types() -> None:
    """One rank has no row, and the function takes such a tensor of one dtype alone."""
    library = define()
    op = torch.ops.terrazzo_loops.picky.default
    mesh = init_device_mesh("cpu", (2,))
    try:
        for dtypes in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
            register_loops(op, "mk -> mk")
            for dtype in (*dtypes, *dtypes):
                out = op(distribute_tensor(torch.ones(1, 3, dtype=dtype), mesh, [Shard(0)]))
                assert out.full_tensor().tolist() == [[2.0] * 3]
                assert (out.placements == (Shard(0),)) == (dtype == torch.float32)
            unregister_sharding([op])
    finally:
        library._destroy()


def sentences() -> None:
    library = define()
    ops = torch.ops.terrazzo_loops
    mesh = init_device_mesh("cpu", (2,))
    x, gate = torch.randn(4, 6), torch.randn(4, 6)
    try:
        register_loops(ops.gated.default, "...f, ...f -> ...f", linear=[(0,)])
        check_rule(ops.gated.default, x, gate)
        check_rule(ops.gated.default, x, gate[:1], missing_ok=True)
        for placement in (Shard(0), Shard(1), Replicate()):
            mine, own = (distribute_tensor(t, mesh, [placement]).requires_grad_() for t in (x, gate))
            plain, plain_gate = x.clone().requires_grad_(), gate.clone().requires_grad_()
            with CommDebugMode() as seen:
                out = ops.gated(mine, own)
                out.sum().backward()
            assert out.placements == (placement,) and seen.get_total_counts() == 0
            expected = plain * plain_gate.sigmoid()
            expected.sum().backward()
            torch.testing.assert_close(out.full_tensor(), expected)
            torch.testing.assert_close(mine.grad.full_tensor(), plain.grad)
            torch.testing.assert_close(own.grad.full_tensor(), plain_gate.grad)
        # Two results, of which a loop is summed in one alone, so that it stays whole.
        register_loops(ops.moments.default, "mk -> m, m", whole="k")
        check_rule(ops.moments.default, x, 2.0, missing_ok=True)
        out = ops.moments(distribute_tensor(x, mesh, [Shard(1)]), 2.0)
        torch.testing.assert_close(tuple(t.full_tensor() for t in out), (x.sum(-1) * 2, x.amax(-1)))
        assert all(t.placements == (Shard(0),) for t in ops.moments(distribute_tensor(x, mesh, [Shard(0)]), 2.0))
        with pytest.raises(AssertionError, match=r"missing: S\(1\) -> P\(sum\) P\(max\)"):
            check_rule(ops.moments.default, x, 2.0)
        # Sizes that do not fit the sentence are replicated.
        odd = torch.randn(2, 4, 6)
        out = ops.moments(distribute_tensor(odd, mesh, [Shard(0)]), 1.0)
        torch.testing.assert_close(out[0].full_tensor(), odd.sum(-1))
        for text, said in (("mk -> m", "returns 2 tensors"), ("mk -> mk, m", r"2 dims with the sizes \[4\]")):
            register_loops(ops.moments.default, text, whole="k")
            with pytest.raises(DTensorError, match=said):
                ops.moments(distribute_tensor(x, mesh, [Shard(0)]), 1.0)
        with pytest.raises(DTensorError, match="register a fake implementation"):
            register_loops(ops.twice.default, "m -> m")
            ops.twice(distribute_tensor(x[0], mesh, [Shard(0)]))
    finally:
        for op in (ops.gated.default, ops.moments.default, ops.twice.default):
            unregister_sharding(op)
    del library


def whole_functions() -> None:
    """A function of PyTorch's under a rule of one's own, and a decomposition; ours are back afterwards."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(4, 6)
    seen: list[Any] = []
    try:
        register_loops(F.silu, "mk -> mk", whole="k")
        out = F.silu(distribute_tensor(x, mesh, [Shard(1)]))
        assert out.placements != (Shard(1),)
        torch.testing.assert_close(out.full_tensor(), F.silu(x))

        @register_decomposition(torch.ops.aten.gelu.default)
        def gelu(x: Any, *, approximate: str = "none") -> Any:
            seen.append(type(x))
            return x * 0.5 * (1 + torch.erf(x / 2**0.5))

        out = F.gelu(distribute_tensor(x, mesh, [Shard(1)]))
        assert seen == [DTensor] and out.placements == (Shard(1),)
        torch.testing.assert_close(out.full_tensor(), F.gelu(x))
        with pytest.raises(DTensorArgumentError, match="decomposition and no rule"):
            check_rule(torch.ops.aten.gelu.default, x)
    finally:
        unregister_sharding([F.silu, torch.ops.aten.gelu.default])
    assert F.silu(distribute_tensor(x, mesh, [Shard(1)])).placements == (Shard(1),)
    F.gelu(distribute_tensor(x, mesh, [Shard(1)]))
    assert len(seen) == 1


def test_loops_of_custom_operators():
    run_ranks(2, sentences)


def test_whether_a_function_takes_empty_shards_depends_on_their_dtype():
    run_ranks(2, empty_shards_of_some_types)


def test_whole_functions_and_decompositions():
    run_ranks(2, whole_functions)


def test_a_wrong_and_a_missing_loop_are_found():
    x = torch.randn(4, 6)
    library = torch.library.Library("terrazzo_wrong", "FRAGMENT")
    library.define("centred(Tensor x) -> Tensor")
    library.impl("centred", lambda x: x - x.mean(1, keepdim=True), "CompositeExplicitAutograd")
    op = torch.ops.terrazzo_wrong.centred.default
    try:
        register_loops(op, "mk -> mk", linear="each")
        with pytest.raises(AssertionError, match=r"wrong: S\(1\) -> S\(1\)") as info:
            check_rule(op, x)
        assert "missing" not in str(info.value)
        register_loops(op, "mk -> mk", whole="mk")
        with pytest.raises(AssertionError, match=r"missing: P\(sum\) -> P\(sum\)\n  missing: S\(0\) -> S\(0\)"):
            check_rule(op, x)
        register_loops(op, "mk -> mk", whole="k", linear="each")
        report = check_rule(op, x)
        assert set(report.right) == {"R -> R", "S(0) -> S(0)", "P(sum) -> P(sum)"}
        with pytest.raises(AssertionError, match=r"does not fit tensors of shape \(2, 4, 6\): they would"):
            check_rule(op, torch.randn(2, 4, 6), missing_ok=True)
        with pytest.raises(DTensorError, match=r"has operands 0 to 0, but linear=\[\(0, 3\)\] names others"):
            register_loops(op, "mk -> mk", linear=[(0, 3)])
        for said, pairs in (
            (r"wrong: S\(0\) -> S\(1\), whose parts", [([Shard(1)], [Shard(0)])]),
            ("must return pairs of lists, .* it returned None", None),
            ("must return pairs of lists, .* it returned", [(Shard(0), Shard(0))]),
            ("must return pairs of lists, .* it returned", [[Shard(0)], [Shard(0)]]),
        ):
            register_sharding(op)(lambda x, pairs=pairs: pairs)
            with pytest.raises((AssertionError, DTensorError), match=said):
                check_rule(op, x)
    finally:
        unregister_sharding(op)
    with pytest.raises(AssertionError, match="terrazzo_wrong::centred has no rule .replicate.: register_loops"):
        check_rule(op, x)


def test_parts_that_an_operation_refuses_are_wrong():
    @torch.library.custom_op("terrazzo_wrong::scaled", mutates_args=())
    def scaled(x: torch.Tensor, w: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return scale * (x @ w)

    scaled.register_fake(lambda x, w, *, scale=1.0: x.new_empty(len(x), w.shape[1]))
    with pytest.raises(DTensorError, match=r"CustomOpDef.*: pass an overload, one of \['default'\]"):
        register_loops(scaled, "mk, kn -> mn", sums="k")
    op = torch.ops.terrazzo_wrong.scaled.default
    register_sharding(op)(lambda x, w, *, scale=1.0: [([Shard(1)], [Shard(1), Replicate()])])
    try:
        with pytest.raises(AssertionError, match=r"wrong: S\(1\) R -> S\(1\), of whose parts .*cannot be multiplied"):
            check_rule(op, torch.randn(4, 6), torch.randn(6, 8), scale=2.0)
    finally:
        unregister_sharding(op)


# Functions of PyTorch's with the rules that terrazzo has for them, and how they are called.
OURS = {
    "mm": lambda: check_rule(torch.mm, torch.randn(4, 6), torch.randn(6, 5)),
    "bmm": lambda: check_rule(torch.bmm, torch.randn(4, 5, 6), torch.randn(4, 6, 3)),
    "matmul": lambda: check_rule(torch.matmul, torch.randn(3, 1, 5, 6), torch.randn(4, 6, 3)),
    "matmul of a vector": lambda: check_rule(torch.matmul, torch.randn(4, 5, 6), torch.randn(6)),
    "vector by matrices": lambda: check_rule(torch.matmul, torch.randn(6), torch.randn(4, 6, 5)),
    "dot": lambda: check_rule(torch.dot, torch.randn(6), torch.randn(6)),
    "outer": lambda: check_rule(torch.outer, torch.randn(6), torch.randn(5)),
    "mv": lambda: check_rule(torch.mv, torch.randn(4, 6), torch.randn(6)),
    "linear": lambda: check_rule(F.linear, torch.randn(2, 4, 6), torch.randn(5, 6)),
    "linear with a bias": lambda: check_rule(F.linear, torch.randn(4, 6), torch.randn(5, 6), torch.randn(5)),
    "addmm": lambda: check_rule(torch.addmm, torch.randn(5), torch.randn(4, 6), torch.randn(6, 5)),
    "addbmm": lambda: check_rule(torch.addbmm, torch.randn(5, 3), torch.randn(4, 5, 6), torch.randn(4, 6, 3)),
    "baddbmm": lambda: check_rule(torch.baddbmm, torch.randn(4, 5, 3), torch.randn(4, 5, 6), torch.randn(4, 6, 3)),
    "addr": lambda: check_rule(torch.addr, torch.randn(5, 3), torch.randn(5), torch.randn(3)),
    "einsum": lambda: check_rule(torch.einsum, "bij,bkj->bik", torch.randn(4, 5, 6), torch.randn(4, 3, 6)),
    "add": lambda: check_rule(torch.add, torch.randn(4, 6), torch.randn(4, 6)),
    "mul": lambda: check_rule(torch.mul, torch.randn(4, 6), torch.randn(6)),
    "softmax": lambda: check_rule(torch.softmax, torch.randn(4, 6), 1, missing_ok=True),
    "flip": lambda: check_rule(torch.flip, torch.randn(4, 6), [1]),
    "cdist": lambda: check_rule(torch.cdist, torch.randn(3, 4, 6), torch.randn(3, 5, 6)),
    "sdpa": lambda: check_rule(
        F.scaled_dot_product_attention, *[torch.randn(3, 2, 5, 4) for _ in range(3)], missing_ok=True
    ),
    "layer_norm": lambda: check_rule(F.layer_norm, torch.randn(4, 5, 6), (6,), missing_ok=True),
    "fft": lambda: check_rule(torch.fft.fft, torch.randn(4, 6)),
    "vander": lambda: check_rule(torch.vander, torch.randn(6), missing_ok=True),
    "solve": lambda: check_rule(torch.linalg.solve, torch.randn(3, 4, 4), torch.randn(3, 4, 2), missing_ok=True),
    "transpose": lambda: check_rule(torch.transpose, torch.randn(4, 5, 6), 0, 2),
}


@pytest.mark.parametrize("name", OURS)
def test_rules_of_our_own_are_right_and_complete(name):
    torch.manual_seed(0)
    assert OURS[name]().right


def test_sentences_that_say_nothing_are_refused_with_the_sentence():
    for text, options, said in (
        ("mk, kn", {}, 'has no "->"'),
        ("mk, kn -> mn", {}, "loop k of .* is not in all results"),
        ("mm -> m", {}, '"mm" in'),
        ("m -> mn", {}, "loop n of .* is in no operand"),
        ("m2 -> m", {}, '"m2" in'),
        ("mk -> m", {"reduce": {"k": "median"}}, "cannot be joined by 'median'"),
        ("m -> m", {"sums": "z"}, "loop z"),
        ("m -> m", {"linear": "all"}, "linear must be"),
    ):
        with pytest.raises(DTensorArgumentError, match=said):
            register_loops(torch.relu, text, **options)
    with pytest.raises(DTensorError, match="an overload"):
        register_loops(torch.ops.aten.relu, "m -> m")
