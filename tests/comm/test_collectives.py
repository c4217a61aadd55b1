"""Collectives against the same reduction, concatenation or cut done by torch on the values of all ranks at once."""

import itertools
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ranks import run_ranks
from terrazzo.comm import Axis, axis_of, collectives, wire
from terrazzo.errors import CommError, CommTimeout
from terrazzo.layout.chunking import chunk_sizes

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
COMPLEX = (torch.complex64,)
MOVED_ONLY = (torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.complex128)

SINGLE = {
    "sum": lambda stack: stack.sum(0, dtype=stack.dtype),
    "avg": lambda stack: stack.mean(0),
    "product": lambda stack: stack.prod(0, dtype=stack.dtype),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
}


def world_axis() -> Axis:
    return axis_of(DeviceMesh("cpu", list(range(dist.get_world_size()))), 0)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Some values, with ties and zeros, the same for the same seed on every rank."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-3, 4, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(drawn.double(), drawn.double().roll(1)).to(dtype)
    if dtype in (torch.bool, torch.uint8, torch.uint16, torch.uint32):
        return drawn.abs().to(dtype)
    return drawn.to(dtype) / 2 if dtype in FLOATS else drawn.to(dtype)


def of_all_ranks(shape: tuple[int, ...], dtype: torch.dtype, n: int) -> list[Tensor]:
    return [values(shape, dtype, seed) for seed in range(n)]


def check(result: Tensor, expected: Tensor, what: object) -> None:
    assert result.shape == expected.shape and result.dtype == expected.dtype, what
    assert result.is_contiguous() and not result.requires_grad, what
    # The values are small multiples of a half: every reduction but avg is exact.
    torch.testing.assert_close(result, expected, equal_nan=True, msg=lambda text: f"{what}: {text}")


def partitions(n: int) -> list[tuple[int, ...]]:
    """Even, as torch.chunk does it with an empty end, ragged, and empty lengths of n parts."""
    ragged = tuple((3 * i + 2) % 4 for i in range(n))
    return [(2,) * n, chunk_sizes(n + 1, n), ragged, (0,) * n]


def with_all_paths(body: Callable[[], None]) -> None:
    """Small tensors take the paths of large ones as well, and those of a backend that reduces while scattering."""
    limit, has_reduce_scatter = collectives._ONE_ROUND_BYTES, wire.has_reduce_scatter
    try:
        body()
        collectives._ONE_ROUND_BYTES = -1
        body()
        wire.has_reduce_scatter = lambda x: True
        body()
    finally:
        collectives._ONE_ROUND_BYTES, wire.has_reduce_scatter = limit, has_reduce_scatter


def reductions() -> None:
    axis = world_axis()
    n = axis.size

    def body() -> None:
        for dtype, op in itertools.product(FLOATS + INTEGERS + COMPLEX, SINGLE):
            if (op == "avg" and dtype in INTEGERS) or (op in ("max", "min") and dtype in COMPLEX):
                continue
            for shape in ((), (3,), (2, 5), (0, 2)):
                inputs = of_all_ranks(shape, dtype, n)
                mine = inputs[axis.index]
                before = mine.clone()
                check(collectives.all_reduce(mine, axis, op), SINGLE[op](torch.stack(inputs)), (dtype, op, shape))
                assert torch.equal(mine, before)
            for sizes, dim in itertools.product(partitions(n), (0, 1)):
                shape = (sum(sizes), 3) if dim == 0 else (2, sum(sizes), 2)
                inputs = of_all_ranks(shape, dtype, n)
                expected = SINGLE[op](torch.stack(inputs)).split(sizes, dim)[axis.index].contiguous()
                mine = inputs[axis.index]
                before = mine.clone()
                result = collectives.reduce_scatter(mine, axis, dim, sizes, op)
                check(result, expected, (dtype, op, sizes, dim))
                assert torch.equal(mine, before)

    with_all_paths(body)


