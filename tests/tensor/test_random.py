"""What random operations draw: distributions, precision, memory, parameters, and that ranks stay in step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ranks import device_type, fresh_values, run_ranks
from terrazzo.errors import RandomStateError
from terrazzo.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    counter,
    distribute_tensor,
    generator_check,
    init_device_mesh,
    rand,
    randn,
    random,
)
from tests.tensor.sweep.placing import distribute

pytestmark = pytest.mark.on_late

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MANY = 1 << 18


def line() -> Any:
    return init_device_mesh(device_type(), (dist.get_world_size(),))


def of(plain: torch.Tensor, placement: Placement | None = None) -> DTensor:
    return distribute_tensor(plain, line(), [placement or Shard(0)])


def numbers(dtype: torch.dtype, count: int = MANY) -> Any:
    return of(torch.zeros(count, dtype=dtype))


# ------------------------------------------------------------------ distributions


def close_to(drawn: torch.Tensor, cumulative: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Kolmogorov and Smirnov: the values are not farther from the distribution than 1 in 10**6 tries brings them."""
    ordered = cumulative(drawn.double().sort().values)
    steps = torch.arange(len(ordered) + 1, dtype=torch.float64) / len(ordered)
    distance = max((ordered - steps[:-1]).abs().max().item(), (steps[1:] - ordered).abs().max().item())
    return distance * math.sqrt(len(ordered)) < 2.7


CONTINUOUS: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "rand": (torch.rand_like, lambda x: x),
    "randn": (torch.randn_like, torch.special.ndtr),
    "uniform_": (lambda x: x.uniform_(-2, 6), lambda x: (x + 2) / 8),
    "normal_": (lambda x: x.normal_(3, 2), lambda x: torch.special.ndtr((x - 3) / 2)),
    "exponential_": (lambda x: x.exponential_(0.5), lambda x: 1 - torch.exp(-x / 2)),
    "cauchy_": (lambda x: x.cauchy_(1, 2), lambda x: 0.5 + torch.atan((x - 1) / 2) / math.pi),
    "log_normal_": (lambda x: x.log_normal_(0.5, 0.25), lambda x: torch.special.ndtr((x.log() - 0.5) * 4)),
}


def distributions() -> None:
    for name, (draw, cumulative) in CONTINUOUS.items():
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(1)
            drawn = draw(numbers(dtype)).to_local()
            assert drawn.isfinite().all() and close_to(drawn, cumulative), (name, dtype)
            assert drawn.unique().numel() > 0.97 * MANY, (name, dtype)
        for dtype in (torch.float16, torch.bfloat16):
            torch.manual_seed(1)
            coarse = draw(numbers(dtype)).to_local().double()
            within = coarse[coarse.abs() < 100]
            torch.manual_seed(1)
            fine = draw(numbers(torch.float32)).to_local().double()[coarse.abs() < 100]
            assert abs((within - fine).mean()) < 0.03, (name, dtype)  # digits that are cut off
    for dtype in FLOATS:
        uniform = torch.rand_like(numbers(dtype)).to_local()
        digits = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}[dtype]
        units = uniform.double() * 2.0**digits
        assert 0 <= units.min() and units.max() < 2.0**digits and torch.equal(units, units.round())
        for bit in range(digits):  # every digit is random
            share = (units / 2.0**bit).floor().remainder(2).mean().item()
            assert abs(share - 0.5) < 5.5 * 0.5 / math.sqrt(MANY), (dtype, bit)
        for low, high in ((1, 3), (-1, 0), (7, 7)):
            ranged = numbers(dtype).uniform_(low, high).to_local()
            assert low <= ranged.min() and (ranged.max() < high or low == high), (dtype, low, high)
        assert numbers(dtype).exponential_().to_local().min() > 0
        assert numbers(dtype).geometric_(0.9).to_local().min() == 1
    complex_ = torch.randn_like(numbers(torch.complex64)).to_local()
    for part in (complex_.real, complex_.imag):
        assert close_to(part, lambda x: torch.special.ndtr(x * math.sqrt(2)))
    assert abs((complex_.real * complex_.imag).mean()) < 3 / math.sqrt(MANY)
    assert close_to(torch.rand_like(numbers(torch.complex128)).to_local().imag, lambda x: x)


