"""Terms (`Partial`) of every reduction: what passes them, and their gradients. One device gives what is expected."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from terrazzo.errors import DTensorError
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, explain, init_device_mesh

R = Replicate()


def check_views_as_other_types() -> None:
    mesh = init_device_mesh("cpu", (2,))
    numbers = torch.tensor([[1 + 2j, 2 - 1j], [3 - 1j, 4 + 1j]])
    x = distribute_tensor(numbers, mesh, [Shard(0)])
    for reduce in (torch.prod, torch.sum, torch.mean):
        terms = reduce(x, 0)
        assert terms.placements[0].is_partial()
        torch.testing.assert_close(torch.view_as_real(terms).full_tensor(), torch.view_as_real(reduce(numbers, 0)))
    pairs = torch.tensor([[1.0, -2.0], [-3.0, 4.0]])
    y = distribute_tensor(pairs, mesh, [Shard(0)])
    for reduce in (torch.prod, torch.sum, torch.mean, torch.amax, torch.amin):
        terms = reduce(y, 0)
        assert terms.placements[0].is_partial()
        expected = torch.view_as_complex(reduce(pairs, 0))
        torch.testing.assert_close(torch.view_as_complex(terms).full_tensor(), expected)
    # Sums still pass.
    assert torch.view_as_real(x.sum(0)).placements == torch.view_as_complex(y.sum(0)).placements == (Partial(),)


def check_conversions_to_integers() -> None:
    """Terms of 0.75 and 1.75, which are 2 together, and 1 if each is rounded."""
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.tensor([[0.75 + dist.get_rank()]]), mesh, [Partial()])
    for target in (Partial(), Partial("max"), R, Shard(0)):
        written = torch.zeros(1 - dist.get_rank() if target is Shard(0) else 1, 1, dtype=torch.int64)
        result = DTensor.from_local(written, mesh, [target], shape=(1, 1)).copy_(x)
        assert result.full_tensor().tolist() == [[2]] and result.placements == (target,)
    for call in (lambda x: x.sum(dtype=torch.int64), lambda x: x.cumsum(0, dtype=torch.int64), lambda x: x.long()):
        assert call(x).full_tensor().flatten().tolist() == [2]


def _in_autocast(x: DTensor, weight: DTensor) -> DTensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (
            torch.nn.functional.conv1d(x.reshape(2, 1, 1), weight) + torch.matmul(x.reshape(2, 1), weight[0])[..., None]
        )


def check_conversions_to_fewer_digits() -> None:
    """Terms that cancel in part, so that each of them, rounded, has a larger error than their sum has."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    terms = torch.tensor([[1 + 2.0**-12, 7e4], [-1.0, -6e4]], dtype=torch.float64)
    half = DTensor.from_local(torch.ones(2, dtype=torch.float16), mesh, [R])
    weight = DTensor.from_local(torch.ones(1, 1, 1), mesh, [R])
    to_half = {"dtype": torch.float16}
    calls: dict[str, Any] = {
        "half": lambda x: x.half(),
        "bfloat16": lambda x: x.bfloat16(),
        "float": lambda x: x.float(),
        "to": lambda x: x.to(torch.float16),
        "to a device": lambda x: x.to("cpu", torch.float16),
        "to other": lambda x: x.to(half),
        "type": lambda x: x.type(torch.float16),
        "type_as": lambda x: x.type_as(half),
        "_to_copy": lambda x: torch.ops.aten._to_copy(x, **to_half),
        "long": lambda x: x.long(),
        "bool": lambda x: (x - x).bool(),
        "chalf": lambda x: torch.view_as_real(x.to(torch.complex32)),
        "real part": lambda x: torch.complex(x, x).to(torch.float32),
        "sum": lambda x: x.sum(**to_half),
        "mean": lambda x: x.mean(0, keepdim=True, **to_half),
        "cumsum": lambda x: x.cumsum(0, **to_half),
        "softmax": lambda x: x.softmax(0, **to_half),
        "promotion": lambda x: x[0] * half,
        "an integer's division": lambda x: (x * 1000).long() / 2,
        "autocast": lambda x: _in_autocast(x.float(), weight),
        "a list": lambda x: torch.cat([x.half(), half]),
    }
    for op in ("sum", "avg", "max"):
        for name, call in calls.items():
            local = terms[rank].clone().requires_grad_()
            x = DTensor.from_local(local, mesh, [Partial(op)])
            whole = {"sum": terms.sum(0), "avg": terms.mean(0), "max": terms.amax(0)}[op].requires_grad_()
            plain = DTensor.from_local(whole, mesh, [R])
            result, expected = call(x), call(plain)
            where = f"{name} of {op}"
            assert result.dtype == expected.dtype, where
            torch.testing.assert_close(
                result.full_tensor(), expected.to_local(), msg=where, equal_nan=True, rtol=0, atol=0
            )
            if result.requires_grad and name != "softmax":
                result.full_tensor().float().sum().backward()
                expected.to_local().float().sum().backward()
                mine = terms[rank] == terms.amax(0)
                part = whole.grad * {"sum": 1.0, "avg": 0.5, "max": mine.double()}[op]
                torch.testing.assert_close(local.grad, part, msg=where)
        for target, dtype in product((Partial(), Partial("max"), R), (torch.float16, torch.int32)):
            lowest = DTensor.from_local(torch.full((2,), -(2**15), dtype=dtype), mesh, [target])
            written = lowest if target == Partial("max") else lowest - lowest
            expected = plain.detach().to(dtype).to_local()
            torch.testing.assert_close(written.copy_(x.detach()).full_tensor(), expected, rtol=0, atol=0)
            if dtype is torch.float16:
                torch.add(x.detach(), 0, out=written)
                torch.testing.assert_close(written.full_tensor(), expected, rtol=0, atol=0)