def movements() -> None:
    axis = world_axis()
    n = axis.size

    def body() -> None:
        for dtype in FLOATS + INTEGERS + COMPLEX + MOVED_ONLY:
            as_bytes = lambda x: x.contiguous().view(-1).view(torch.uint8)  # noqa: E731  # torch compares few of these
            for sizes, dim in itertools.product(partitions(n), (0, 1, 2)):
                whole = values((2, 3, 4)[:dim] + (sum(sizes),) + (2, 3, 4)[dim + 1 :], dtype, 5)
                mine = whole.split(sizes, dim)[axis.index]  # not contiguous for dim > 0
                result = collectives.all_gather(mine, axis, dim, sizes)
                assert result.shape == whole.shape and result.dtype == dtype and result.is_contiguous()
                assert torch.equal(as_bytes(result), as_bytes(whole)), (dtype, sizes, dim)
            for split_sizes, concat_sizes in itertools.product(partitions(n), partitions(n)):
                for split_dim, concat_dim in ((0, 1), (1, 0), (2, 0), (1, 2)):
                    shape = [2, 2, 2]
                    shape[split_dim], shape[concat_dim] = sum(split_sizes), sum(concat_sizes)
                    whole = values(tuple(shape), dtype, 6)
                    mine = whole.split(concat_sizes, concat_dim)[axis.index]
                    result = collectives.all_to_all(mine, axis, split_dim, split_sizes, concat_dim, concat_sizes)
                    expected = whole.split(split_sizes, split_dim)[axis.index].contiguous()
                    assert result.shape == expected.shape and result.is_contiguous()
                    assert torch.equal(as_bytes(result), as_bytes(expected)), (dtype, split_sizes, concat_sizes)
            for src in range(n):
                inputs = of_all_ranks((3, 2), dtype, n)
                result = collectives.broadcast(inputs[axis.index].t(), axis, src)
                assert torch.equal(as_bytes(result), as_bytes(inputs[src].t()))
                parts = [values((i, 2), dtype, 10 + i) for i in range(n)]
                result = collectives.scatter(
                    parts if axis.index == src else None, axis, src, (axis.index, 2), torch.empty(0, dtype=dtype)
                )
                assert torch.equal(as_bytes(result), as_bytes(parts[axis.index]))
            # From i to j goes a tensor of i rows and j columns, and nothing where i + j is 3.
            pieces = [[None if i + j == 3 else values((i, j), dtype, i * n + j) for j in range(n)] for i in range(n)]
            shapes = [None if i + axis.index == 3 else (i, axis.index) for i in range(n)]
            received = collectives.exchange(pieces[axis.index], axis, shapes, torch.empty(0, dtype=dtype))
            for i, result in enumerate(received):
                expected = pieces[i][axis.index]
                assert result.dtype == dtype
                assert result.shape == ((0,) if expected is None else expected.shape)
                assert expected is None or torch.equal(as_bytes(result), as_bytes(expected))

    body()
    limit, collectives._ONE_ROUND_BYTES = collectives._ONE_ROUND_BYTES, -1
    try:
        body()
    finally:
        collectives._ONE_ROUND_BYTES = limit


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_reductions(world: int) -> None:
    run_ranks(world, reductions)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_movements(world: int) -> None:
    run_ranks(world, movements)


def special_values() -> None:
    axis = world_axis()
    n, me = axis.size, axis.index
    # NaN on any rank is NaN everywhere, whichever rank it is on.
    for size in (n, 40_000):
        x = torch.ones(size)
        x[me] = float("nan")
        for op in SINGLE:
            assert collectives.all_reduce(x, axis, op).isnan().nonzero().flatten().tolist() == list(range(n)), op
    # A conjugate or negative view holds other numbers than it shows.
    z = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, float(me)]))
    expected = torch.stack([torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, float(i)])) for i in range(n)])
    assert torch.equal(collectives.all_reduce(z.conj(), axis), expected.conj().sum(0))
    assert torch.equal(collectives.all_gather(z.conj().imag, axis, 0, (2,) * n), expected.conj().imag.reshape(-1))
    wide = z.to(torch.complex128).repeat(9000)  # travels as bytes, and is too much for one round
    gathered = collectives.all_gather(wide.conj()[None], axis, 0, (1,) * n)
    assert torch.equal(gathered, expected.to(torch.complex128).repeat(1, 9000).conj())
    # All ranks get the same bits, whatever the rounding.
    for dtype in FLOATS:
        for size in (7, 50_000):
            for op in ("sum", "avg", "product"):
                torch.manual_seed(me)
                mine = collectives.all_reduce(torch.randn(size).to(dtype), axis, op)
                everyone = collectives.all_gather(mine[None], axis, 0, (1,) * n)
                assert all(torch.equal(row, mine) for row in everyone)
    # Half precision is accumulated in single: 256 + n ones, one by one, would stay at 256 in bfloat16.
    x = torch.full((n,), 256.0 if me == 0 else 1.0, dtype=torch.bfloat16)
    assert collectives.reduce_scatter(x, axis, 0, (1,) * n).item() == torch.tensor(255.0 + n).bfloat16().item()


def history() -> None:
    axis = world_axis()
    n = axis.size
    x = torch.ones(4, n, requires_grad=True)
    ones = (1,) * n
    for result in (
        collectives.all_reduce(x, axis),
        collectives.all_gather(x, axis, 0, (4,) * n),
        collectives.reduce_scatter(x, axis, 1, ones),
        collectives.all_to_all(x, axis, 1, ones, 0, (4,) * n),
        collectives.broadcast(x, axis, 0),
    ):
        assert not result.requires_grad