def test_distributions() -> None:
    run_ranks(1, distributions)


class Extremes:
    """The words at the ends and in the middle, in all combinations, in place of random ones."""

    corners = (-(1 << 31), -(1 << 31) + 1, -1, 0, 1, (1 << 31) - 2, (1 << 31) - 1)

    def word(self, number: int = 0) -> torch.Tensor:
        rows = list(itertools.product(self.corners, repeat=4))
        return torch.tensor([row[number] for row in rows], dtype=torch.int32)


def test_the_most_extreme_words_give_values_of_the_distribution() -> None:
    words: Any = Extremes()
    for dtype in FLOATS:
        unit = random.standard_uniform(words, dtype).to(dtype)
        assert unit.min() == 0 and unit.max() < 1
        bell = random.standard_normal(words, dtype).to(dtype)
        assert bell.isfinite().all() and bell.abs().max() > 6
        waiting = random.standard_exponential(words, dtype).to(dtype)
        assert waiting.min() > 0 and waiting.isfinite().all() and waiting.max() > 20
        centred = random.centred_uniform(words, dtype)
        assert centred.abs().min() > 0 and centred.abs().max() <= 0.5
    assert not random.true_with(words, 0.0).any() and random.true_with(words, 1.0).all()


def counted() -> None:
    for dtype in (torch.int64, torch.float32, torch.uint8):
        drawn = numbers(dtype).random_(3, 10).to_local().long()
        counts = torch.bincount(drawn, minlength=10)
        assert counts[:3].sum() == 0 and len(counts) == 10
        assert (counts[3:] - MANY / 7).abs().max() < 6 * math.sqrt(MANY / 7)
    for dtype, largest in ((torch.int8, 127), (torch.uint8, 255), (torch.bool, 1), (torch.bfloat16, 256)):
        drawn = numbers(dtype).random_().to_local()
        assert drawn.min() == 0 and drawn.max() == largest, dtype  # the largest is drawn too, as in PyTorch
    top = (1 << 63) - 1
    for low, high in ((0, top), (-(1 << 63), top), (-(1 << 63), 0), (-5, (1 << 40) + 7), (-(1 << 62), top)):
        drawn = numbers(torch.int64).random_(low, high).to_local().double()
        assert low <= drawn.min() and drawn.max() <= high
        if high - low <= 1 << 63:
            assert close_to(drawn, lambda x: (x - low) / (high - low)), (low, high)  # noqa: B023
    assert torch.randint_like(numbers(torch.float32), -2, 2).to_local().unique().tolist() == [-2, -1, 0, 1]
    for p in (0.0, 1e-4, 0.3, 1.0):
        for drawn in (
            numbers(torch.bool).bernoulli_(p),
            numbers(torch.float32).bernoulli_(p),
            torch.bernoulli(numbers(torch.float32), p),
            torch.bernoulli(numbers(torch.float32) + p),
            torch.bernoulli(numbers(torch.float64) + p),
            numbers(torch.int32).bernoulli_(numbers(torch.float32) + p),
        ):
            share = drawn.to_local().double().mean().item()
            assert abs(share - p) <= 6 * math.sqrt(p * (1 - p) / MANY), p
    small = numbers(torch.float64).geometric_(1e-12).to_local()
    assert close_to(small, lambda x: 1 - torch.exp(-x * 1e-12))
    half = numbers(torch.int64).geometric_(0.5).to_local()
    for k in (1, 2, 3):
        assert abs((half == k).double().mean() - 0.5**k) < 6 * 0.5 / math.sqrt(MANY)


