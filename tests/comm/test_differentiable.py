"""The typed collectives against one device, to the third order.

Each program below is written once, over the operations of a small language, and run twice: by each rank on its own
values with the real collectives (`Many`), and by every rank on the values of all ranks at once with torch's own
functions and no communication (`One`).  In `One` a varying or sharded value is a list with one tensor per rank, and a
replicated one is a tensor.

A program ends in a replicated scalar.  Its gradients, with respect to inputs of each type, are turned into a scalar
again, and so on: every order runs through the collectives that the orders before it made.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from ranks import device_type, run_ranks
from terrazzo.comm import Axis, Pending, axis_of, collectives
from terrazzo.comm import differentiable as d
from terrazzo.errors import CommError
from terrazzo.layout.box import Box
from terrazzo.layout.chunking import chunk_sizes

pytestmark = pytest.mark.on_late(both=True)

OPS = ("sum", "avg", "product", "max", "min")
Value = Any  # a tensor, or in One a list of them


class One:
    """Every rank's part of a program, on one device."""

    def __init__(self, n: int) -> None:
        self.n = n

    def varying(self, make: Callable[[int], Tensor]) -> Value:
        return [make(rank).requires_grad_() for rank in range(self.n)]

    def each(self, function: Callable[..., Tensor], *values: Value) -> Value:
        return [function(*terms) for terms in zip(*values, strict=True)]

    def cast(self, x: Tensor) -> Value:
        return [x] * self.n

    def reduce_replicate(self, x: Value, op: str) -> Tensor:
        stack = torch.stack(x)
        if op in ("sum", "avg"):
            return stack.sum(0) if op == "sum" else stack.mean(0)
        return stack.prod(0) if op == "product" else stack.amax(0) if op == "max" else stack.amin(0)

    def gather_replicate(self, x: Value, dim: int, sizes: Sequence[int]) -> Tensor:
        return torch.cat(x, dim)

    def slice_own(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Value:
        return list(x.split(list(sizes), dim))

    def gather_varying(self, x: Value, dim: int, sizes: Sequence[int]) -> Value:
        return [torch.cat(x, dim)] * self.n

    def reduce_scatter(self, x: Value, dim: int, sizes: Sequence[int], op: str) -> Value:
        return self.slice_own(self.reduce_replicate(x, op), dim, sizes)

    def all_to_all(
        self, x: Value, split_dim: int, split: Sequence[int], concat_dim: int, concat: Sequence[int]
    ) -> Value:
        return list(torch.cat(x, concat_dim).split(list(split), split_dim))

    def exchange(self, x: Value, boxes: Callable[[int, int], tuple[Box, Box] | None], shape: Sequence[int]) -> Value:
        results = []
        for target in range(self.n):
            result = torch.zeros(tuple(shape), dtype=x[0].dtype)
            for source in range(self.n):
                both = boxes(source, target)
                if both is not None:
                    there = torch.zeros(tuple(shape), dtype=x[0].dtype)
                    there[both[1].slices()] = x[source][both[0].slices()]
                    result = result + there
            results.append(result)
        return results

    def exchange_rows(self, x: Value, rows: Callable[[int, int], int]) -> Value:
        pieces = [x[source].split([rows(source, target) for target in range(self.n)]) for source in range(self.n)]
        return [torch.cat([sent[target] for sent in pieces]) for target in range(self.n)]

    def replicate_to_partial(self, x: Tensor, op: str) -> Value:
        if op in ("sum", "product"):
            return [x] + [torch.full_like(x, 0 if op == "sum" else 1)] * (self.n - 1)
        return [x] * self.n


class Many:
    """This rank's part of a program."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.n = axis.size

    def varying(self, make: Callable[[int], Tensor]) -> Value:
        return make(self.axis.index).requires_grad_()

    def each(self, function: Callable[..., Tensor], *values: Value) -> Value:
        return function(*values)

    def cast(self, x: Tensor) -> Value:
        return d.cast(x, self.axis)

    def reduce_replicate(self, x: Value, op: str) -> Tensor:
        return d.reduce_replicate(x, self.axis, op)

    def gather_replicate(self, x: Value, dim: int, sizes: Sequence[int]) -> Tensor:
        return d.gather_replicate(x, self.axis, dim, sizes)

    def slice_own(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Value:
        return d.slice_own(x, self.axis, dim, sizes)

    def gather_varying(self, x: Value, dim: int, sizes: Sequence[int]) -> Value:
        return d.gather_varying(x, self.axis, dim, sizes)

    def reduce_scatter(self, x: Value, dim: int, sizes: Sequence[int], op: str) -> Value:
        return d.reduce_scatter(x, self.axis, dim, sizes, op)

    def all_to_all(
        self, x: Value, split_dim: int, split: Sequence[int], concat_dim: int, concat: Sequence[int]
    ) -> Value:
        return d.all_to_all(x, self.axis, split_dim, split, concat_dim, concat)

    def exchange(self, x: Value, boxes: Callable[[int, int], tuple[Box, Box] | None], shape: Sequence[int]) -> Value:
        me = self.axis.index
        send = [boxes(me, target) for target in range(self.n)]
        receive = [boxes(source, me) for source in range(self.n)]
        return d.exchange(
            x, self.axis, [both and both[0] for both in send], [both and both[1] for both in receive], shape
        )

    def exchange_rows(self, x: Value, rows: Callable[[int, int], int]) -> Value:
        me = self.axis.index
        send = [rows(me, target) for target in range(self.n)]
        return d.exchange_rows(x, self.axis, send, [rows(source, me) for source in range(self.n)])

    def replicate_to_partial(self, x: Tensor, op: str) -> Value:
        return d.replicate_to_partial(x, self.axis, op)


# ------------------------------------------------------------------ inputs


def numbers(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def bend(x: Tensor) -> Tensor:
    """Not linear, and of no finite order."""
    return (0.7 * x).sin() + 0.3 * x * x


def to_scalar(api: Any, x: Value) -> Tensor:
    """The sum over all elements on all ranks of a varying or sharded value, bent by a weight per element."""
    weigh = lambda term: (bend(term) * torch.linspace(0.5, 1.5, term.numel(), dtype=term.dtype).view(term.shape)).sum()  # noqa: E731
    return api.reduce_replicate(api.each(weigh, x), "sum")


def ragged(n: int) -> tuple[int, ...]:
    return tuple((3 * i + 2) % 4 for i in range(n))  # 2, 1, 0, 3


# ------------------------------------------------------------------ programs

# (api) -> (scalar, varying inputs, replicated inputs)
Program = Callable[[Any], tuple[Tensor, list[Value], list[Tensor]]]


def reduce_program(op: str) -> Program:
    def program(api: Any) -> tuple[Tensor, list[Value], list[Tensor]]:
        x = api.varying(lambda rank: numbers((3, 2), rank))
        w = numbers((2,), 50).requires_grad_()
        y = api.reduce_replicate(api.each(lambda x, w: bend(x * w), x, api.cast(w)), op)
        z = api.each(lambda y, x: bend(y) * x, api.cast(y * w), x)
        return to_scalar(api, z), [x], [w]

    return program


def special_reduce_program(op: str) -> Program:
    """Ties between ranks, zeros, and more than one zero: where max, min and product are delicate."""

    def program(api: Any) -> tuple[Tensor, list[Value], list[Tensor]]:
        table = torch.tensor(
            [
                [1.0, 0.0, 0.0, 2.0, -1.0],
                [1.0, 3.0, 0.0, 2.0, -1.0],
                [0.5, 2.0, 1.0, 2.0, 4.0],
                [1.0, 1.0, 2.0, 2.0, 0.0],
            ]
        )
        x = api.varying(lambda rank: table[rank].double())
        # The gradient at a tie is not continuous, so ties stay ties: the terms are used as they are.
        y = api.reduce_replicate(x, op)
        return bend(y).sum(), [x], []

    return program


def gather_replicate_program(dim: int) -> Program:
    def program(api: Any) -> tuple[Tensor, list[Value], list[Tensor]]:
        sizes = ragged(api.n)
        shape = lambda size: (size, 3) if dim == 0 else (2, size)  # noqa: E731
        x = api.varying(lambda rank: numbers(shape(sizes[rank]), rank))
        w = numbers(shape(sum(sizes)), 51).requires_grad_()
        whole = api.gather_replicate(api.each(bend, x), dim, sizes)
        product = bend(whole * w)
        part = api.slice_own(product, dim, sizes)
        return to_scalar(api, api.each(lambda part, x: part * x, part, x)), [x], [w]

    return program


def gather_varying_program(dim: int, op: str) -> Program:
    def program(api: Any) -> tuple[Tensor, list[Value], list[Tensor]]:
        sizes = ragged(api.n) if dim == 0 else chunk_sizes(api.n + 1, api.n)
        shape = lambda size: (size, 3) if dim == 0 else (2, size)  # noqa: E731
        x = api.varying(lambda rank: numbers(shape(sizes[rank]), rank))
        own = api.varying(lambda rank: numbers((), 60 + rank))
        whole = api.each(lambda x, own: bend(x) * own, api.gather_varying(x, dim, sizes), own)
        part = api.reduce_scatter(whole, dim, sizes, op)
        return to_scalar(api, api.each(lambda part, x: bend(part) * x, part, x)), [x, own], []

    return program


def all_to_all_program(api: Any) -> tuple[Tensor, list[Value], list[Tensor]]:
    rows, columns = ragged(api.n), chunk_sizes(api.n + 1, api.n)
    x = api.varying(lambda rank: numbers((rows[rank], 2, sum(columns)), rank))
    w = numbers((sum(rows), 2, 1), 52).requires_grad_()
    turned = api.all_to_all(api.each(bend, x), 2, columns, 0, rows)
    turned = api.each(lambda t, w: bend(t * w), turned, api.cast(w))
    back = api.all_to_all(turned, 0, rows, 2, columns)
    return to_scalar(api, api.each(lambda back, x: back * x, back, x)), [x], [w]


def shift_boxes(source: int, target: int) -> tuple[Box, Box] | None:
    """Rows 0-1 go to the rank itself and row 2 to every other one as well: some are sent twice, some sums of two."""
    if source == target:
        return Box((0, 0), (2, 3)), Box((1, 0), (2, 3))
    if source + 1 == target or (source, target) == (1, 0):
        return Box((1, 0), (2, 2)), Box((0, 1), (2, 2))
    return None


def exchange_program(api: Any) -> tuple[Tensor, list[Value], list[Tensor]]:
    x = api.varying(lambda rank: numbers((3, 3), rank))
    moved = api.exchange(api.each(bend, x), shift_boxes, (4, 3))
    return to_scalar(api, api.each(lambda moved, x: bend(moved[:3]) * x, moved, x)), [x], []


def some_rows(source: int, target: int) -> int:
    """Some ranks send each other nothing."""
    return (source + 2 * target) % 3


def exchange_rows_program(api: Any) -> tuple[Tensor, list[Value], list[Tensor]]:
    x = api.varying(lambda rank: numbers((sum(some_rows(rank, target) for target in range(api.n)), 2), rank))
    moved = api.exchange_rows(api.each(bend, x), some_rows)
    return to_scalar(api, api.each(lambda moved: bend(moved) * moved, moved)), [x], []


def partial_program(op: str) -> Program:
    def program(api: Any) -> tuple[Tensor, list[Value], list[Tensor]]:
        w = numbers((2, 3), 53).requires_grad_()
        terms = api.replicate_to_partial(bend(w), op)
        if op in ("sum", "avg"):  # linear in the terms, as the type of a partial sum demands
            whole = api.reduce_replicate(api.each(lambda term: term * 3, terms), op)
            part = api.reduce_scatter(terms, 1, chunk_sizes(3, api.n), op)
            return to_scalar(api, api.slice_own(bend(whole), 0, chunk_sizes(2, api.n))) * to_scalar(api, part), [], [w]
        x = api.varying(lambda rank: numbers((2, 3), rank))
        whole = api.reduce_replicate(api.each(lambda term, x: term + x, terms, x), op)
        return bend(whole * w).sum(), [x], [w]

    return program


PROGRAMS: dict[str, Program] = {
    **{f"reduce_replicate {op}": reduce_program(op) for op in OPS},
    **{f"ties and zeros {op}": special_reduce_program(op) for op in ("product", "max", "min")},
    **{f"gather_replicate and slice_own, dim {dim}": gather_replicate_program(dim) for dim in (0, 1)},
    **{
        f"gather_varying and reduce_scatter {op}, dim {k % 2}": gather_varying_program(k % 2, op)
        for k, op in enumerate(OPS)
    },
    "gather_varying and reduce_scatter sum, dim 1": gather_varying_program(1, "sum"),
    "all_to_all": all_to_all_program,
    "exchange": exchange_program,
    "exchange_rows": exchange_rows_program,
    **{f"replicate_to_partial {op}": partial_program(op) for op in OPS},
}


# ------------------------------------------------------------------ running them


def derivatives(api: Any, program: Program, orders: int) -> list[tuple[Tensor, list[Value], list[Tensor]]]:
    """Per order: the scalar, its gradients for varying inputs, and those for replicated inputs."""
    scalar, varying, replicated = program(api)
    results = []
    for _ in range(orders):
        flat = [term for x in varying for term in (x if isinstance(x, list) else [x])] + replicated
        grads = list(torch.autograd.grad(scalar, flat, create_graph=True, materialize_grads=True))
        # A derivative that is 0 everywhere has no graph: it is made one, so that there is always a next order.
        grads = [grad if grad.requires_grad else grad + 0 * x for grad, x in zip(grads, flat, strict=True)]
        replicated_grads = grads[len(grads) - len(replicated) :]
        per_input = iter(grads)
        varying_grads = [[next(per_input) for _ in x] if isinstance(x, list) else next(per_input) for x in varying]
        results.append((scalar.detach(), varying_grads, replicated_grads))
        scalar = sum((bend(grad).sum() for grad in replicated_grads), torch.zeros((), dtype=torch.float64))
        for grad in varying_grads:
            scalar = scalar + to_scalar(api, grad)
    return results


def compare(names: Sequence[str]) -> None:
    axis = axis_of(DeviceMesh(device_type(), list(range(dist.get_world_size()))), 0)
    for name in names:
        many = derivatives(Many(axis), PROGRAMS[name], orders=3)
        one = derivatives(One(axis.size), PROGRAMS[name], orders=3)
        for order, ((value, local, replicated), (expected, everyone, replicated_expected)) in enumerate(
            zip(many, one, strict=True)
        ):
            what = f"{name}, order {order}"
            close(value, expected, f"{what}: value")
            for k, (grad, terms) in enumerate(zip(local, everyone, strict=True)):
                close(grad, terms[axis.index], f"{what}: gradient of varying input {k}")
            for k, (grad, term) in enumerate(zip(replicated, replicated_expected, strict=True)):
                close(grad, term, f"{what}: gradient of replicated input {k}")


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    "kind",
    ["reduce", "ties", "gather_replicate", "gather_varying", "all_to_all", "exchange", "exchange_rows", "replicate_to"],
)
def test_against_one_device(world: int, kind: str) -> None:
    names = [name for name in PROGRAMS if name.startswith(kind)]
    assert names
    run_ranks(world, compare, names)


# ------------------------------------------------------------------ what they leave out, and what they refuse


def world_axis() -> Axis:
    return axis_of(DeviceMesh(device_type(), list(range(dist.get_world_size()))), 0)


def nothing_on_one_rank() -> None:
    axis = world_axis()
    x = torch.ones(2, 3, requires_grad=True)
    for op in OPS:
        assert d.reduce_replicate(x, axis, op) is x
        assert d.reduce_scatter(x, axis, 0, (2,), op) is x
        assert d.replicate_to_partial(x, axis, op) is x
    assert d.cast(x, axis) is x and d.first_of(x, axis) is x
    for function in (d.gather_replicate, d.gather_varying, d.slice_own):
        assert function(x, axis, 0, (2,)) is x
    assert d.all_to_all(x, axis, 0, (2,), 1, (3,)) is x
    box = Box.whole((2, 3))
    assert d.exchange(x, axis, [box], [box], (2, 3)) is x
    assert d.exchange_rows(x, axis, [2], [2]) is x


def test_on_one_rank_there_is_nothing_to_do() -> None:
    run_ranks(1, nothing_on_one_rank)


def no_node_without_gradient() -> None:
    axis = world_axis()
    n = axis.size
    plain = torch.ones(n, 3)
    wanted = torch.ones(n, 3, requires_grad=True)
    ones, shape = (1,) * n, (n, 3)
    boxes = [Box((i, 0), (1, 3)) for i in range(n)]

    def results(x: Tensor) -> list[Tensor]:
        return [
            d.cast(x, axis),
            d.first_of(x, axis),
            *(d.reduce_replicate(x, axis, op) for op in OPS),
            *(d.reduce_scatter(x, axis, 0, ones, op) for op in OPS),
            *(d.replicate_to_partial(x, axis, op) for op in OPS),
            d.gather_replicate(x, axis, 1, (3,) * n),
            d.gather_varying(x, axis, 1, (3,) * n),
            d.slice_own(x, axis, 0, ones),
            d.all_to_all(x, axis, 0, ones, 1, (3,) * n),
            d.exchange(x, axis, boxes, boxes, shape),
        ]

    with torch.no_grad():
        quiet = results(wanted)
    for result, untracked, tracked in zip(results(plain), quiet, results(wanted), strict=True):
        assert result.grad_fn is None and untracked.grad_fn is None and tracked.grad_fn is not None
        assert torch.equal(result, tracked) and torch.equal(untracked, tracked)
    assert d.cast(plain, axis) is plain and d.first_of(plain, axis) is plain


def started_before() -> None:
    axis = world_axis()
    n = axis.size
    ones = (1,) * n
    x = numbers((n, 3), axis.index).requires_grad_()
    boxes = [Box((i, 0), (1, 3)) for i in range(n)]
    cases: list[tuple[Callable[..., Any], Callable[..., Pending], tuple[Any, ...]]] = [
        *((d.reduce_replicate, collectives.all_reduce_start, (axis, op)) for op in OPS),
        *((d.reduce_scatter, collectives.reduce_scatter_start, (axis, 0, ones, op)) for op in OPS),
        (d.gather_replicate, collectives.all_gather_start, (axis, 1, (3,) * n)),
        (d.gather_varying, collectives.all_gather_start, (axis, 1, (3,) * n)),
        (d.all_to_all, collectives.all_to_all_start, (axis, 0, ones, 1, (3,) * n)),
    ]
    for function, start, args in cases:
        expected = function(x, *args)
        (expected_grad,) = torch.autograd.grad(bend(expected).sum(), x)
        result = function(x, *args, pending=start(x, *args))
        (grad,) = torch.autograd.grad(bend(result).sum(), x)
        assert torch.equal(result, expected) and torch.equal(grad, expected_grad), (function, args)
        with torch.no_grad():
            assert torch.equal(function(x, *args, pending=start(x, *args)), expected)
    pieces = [x[box.slices()] for box in boxes]
    pending = collectives.exchange_start(pieces, axis, [(1, 3)] * n, x)
    assert torch.equal(d.exchange(x, axis, boxes, boxes, (n, 3), pending), d.exchange(x, axis, boxes, boxes, (n, 3)))


def dtypes_and_memory() -> None:
    axis = world_axis()
    n = axis.size
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        x = torch.ones(n, 3, dtype=dtype, requires_grad=True)
        y = d.reduce_scatter(d.cast(x, axis), axis, 0, (1,) * n, "avg")
        z = d.gather_replicate(y, axis, 0, (1,) * n)
        assert z.dtype == dtype
        (z * z).sum().abs().backward()
        assert x.grad is not None and x.grad.dtype == dtype
        # z is x, and all ranks use it alike: the gradient is that of (x * x).sum().
        torch.testing.assert_close(x.grad, torch.full_like(x.grad, 2))
    whole = torch.ones(100 * n, requires_grad=True)
    assert d.slice_own(whole, axis, 0, (100,) * n).untyped_storage().nbytes() == 400


def refusals() -> None:
    axis = world_axis()
    n = axis.size
    x = torch.ones(n, 3, requires_grad=True)
    for call in (
        lambda: d.reduce_replicate(x, axis, "mean"),
        lambda: d.reduce_scatter(x, axis, 0, (1,) * n, "mean"),
        lambda: d.replicate_to_partial(x, axis, "mean"),
    ):
        with pytest.raises(CommError, match="'mean' is not a reduction"):
            call()
    for sizes in ((2,) * n, (n,)):
        with pytest.raises(CommError, match="cannot be sliced"):
            d.slice_own(x, axis, 0, sizes)
    # Writing through a cast would change the value for those that did not cast it.
    with pytest.raises(RuntimeError, match="modified inplace"):
        d.cast(x * 1, axis).add_(1)
    # Forward mode and torch.func would silently take the value for a constant.
    for wanted in (x, x.detach()):
        for transform in (
            lambda f, t=wanted: torch.func.grad(f)(t),
            lambda f, t=wanted: torch.func.jvp(f, (t,), (t,)),
            lambda f, t=wanted: torch.func.vmap(f)(t),
        ):
            for function in (d.cast, d.reduce_replicate):
                with pytest.raises(CommError, match=r"torch\.func|forward-mode"):
                    transform(lambda t, function=function: function(t, axis).sum())
        with forward_ad.dual_level():
            with pytest.raises(CommError, match="forward-mode"):
                d.reduce_replicate(forward_ad.make_dual(wanted, torch.ones(n, 3)), axis)
            d.reduce_replicate(wanted, axis)  # without a tangent it may pass


@pytest.mark.parametrize("case", [no_node_without_gradient, started_before, dtypes_and_memory, refusals])
def test_on_two_ranks(case: Callable[[], None]) -> None:
    run_ranks(2, case)