def started() -> None:
    axis = world_axis()
    n, me = axis.size, axis.index
    x = torch.full((n, 3), float(me + 1))
    pending = [
        collectives.all_reduce_start(x, axis, "max"),
        collectives.all_gather_start(x, axis, 1, (3,) * n),
        collectives.reduce_scatter_start(x, axis, 0, (1,) * n, "avg"),
        collectives.all_to_all_start(x, axis, 0, (1,) * n, 1, (3,) * n),
    ]
    exchanged = collectives.exchange_start([x[i] for i in range(n)], axis, [(3,)] * n, x)
    assert repr(pending[0]).startswith("<all_reduce on Axis(")
    results = [each.wait() for each in pending]
    assert repr(pending[0]).endswith(", done>")
    assert torch.equal(results[0], torch.full((n, 3), float(n)))
    assert torch.equal(results[1], torch.arange(1.0, n + 1).repeat_interleave(3).expand(n, -1))
    assert torch.equal(results[2], torch.full((1, 3), (n + 1) / 2))
    assert torch.equal(results[3], torch.arange(1.0, n + 1).repeat_interleave(3)[None])
    assert [part.tolist() for part in exchanged.wait()] == [[i + 1.0] * 3 for i in range(n)]
    assert all(each.wait() is result for each, result in zip(pending, results, strict=True))  # the second time


def refusals() -> None:
    axis = world_axis()
    n = axis.size
    x = torch.ones(n, 3)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: collectives.all_reduce(x, axis, "mean"), "'mean' is not a reduction"),
        (lambda: collectives.all_reduce(x.int(), axis, "avg"), "cannot reduce torch.int32 with avg"),
        (lambda: collectives.all_reduce(x.bool(), axis, "avg"), "cannot reduce torch.bool with avg"),
        (lambda: collectives.all_reduce(x.cfloat(), axis, "max"), "cannot reduce torch.complex64 with max"),
        (lambda: collectives.reduce_scatter(x.to(torch.float8_e5m2), axis, 0, (1,) * n), "cannot reduce torch.float8"),
        (lambda: collectives.all_gather(x, axis, 0, (n,) * (n - 1)), "does not fit sizes"),
        (lambda: collectives.all_gather(x, axis, 0, (1,) * n), "does not fit sizes"),
        (lambda: collectives.all_gather(x, axis, 2, (1,) * n), "does not fit sizes"),
        (lambda: collectives.reduce_scatter(x, axis, 1, (1,) * n), "does not fit sizes"),
        (lambda: collectives.all_to_all(x, axis, 0, (1,) * n, 1, (2,) * n), "does not fit sizes"),
        (lambda: collectives.all_to_all(torch.ones(n), axis, 0, (1,) * n, 0, (n,) * n), "must differ"),
        (lambda: collectives.exchange([None], axis, [None] * n, x), "one piece and one shape per rank"),
        (lambda: collectives.exchange([x] * n, axis, [(1,)] * n, x), "that this rank keeps"),
        (lambda: collectives.scatter([x], axis, axis.index, (1,), x), "one part per rank"),
        (lambda: collectives.scatter([x] * n, axis, axis.index, (1,), x), "keeps"),
    ]
    for call, message in cases:
        with pytest.raises(CommError, match=message):
            call()
    collectives.all_reduce(x, axis)  # nothing was sent meanwhile


@pytest.mark.parametrize("case", [special_values, history, started])
def test_on_four_ranks(case: Callable[[], None]) -> None:
    run_ranks(4, case)


def test_refusals() -> None:
    run_ranks(2, refusals)


def one_rank() -> None:
    axis = world_axis()
    x = torch.ones(2, 3)
    assert collectives.all_reduce(x, axis, "max") is x
    assert collectives.all_gather(x, axis, 0, (2,)) is x
    assert collectives.reduce_scatter(x, axis, 1, (3,)) is x
    assert collectives.all_to_all(x, axis, 0, (2,), 1, (3,)) is x
    assert collectives.broadcast(x, axis, 0) is x
    assert collectives.scatter([x], axis, 0, (2, 3), x) is x
    assert collectives.exchange([x], axis, [(2, 3)], x)[0] is x
    assert collectives.exchange([None], axis, [None], x)[0].shape == (0,)
    assert collectives.all_gather_start(x, axis, 0, (2,)).wait() is x


def test_one_rank_gets_its_input_back() -> None:
    run_ranks(1, one_rank)


def late() -> None:
    """One rank leaves the common order: the other gets a typed error that says what it was doing."""
    mesh = DeviceMesh("cpu", [1, 0])  # an order that takes a group of its own, to be spoilt here
    axis = axis_of(mesh, 0)
    collectives.all_reduce(torch.ones(2), axis)
    assert axis.group is not None
    axis.group.set_timeout(timedelta(seconds=0.5))
    if dist.get_rank() == 0:
        with pytest.raises(CommTimeout, match=r"all_gather on Axis\('dim0', ranks \[1, 0\], here 1\) failed on rank 0"):
            collectives.all_gather(torch.ones(2), axis, 0, (2, 2))
    dist.barrier()


def test_a_missing_rank_is_an_error_that_names_the_collective() -> None:
    run_ranks(2, late)