def test_integers_and_chances() -> None:
    run_ranks(1, counted)


def parameters_that_do_not_exist() -> None:
    calls: list[tuple[torch.dtype, Callable[[Any], Any]]] = [
        (torch.float32, lambda x: x.uniform_(3, 1)),
        (torch.float32, lambda x: x.normal_(0, -1)),
        (torch.float32, lambda x: x.exponential_(-1)),
        (torch.float32, lambda x: x.geometric_(1.0)),
        (torch.float32, lambda x: x.geometric_(0.0)),
        (torch.float32, lambda x: x.log_normal_(0, -1)),
        (torch.float32, lambda x: x.cauchy_(0, -1)),
        (torch.float32, lambda x: x.bernoulli_(1.5)),
        (torch.float32, lambda x: torch.bernoulli(x, -0.5)),
        (torch.uint8, lambda x: x.random_(0, 300)),
        (torch.uint8, lambda x: x.random_(5, 5)),
        (torch.uint8, lambda x: torch.randint_like(x, 300)),
        (torch.int32, lambda x: torch.rand_like(x)),
        (torch.int64, lambda x: x.exponential_()),
        (torch.float32, lambda x: torch.dropout(x, 2.0, True)),
        (torch.float32, lambda x: F.dropout(x, -0.5)),
        (torch.float32, lambda x: F.alpha_dropout(x, 1.5, training=True)),
        (torch.int64, lambda x: F.dropout(x, 0.5)),
    ]
    for dtype, call in calls:
        plain = torch.zeros(4, dtype=dtype)
        with pytest.raises(Exception) as expected:
            call(plain.clone())
        with pytest.raises(type(expected.value)) as found:
            call(of(plain))
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.cpu_only("an accelerator finds out later")
def test_parameters_that_do_not_exist_raise_what_pytorch_raises() -> None:
    run_ranks(1, parameters_that_do_not_exist)


# ------------------------------------------------------------------ dropout


def dropping() -> None:
    for placement in (Shard(0), Replicate(), Partial()):
        x = distribute(torch.randn(8, 4, 6), line(), [placement])
        state = torch.get_rng_state()
        for same in (
            F.dropout(x, 0.0, True),
            F.dropout(x, 0.5, False),
            F.dropout(x, 0.0, True, True),
            torch.dropout(x, 0.0, True),
            torch.nn.Dropout(0.0)(x),
            torch.nn.Dropout(0.5).eval()(x),
            torch.feature_dropout(x, 0.5, False),
            F.alpha_dropout(x, 0.0, True),
            torch.feature_alpha_dropout(x, 0.5, False),
        ):
            assert same is x, "PyTorch returns its argument, too"
        for nothing in (F.dropout(x, 1.0), F.alpha_dropout(x, 1.0, True), torch.feature_dropout(x, 1.0, True)):
            assert not nothing.full_tensor().any()
        assert not F.dropout(x.clone(), 1.0, inplace=True).full_tensor().any()
        assert torch.equal(torch.get_rng_state(), state), "no number is drawn"
    x = of(torch.randn(40, 50)).requires_grad_()
    y = F.dropout(x, 0.25)
    y.sum().backward()
    kept = y.to_local() != 0
    torch.testing.assert_close(y.to_local(), x.to_local() / 0.75 * kept)
    torch.testing.assert_close(x.grad.to_local(), kept / 0.75)
    dropped, mask = torch.native_dropout(x.detach(), 0.25, True)
    assert torch.equal(dropped.to_local() != 0, mask.to_local())
    for features in (
        F.dropout2d(of(torch.ones(64, 32, 3, 3)), 0.5),
        F.feature_alpha_dropout(of(torch.ones(64, 32, 3)), 0.5, True),
    ):
        flat = features.full_tensor().flatten(2)
        assert torch.equal(flat, flat[..., :1].expand_as(flat)) and flat.unique().numel() == 2
    infinite = F.dropout(of(torch.full((100,), math.inf)), 0.5).full_tensor()
    assert infinite.isnan().any() and infinite.isinf().any()  # as PyTorch: infinity times 0 is not a number