def check_conversions_that_keep_terms() -> None:
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    local = torch.arange(4.0).bfloat16() + rank
    for placements in ([Partial(), Partial()], [Shard(0), Partial()], [Partial("avg"), R]):
        x = DTensor.from_local(local, mesh, placements)
        for wide in (x.float(), x.to(torch.float64), x.to(torch.complex64), x * torch.ones((), dtype=torch.float64)):
            assert wide.placements == tuple(placements)
        torch.testing.assert_close(x.float().full_tensor(), x.full_tensor().float())
        assert x.to(torch.complex64).to(torch.float32).placements == tuple(placements)
        narrow = x.float().half()
        assert narrow.placements == tuple(p if p == Shard(0) else R for p in placements)
    x = DTensor.from_local(local, mesh, [Partial(), Partial()])
    assert "reduced first" in str(explain(torch.Tensor.half, x)) and not explain(torch.Tensor.double, x).note
    assert "reduced first" in explain(torch.Tensor.copy_, x, x.float()).note
    for op in ("sum", "max", "product"):
        x = DTensor.from_local(torch.arange(4) + rank, mesh, [Partial(op), R])
        assert x.long() is x and x.to(torch.int64) is x and x.type_as(x) is x
        assert x.int().placements == x.double().placements == (R, R)
    # Terms of an integer type that is too small for their sum, which wraps around before it is converted.
    x = DTensor.from_local(torch.full((2,), 100, dtype=torch.int8), mesh, [Partial(), R])
    for call in (lambda x: x.int(), lambda x: x.float(), lambda x: x.sum(), lambda x: x * 1.0):
        torch.testing.assert_close(call(x).full_tensor(), call(x.full_tensor()))
    # Written in place: the other terms are of a wider type.
    half = DTensor.from_local(torch.zeros(1, dtype=torch.float16), mesh, [Partial(), R])
    terms = DTensor.from_local(torch.tensor([7e4 if rank < 2 else -7e4]), mesh, [Partial(), R])
    for write in (lambda: half.add_(terms), lambda: half.sub_(terms), lambda: torch._foreach_add_([half], [terms])):
        write()
        assert half.full_tensor().tolist() == [0] and half.placements[0] == Partial()