def test_dropout() -> None:
    run_ranks(2, dropping)


class Peak(TorchDispatchMode):
    """The most bytes that results of operations held at one time, and which operations had made these."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.held: Counter[str] = Counter()
        self.held_most: Counter[str] = Counter()
        self._storages = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:  # a plan's, which take no memory
                storage = tensor.untyped_storage()
                if storage not in self._storages:
                    self._storages[storage] = Freed(self, str(func), storage.nbytes())
        if self.now > self.most:
            self.most, self.held_most = self.now, self.held.copy()
        return result


class Freed:
    """Counts bytes for as long as it lives."""

    def __init__(self, peak: Peak, name: str, nbytes: int) -> None:
        self._peak, self._name, self._nbytes = peak, name, nbytes
        peak.now += nbytes
        peak.held[name] += nbytes

    def __del__(self) -> None:
        self._peak.now -= self._nbytes
        self._peak.held[self._name] -= self._nbytes


@contextmanager
def bytes_an_element(limit: float, count: int, name: str) -> Iterator[None]:
    with Peak() as peak:
        yield
    assert peak.most <= limit * count + (1 << 17), (
        f"{name} needs {peak.most / count:.2f} bytes an element, {limit} are allowed: {peak.held_most.most_common(5)}"
    )


def memory(device_pieces: bool) -> None:
    count = 1 << 20
    mesh = line()
    x = distribute_tensor(torch.randn(count), mesh, [Shard(0)])
    # Of a whole piece, as for a tensor of 4 million elements on an accelerator; else next to nothing but the result.
    counter.PIECE = count if device_pieces else 1 << 14
    word = 12 if device_pieces else 1
    try:
        cases: list[tuple[str, float, Callable[[], Any]]] = [
            ("dropout", 1 + max(word, 4), lambda: F.dropout(x, 0.1)),
            ("rand", 4 + word + (4 if device_pieces else 0), lambda: rand(count, device_mesh=mesh)),
            ("randn", 4 + word + (8 if device_pieces else 1), lambda: randn(count, device_mesh=mesh)),
            ("bernoulli_", 4 + word + (9 if device_pieces else 1), lambda: x.bernoulli_(0.5)),
            ("uniform_", 4 + word + (9 if device_pieces else 1), lambda: x.uniform_(1, 2)),
            ("normal_", 4 + word + (12 if device_pieces else 1), lambda: x.normal_(1, 2)),
            ("exponential_", 4 + word + (8 if device_pieces else 1), lambda: x.exponential_()),
            ("random_", 4 + word + (20 if device_pieces else 1), lambda: x.random_(0, 10)),
        ]
        for name, limit, draw in cases:
            with bytes_an_element(limit, count, name):
                draw()
    finally:
        counter.PIECE = 1 << 16


@pytest.mark.cpu_only("memory of the CPU's kernels")
@pytest.mark.parametrize("device_pieces", [False, True])
def test_memory(device_pieces: bool) -> None:
    """A draw needs its result and 12 bytes for each element of a piece, and what the distribution makes of these."""
    run_ranks(1, memory, device_pieces)


# ------------------------------------------------------------------ generators in step


def drifted() -> None:
    mesh = line()
    rank = dist.get_rank()
    draw = lambda: rand(4, device_mesh=mesh, placements=[Shard(0)])  # noqa: E731

    def raises(draws: int) -> bool:
        try:
            for _ in range(draws):
                draw()
        except RandomStateError as error:
            assert "not in the same state" in str(error)
            return True
        return False

    def reported(draws: int) -> int:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, raises(draws))
        return sum(found)

    torch.manual_seed(1000)
    assert reported(3 * generator_check.EVERY) == 0
    # Another seed on each rank is seen at the first draw, by all but the first that comes.
    torch.manual_seed(2000 + rank)
    found_first = reported(1)
    assert found_first >= 1
    # The others said so, and the first one hears of it when it next compares.
    torch.manual_seed(3000)
    assert found_first + reported(1) == dist.get_world_size()
    assert reported(2 * generator_check.EVERY) == 0
    # A number that one rank alone draws.
    torch.manual_seed(4000)
    assert reported(10) == 0
    if rank == 1:
        torch.rand(1)
    assert any(reported(generator_check.EVERY) for _ in range(20)), "soon: an answer is looked at when it has come"
    # A generator of one's own that differs.
    torch.manual_seed(5000)
    own = torch.Generator().manual_seed(6000 + rank)
    x = draw_quietly(draw)
    try:
        x.normal_(generator=own)
        found = False
    except RandomStateError:
        found = True
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    assert any(everywhere)


def draw_quietly(draw: Callable[[], Any]) -> Any:
    while True:  # what is left of the errors before
        try:
            return draw()
        except RandomStateError:
            pass


@pytest.mark.cpu_only("draws from the CPU's generator")
def test_generators_that_drifted_apart_are_reported() -> None:
    fresh_values(2, drifted, timeout=120)  # not those of other tests, which would hear of it later


def drawn_by_threads() -> list[list[float]]:
    """Two threads with generators of their own, which take turns in another order on each rank."""
    mesh = init_device_mesh("cpu", (2,))
    values: dict[int, Any] = {}

    def draw(seed: int) -> None:
        x = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)])
        values[seed] = x.normal_(generator=torch.Generator().manual_seed(seed)).to_local().tolist()

    for seed in (7001, 7002) if dist.get_rank() else (7002, 7001):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(draw, seed).result()
    return [values[7001], values[7002]]


@pytest.mark.cpu_only("draws from the CPU's generator")
def test_threads_draw_from_generators_of_their_own_in_any_order() -> None:
    fresh_values(2, drawn_by_threads, timeout=120)


def drawn_alone() -> None:
    """Ranks draw on their own meshes as often as they like, and nobody waits for those who do not draw at all."""
    whole = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("stage", "data"))
    stage, rank = whole["data"], dist.get_rank()
    torch.manual_seed(77 + rank // 2)
    for _ in range(generator_check.EVERY * (1 + rank // 2) + 3):
        rand(2, device_mesh=stage, placements=[Shard(0)])
    torch.manual_seed(78)
    for turn in range(2):
        if (rank > 0) == turn:  # rank 0 does not wait for the others, who come only later
            for _ in range(generator_check.EVERY + 1):
                rand(2, device_mesh=whole, placements=[Replicate(), Replicate()])
        dist.barrier()


def test_ranks_that_draw_differently_often_do_not_wait_for_each_other() -> None:
    run_ranks(4, drawn_alone)


def results_are_there() -> None:
    x = distribute_tensor(torch.randn(16), line(), [Shard(0)])
    torch.manual_seed(9)
    F.dropout(x, 0.5)
    there: list[bool] = []
    original = generator_check._Drawn._look

    def look(self: Any, started: Any) -> None:
        there.append(started.done())
        original(self, started)

    generator_check._Drawn._look = look  # type: ignore[method-assign]
    seen = torch.zeros(1)
    try:
        while not seen:  # a busy machine's store may answer late; the test's own time limit ends this
            for _ in range(generator_check.EVERY):
                F.dropout(x, 0.5)
            seen[0] = len(there)
            dist.all_reduce(seen, dist.ReduceOp.MIN)
    finally:
        generator_check._Drawn._look = original  # type: ignore[method-assign]
    assert there and all(there)


def test_a_comparison_is_only_looked_at_when_its_result_is_there() -> None:
    run_ranks(2, results_are_there)