def check_gradients() -> None:
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    i, j = divmod(rank, 2)
    local = torch.tensor([[[3.0, -1.0], [5.0, 0.5]], [[-7.0, 2.0], [4.0, 6.0]]])[i, j] + torch.tensor(
        [0.0, i + 2.0 * j]
    )
    weight = torch.tensor([2.0, -3.0])
    ops = ("sum", "avg", "max", "min")
    for placements in [*product([R, *map(Partial, ops)], repeat=2), *product([Shard(0)], map(Partial, ops))]:
        where = f"placed {placements}"
        own = local if R not in placements else torch.zeros(2) + (i if placements[1] is R else j) * torch.ones(2)
        own = own[:1] if Shard(0) in placements else own

        def leaf(own=own, placements=placements) -> DTensor:
            return DTensor.from_local(own.clone(), mesh, list(placements)).requires_grad_()

        def agree(gradient: DTensor, times: float, where=where) -> None:
            torch.testing.assert_close(gradient.full_tensor(), times * weight, msg=lambda m: f"{where}: {m}")

        def loss(x: DTensor) -> Any:
            return (x.redistribute(placements=[R, R]) * distribute_tensor(weight, mesh, [R, R])).sum()

        x = leaf()
        loss(x).backward()
        agree(x.grad, 1.0)
        loss(x).backward()  # accumulates
        agree(x.grad, 2.0)
        x.grad.mul_(2)
        agree(x.grad, 4.0)
        x.grad = distribute_tensor(weight, mesh, [R, R])
        agree(x.grad, 1.0)
        loss(x).backward()
        agree(x.grad, 2.0)

        x = leaf()
        (gradient,) = torch.autograd.grad(loss(x), x)
        agree(gradient, 1.0)
        (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
        agree(gradient, 1.0)

        seen: list[DTensor] = []
        x.register_hook(seen.append)
        loss(x).backward()
        agree(seen[0], 1.0)

        y = x.clone()  # terms that an operation gave
        y.retain_grad()
        loss(y).backward()
        agree(y.grad, 1.0)

        if not any(p.is_partial() and p.reduce_op in ("max", "min") for p in placements):
            x = leaf()
            x.register_hook(lambda g: g * 2)
            loss(x).backward()
            agree(x.grad, 2.0)
        else:
            x = leaf()
            x.register_hook(lambda g: g * 2)
            with pytest.raises(DTensorError, match="cannot be replaced"):
                loss(x).backward()

        # The gradient of the local tensor, where its placements are asked for.
        start = own.clone().requires_grad_()
        placed = [p if p.is_shard() else R for p in placements]
        loss(DTensor.from_local(start, mesh, list(placements), grad_placements=placed)).backward()
        agree(DTensor.from_local(start.grad, mesh, placed), 1.0)


def check_gradients_of_conversions() -> None:
    """redistribute(forward_dtype=...) has the gradients of `to(dtype)` and a redistribution."""
    mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
    own = torch.tensor([1.0, 3.0]) * (rank - 1)
    weight = distribute_tensor(torch.tensor([2.0, -3.0], dtype=torch.float64), mesh, [R])
    for src, dst in product([R, Shard(0), *map(Partial, ("sum", "avg", "max"))], repeat=2):
        local = own if src.is_partial() else torch.tensor([1.0, 3.0])
        local = local[rank : rank + 1] if src.is_shard() else local
        found = []
        for convert in (
            lambda x, dst=dst: x.redistribute(placements=[dst], forward_dtype=torch.float64),
            lambda x, dst=dst: x.redistribute(placements=[R]).to(torch.float64).redistribute(placements=[dst]),
        ):
            x = DTensor.from_local(local.clone(), mesh, [src], shape=(2,)).requires_grad_()
            (convert(x) * weight).sum().backward()
            found.append(x.grad.full_tensor())
        torch.testing.assert_close(*found, msg=lambda m, src=src, dst=dst: f"{src} to {dst}: {m}")


def check_products() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = DTensor.from_local(torch.tensor([2.0 + dist.get_rank()]), mesh, [Partial("product")]).requires_grad_()
    x.redistribute(placements=[R]).sum().backward()
    with pytest.raises(DTensorError, match="factors of a product"):
        _ = x.grad
    x.grad = None
    start = torch.tensor([2.0 + dist.get_rank()], requires_grad=True)  # of a local tensor it is known
    DTensor.from_local(start, mesh, [Partial("product")]).redistribute(placements=[R]).sum().backward()
    torch.testing.assert_close(start.grad, 120 / start.detach())


def check_ties() -> None:
    """Elements that are an extreme together share its gradient evenly, also where they are on several ranks."""
    torch.manual_seed(0)
    tied = torch.randint(0, 3, (6, 5)).double()
    of = {
        "amax": lambda x: x.amax(0),
        "amin": lambda x: x.amin((0, 1), keepdim=True),
        "max": lambda x: x.max(),
        "min": lambda x: torch.min(input=x),
        "aminmax": lambda x: sum(x.aminmax(dim=0)),
        "norm": lambda x: torch.linalg.vector_norm(x - 1, float("inf"), 0),
        "smallest": lambda x: torch.linalg.vector_norm(x, -float("inf")),
    }
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts = [(line, [Shard(0)]), (line, [Shard(1)]), (square, [Shard(0), Shard(1)]), (square, [Partial(), Shard(0)])]
    for (name, function), (mesh, placements) in product(of.items(), layouts):
        plain = tied.clone().requires_grad_()
        mine = distribute_tensor(tied, mesh, placements).requires_grad_()
        expected, found = function(plain), function(mine)
        assert torch.equal(found.detach().full_tensor(), expected), (name, placements)
        (once,) = torch.autograd.grad(expected.pow(2).sum(), plain, create_graph=True)
        (mine_once,) = torch.autograd.grad(found.pow(2).sum(), mine, create_graph=True)
        torch.testing.assert_close(mine_once.full_tensor(), once, msg=lambda m, n=(name, placements): f"{n}: {m}")
        if name != "norm":  # of which PyTorch has no second derivative that is right at ties
            once.pow(2).sum().backward()
            mine_once.pow(2).sum().backward()
            torch.testing.assert_close(mine.grad.full_tensor(), plain.grad, msg=lambda m, n=name: f"{n} twice: {m}")
    with torch.no_grad():  # without a gradient, what each rank found stays a term
        assert distribute_tensor(tied, line, [Shard(0)]).amax(0).placements == (Partial("max"),)


def check_integers_have_no_average() -> None:
    x = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial("avg")])
    for made in (torch.zeros_like(x, dtype=torch.int64), torch.empty_like(x, dtype=torch.bool).zero_()):
        assert made.full_tensor().tolist() == [0, 0, 0]
    assert torch.zeros_like(x).placements == (Partial("avg"),)


def test_ties_share_a_gradient() -> None:
    run_ranks(4, check_ties)


def test_zeros_of_integers_are_no_terms_of_an_average() -> None:
    run_ranks(2, check_integers_have_no_average)


def test_views_as_other_types_pass_sums_only() -> None:
    run_ranks(2, check_views_as_other_types)


def test_terms_are_not_rounded_one_by_one() -> None:
    run_ranks(2, check_conversions_to_integers)


def test_terms_are_reduced_before_their_dtype_loses_digits() -> None:
    run_ranks(2, check_conversions_to_fewer_digits)


def test_terms_pass_where_their_dtype_loses_none() -> None:
    run_ranks(4, check_conversions_that_keep_terms)


def test_a_gradient_is_the_tensors_whatever_its_terms() -> None:
    run_ranks(4, check_gradients)


def test_a_conversion_while_redistributing_keeps_the_gradient() -> None:
    run_ranks(4, check_gradients_of_conversions)


def test_the_gradient_of_a_product_is_refused() -> None:
    run_ranks(4, check_products)
