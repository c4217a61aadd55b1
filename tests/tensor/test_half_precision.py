"""float16 and bfloat16 over sharded dims: as accurate as on one device, forward and backward, at real sizes.

Every case runs in the half type on one device, in float64 on one device, and distributed. What is distributed may err
twice as much as one device does, or by one unit in the last place where one device happens to be exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ranks import run_ranks
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, explain, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.parallel import loss_parallel

R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
HALF = (torch.float16, torch.bfloat16)
INF = float("inf")
MANY, SOME = 1_000_003, 100_003  # neither two nor four ranks hold equal parts


def whole(value: Any) -> torch.Tensor:
    return value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()


def ulp(value: torch.Tensor, dtype: torch.dtype) -> float:
    """The distance of numbers of `dtype` where `value` is largest."""
    top = value[value.isfinite()].abs().max().item() if value.isfinite().any() else 0.0
    info = torch.finfo(dtype)
    return max(info.eps * 2.0 ** math.floor(math.log2(top)) if top else 0.0, info.smallest_normal * info.eps)


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    if not exact.numel():
        return 0.0
    value = value.double()
    worst = (value - exact).abs().max().item()  # nan if any is
    if math.isfinite(worst):
        return worst
    away = torch.where((value == exact) | (value.isnan() & exact.isnan()), 0.0, (value - exact).abs())
    return away.nan_to_num(nan=INF).max().item()


class OneDevice:
    """A result of one device, and the exact one: how far others may be off."""

    def __init__(self, one: torch.Tensor, exact: torch.Tensor) -> None:
        self.one = one.detach()
        self.exact = torch.where(exact.abs() > torch.finfo(one.dtype).max, exact.sign() * INF, exact).detach()
        self.error = error(self.one, self.exact)
        self.allowed = max(2 * self.error, ulp(self.exact, one.dtype))

    def compare(self, ours: Any, what: str) -> None:
        assert ours.dtype == self.one.dtype, f"{what}: {ours.dtype}, on one device {self.one.dtype}"
        found = error(whole(ours), self.exact)
        assert found <= self.allowed, (
            f"{what}: errs by {found}, one device by {self.error}, exact is {self.exact.flatten()[:4]}"
        )


def as_accurate(ours: Any, one: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    OneDevice(one, exact).compare(ours, what)


@dataclass
class Case:
    """A function of `x` and of parameters that are replicated."""

    name: str
    function: Callable[..., Any]
    x: Callable[[], torch.Tensor]
    parameters: Sequence[Callable[[], torch.Tensor]] = ()
    backward: bool = True


def results(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], backward: bool
) -> tuple[list[Any], list[Any]]:
    """The results, and the gradients of the inputs for cotangents that are the same in every form."""
    inputs = [t.detach().requires_grad_(backward) for t in inputs]
    outs = function(*inputs)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    if not backward:
        return outs, []
    torch.manual_seed(7)
    for i, out in enumerate(outs):
        cotangent = (torch.randn(out.shape) * 4).round().div(4).add(0.5)
        if isinstance(out, DTensor):
            given: Any = distribute_tensor(cotangent.to(out.dtype), out.device_mesh, [R] * out.device_mesh.ndim)
        else:
            given = cotangent.to(out.dtype)
        out.backward(given, retain_graph=i + 1 < len(outs))
    return outs, [t.grad for t in inputs]


def check(cases: Iterable[Case], meshes: dict[tuple[int, ...], list[list[Any]]]) -> None:
    placed_on = [(init_device_mesh("cpu", shape), where) for shape, all_of in meshes.items() for where in all_of]
    for case in cases:
        for dtype in HALF:
            torch.manual_seed(1)
            inputs = [make().to(dtype) for make in (case.x, *case.parameters)]
            one, one_grads = results(case.function, inputs, case.backward)
            exact, exact_grads = results(case.function, [t.double() for t in inputs], case.backward)
            expected = [OneDevice(*pair) for pair in zip(one, exact, strict=True)]
            expected_grads = [OneDevice(*pair) for pair in zip(one_grads, exact_grads, strict=True)]
            for mesh, where in placed_on:
                if any(isinstance(p, Shard) and p.dim >= inputs[0].ndim for p in where):
                    continue
                placed = [_placed(inputs[0], mesh, where)]
                placed += [distribute_tensor(t, mesh, [R] * mesh.ndim) for t in inputs[1:]]
                ours, grads = results(case.function, placed, case.backward)
                what = f"{case.name} of {dtype} {tuple(inputs[0].shape)} as {where}"
                for mine, of_one in zip(ours, expected, strict=True):
                    of_one.compare(mine, what)
                for i, (mine, of_one) in enumerate(zip(grads, expected_grads, strict=True)):
                    of_one.compare(mine, f"{what}, gradient {i}")


def _placed(x: torch.Tensor, mesh: Any, where: Sequence[Any]) -> DTensor:
    shards = distribute_tensor(x, mesh, [R if p is P else p for p in where])
    return shards.redistribute(placements=where).detach()


# Every placement on a line of two ranks; on four ranks a line and a square.
MESHES: dict[int, dict[tuple[int, ...], list[list[Any]]]] = {
    2: {(2,): [[S0], [S1], [P]]},
    4: {(4,): [[S0], [S1]], (2, 2): [[S0, S1], [S0, S0], [R, S0], [P, S0], [S1, P]]},
}


def many(scale: float = 1.0, shift: float = 0.0) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(MANY) * scale + shift


def some(scale: float = 1.0, shift: float = 0.0) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(SOME) * scale + shift


def cancelling() -> torch.Tensor:
    """Sums of either half, and of each quarter, are beyond float16; that of all is not."""
    x = torch.ones(SOME) * 3
    x[SOME // 2 :] = -3
    return x + torch.randn(SOME) / 8


def grid() -> torch.Tensor:
    return torch.randn(5, 7_001) * 2


def with_nans() -> torch.Tensor:
    x = torch.randn(5, 7_001) * 2
    x[x > 4] = float("nan")
    return x


def reductions() -> Iterator[Case]:
    yield Case("sum", lambda x: x.sum(), many())
    yield Case("sum that cancels", lambda x: x.sum(), cancelling)
    yield Case("sum of rows that cancel", lambda x: x.sum(1), lambda: cancelling().repeat(2).view(2, -1))
    yield Case("sum along columns", lambda x: x.sum(0, keepdim=True), lambda: grid().T.contiguous())
    yield Case("sum to float16", lambda x: x.sum(dtype=torch.float16), cancelling)
    yield Case("mean", lambda x: x.mean(), some())
    yield Case("mean of large values", lambda x: x.mean(), many(3, 300))
    yield Case("mean that cancels", lambda x: x.mean(), cancelling)
    yield Case("mean of rows", lambda x: x.mean(-1), grid)
    yield Case("nansum", lambda x: x.nansum(1), with_nans)
    yield Case("nanmean", lambda x: x.nanmean(1), with_nans)
    yield Case("prod", lambda x: x.prod(), lambda: 1 + torch.randn(1003) / 64)
    yield Case("logsumexp", lambda x: x.logsumexp(0), some())
    yield Case("logsumexp of rows", lambda x: x.logsumexp((0, 1)), grid)
    yield Case("dot", torch.dot, some(), [some()])
    yield Case("dot that cancels", torch.vdot, cancelling, [lambda: torch.ones(SOME)])
    yield Case("product of vectors", lambda x, w: x @ w, some(), [some()])
    yield Case("trace", lambda x: x.trace(), lambda: torch.randn(301, 301) * 300)


def norms() -> Iterator[Case]:
    for order in (2, 1, 3, 0.5, INF, -INF, 0, -1):
        scale = 0.2 if order in (1, 0.5) else 1.0
        spread = 0.5 if order == -1 else 0.0
        x = (lambda n, s, o: lambda: (torch.randn(n).abs() + o) * s)(MANY if order == 2 else SOME, scale, spread)
        if order == 0.5:
            x = lambda: torch.randn(3001) / 4096  # noqa: E731
        rows = lambda: torch.rand(5, 3001) / 8 + 0.25  # noqa: E731
        # PyTorch's norm of order 0 has no gradient.
        yield Case(f"norm {order}", lambda x, p=order: torch.linalg.vector_norm(x, p), x, backward=order != 0)
        yield Case(f"norm {order} of rows", lambda x, p=order: x.norm(p, 1), rows, backward=order != 0)
    yield Case("norm of large values", lambda x: x.norm(), lambda: torch.randn(20_001) * 300)
    yield Case("norm that is kept", lambda x: x.norm(dim=0, keepdim=True), grid)
    yield Case("Frobenius norm", lambda x: torch.linalg.matrix_norm(x), grid)
    yield Case("largest column sum", lambda x: torch.linalg.matrix_norm(x, 1), lambda: torch.randn(20_001, 5))
    yield Case("least row sum", lambda x: torch.linalg.norm(x, -INF), lambda: torch.randn(5, 20_001))
    yield Case("norm of a matrix", lambda x: torch.linalg.norm(x), grid)
    yield Case("distance", lambda x: torch.dist(x, x.detach() * 3, 2), lambda: torch.randn(20_001) * 200)
    yield Case("normalize", lambda x: F.normalize(x, dim=1), lambda: torch.randn(5, 30_001) * 300)
    yield Case("cosine similarity", lambda x: F.cosine_similarity(x, x.detach().flip(0), 1), grid)


def statistics() -> Iterator[Case]:
    for scale, shift in ((1.0, 0.0), (200.0, 100.0)):
        about = f" of values of {scale}"
        yield Case("var" + about, lambda x: x.var(), many(scale, shift))
        yield Case("std" + about, lambda x: x.std(), some(scale, shift))
        yield Case("var_mean" + about, lambda x: torch.var_mean(x, 1), lambda s=scale, h=shift: grid() * s + h)
        yield Case("std_mean" + about, lambda x: torch.std_mean(x, 1), lambda s=scale, h=shift: grid() * s + h)
    yield Case("var without correction", lambda x: x.var((0, 1), correction=0, keepdim=True), grid)
    yield Case("std far from 0", lambda x: x.std(), some(1, 60))


def losses() -> Iterator[Case]:
    def target(x: torch.Tensor) -> torch.Tensor:
        return (x.detach() * 0.5).round()

    scaled: list[tuple[str, float, Any]] = [
        ("mean of squares", 1, F.mse_loss),
        ("mean of large squares", 120, F.mse_loss),
        ("mean of distances", 30, F.l1_loss),
        ("smooth loss", 30, F.smooth_l1_loss),
        ("Huber loss", 3, F.huber_loss),
    ]
    for name, scale, function in scaled:
        yield Case(name, lambda x, f=function: f(x, target(x)), some(scale))
    yield Case("sum of squares", lambda x: F.mse_loss(x, x.detach() * 0, reduction="sum"), lambda: torch.randn(30_001))
    yield Case("ones", lambda x: F.mse_loss(x, x.detach() * 0), lambda: torch.ones(200_000))
    yield Case("logits", lambda x: F.binary_cross_entropy_with_logits(x, (x.detach() > 0).to(x.dtype)), some())
    yield Case("soft margins", lambda x: F.soft_margin_loss(x, x.detach().sign()), some())
    yield Case(
        "divergence",
        lambda x: F.kl_div(x, (x.detach() * 0 + 0.25), reduction="batchmean"),
        lambda: torch.randn(400, 500),
    )


def layers() -> Iterator[Case]:
    width = 6001
    weight, bias = (lambda: torch.rand(width) + 0.5), (lambda: torch.randn(width))
    for name, scale, shift in (("", 1.0, 0.0), (" of large values", 300.0, 500.0)):
        x = (lambda s, h: lambda: torch.randn(9, width) * s + h)(scale, shift)
        yield Case("layer norm" + name, lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b), x, (weight, bias))
        yield Case("rms norm" + name, lambda x, w: F.rms_norm(x, x.shape[1:], w, 1e-5), x, (weight,))
    few = (lambda: torch.rand(8) + 0.5), (lambda: torch.randn(8))
    image = lambda: torch.randn(6, 8, 501) * 300 + 100  # noqa: E731
    yield Case("group norm", lambda x, w, b: F.group_norm(x, 4, w, b), image, few)
    yield Case("batch norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), image, few)
    yield Case("instance norm", lambda x, w, b: F.instance_norm(x, None, None, w, b), image, few)
    rows = lambda: torch.randn(7, 30_001) * 3  # noqa: E731
    yield Case("softmax", lambda x: F.softmax(x, 1) * 4096, rows)
    yield Case("log_softmax", lambda x: F.log_softmax(x, 1), rows)
    yield Case("softmax of columns", lambda x: F.softmax(x, 0), rows)


def check_named(name: str, world: int) -> None:
    check(CASES[name](), MESHES[world])


# ------------------------------------------------------------------ classification


def brought(target: torch.Tensor, x: Any) -> Any:
    """The same on every rank where `x` is distributed."""
    return distribute_tensor(target, x.device_mesh, [R] * x.device_mesh.ndim) if isinstance(x, DTensor) else target


def classification() -> Iterator[Case]:
    rows, classes = 20_003, 13
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(classes, (rows,), generator=generator)
    some_ignored = torch.where(target == 3, -100, target)
    weight = torch.rand(classes, generator=generator) + 0.5
    shares = torch.rand(rows, classes, generator=generator).softmax(1)

    def logits() -> torch.Tensor:
        return torch.randn(rows, classes) * 8

    def loss(wanted: torch.Tensor, weights: torch.Tensor | None = None, **options: Any) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            given = None if weights is None else brought(weights.to(torch.float16).to(x.dtype), x)
            placed = brought(wanted.to(torch.float16).to(x.dtype) if wanted.is_floating_point() else wanted, x)
            return F.cross_entropy(x, placed, given, **options)

        return run

    yield Case("cross entropy", loss(target), logits)
    yield Case("cross entropy without some", loss(some_ignored), logits)
    yield Case("cross entropy with weights", loss(some_ignored, weight), logits)
    yield Case("cross entropy, smoothed", loss(target, label_smoothing=0.2), logits)
    yield Case("cross entropy, smoothed with weights", loss(some_ignored, weight, label_smoothing=0.2), logits)
    yield Case("cross entropy of probabilities", loss(shares), logits)
    yield Case("cross entropy of each", loss(target, reduction="none"), logits)
    logs = lambda: torch.randn(rows, classes).log_softmax(1)  # noqa: E731
    yield Case("nll", lambda x: F.nll_loss(x, brought(target, x)), logs)
    yield Case("sum of nll", lambda x: F.nll_loss(x, brought(target, x), reduction="sum"), logs)


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "reductions": reductions, "norms": norms, "statistics": statistics, "losses": losses, "layers": layers,
    "classification": classification,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "world"),
    [pytest.param(name, world, marks=[pytest.mark.long] if world == 4 else []) for world in MESHES for name in CASES],
)
def test_as_accurate_as_one_device(name, world):
    run_ranks(world, check_named, name, world)


def parallel_losses(world: int) -> None:
    """`loss_parallel`, on which classes, samples or both are sharded."""
    samples = torch.randint(50, (3001,), generator=torch.Generator().manual_seed(3))

    def loss(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return F.cross_entropy(x, samples)
        with loss_parallel():
            where = [p if p == S0 else R for p in x.placements]
            return F.cross_entropy(x, distribute_tensor(samples, x.device_mesh, where))

    cases = [Case("parallel cross entropy", loss, lambda: torch.randn(3001, 50) * 20)]
    check(cases, {(2,): [[S1]]} if world == 2 else {(4,): [[S1]], (2, 2): [[S0, S1], [S1, S0]]})


@pytest.mark.parametrize("world", [2, 4])
def test_parallel_losses(world):
    run_ranks(world, parallel_losses, world)


# ------------------------------------------------------------------ clipping, scaling, lists


def gradients(mesh: Any, dtype: torch.dtype, scale: float) -> tuple[list[torch.Tensor], list[Any]]:
    """Parameters with gradients on one device, and the same placed in many ways, one of them a plain tensor."""
    torch.manual_seed(2)
    plain, placed = [], []
    ways = [[S0], [S1], [R], [S0]] if mesh.ndim == 1 else [[S0, S1], [S0, S0], [R, S1], [S1, R]]
    for shape, where in zip([(301, 7), (8, 100), (5, 5), (1, 3)], ways, strict=True):
        p = torch.zeros(shape, dtype=dtype, requires_grad=True)
        p.grad = (torch.randn(shape) * scale).to(dtype)
        q = distribute_tensor(p.detach(), mesh, where).requires_grad_()
        q.grad = distribute_tensor(p.grad.clone(), mesh, where)
        plain.append(p)
        placed.append(q)
    for params in (plain, placed):
        last = torch.zeros(4, dtype=dtype, requires_grad=True)
        last.grad = torch.full((4,), 1.0, dtype=dtype) * scale
        params.append(last)
    return plain, placed


def clipping(mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    for dtype in HALF:
        for scale, orders in ((0.01, (2.0,)), (12.0, (2.0, 1.0, 3.0, INF)), (300.0, (2.0, INF))):
            for order in orders:  # with 12 the norm is 660, and its square beyond float16
                for foreach in (True, False):
                    what = f"clip {dtype} {scale} {order} {foreach}"
                    plain, placed = gradients(mesh, dtype, scale)
                    exact = [p.grad.double() for p in plain]
                    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in exact]), order)
                    one = nn.utils.clip_grad_norm_(plain, 0.5, order, foreach=foreach)
                    ours = nn.utils.clip_grad_norm_(placed, 0.5, order, foreach=foreach)
                    as_accurate(ours, one, norm, what)
                    if norm > torch.finfo(dtype).max:
                        continue
                    for p, q, g in zip(plain, placed, exact, strict=True):
                        as_accurate(q.grad, p.grad, g * (0.5 / (norm + 1e-6)).clamp(max=1.0), what)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_clipping(mesh_shape):
    run_ranks(math.prod(mesh_shape), clipping, mesh_shape)


def norms_of_lists() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for dtype in HALF:
        for order in (2.0, 1.0, 3.0, INF, 0.0, -INF):
            plain, placed = gradients(mesh, dtype, 50.0)
            expected = torch._foreach_norm([p.grad for p in plain[:-1]], order)
            found = torch._foreach_norm([p.grad for p in placed[:-1]], order)
            for mine, one, p in zip(found, expected, plain[:-1], strict=True):
                exact = torch.linalg.vector_norm(p.grad.double(), order)
                as_accurate(mine, one, exact, f"norm of order {order} in a list")
        grads = [p.grad for p in plain]
        exact = torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in grads]))
        total = nn.utils.get_total_norm([p.grad for p in placed])
        as_accurate(total, nn.utils.get_total_norm(grads), exact, "total norm")
        wide = torch._foreach_norm([p.grad for p in placed[:-1]], 2, dtype=torch.float32)
        assert all(n.dtype is torch.float32 for n in wide)


def test_norms_of_lists():
    run_ranks(4, norms_of_lists)


def scaled_training(rank_of_overflow: int | None, mesh_shape: tuple[int, ...]) -> None:
    """Scale, backward, unscale, clip, step, update: of distributed and plain parameters together."""
    mesh = init_device_mesh("cpu", mesh_shape)
    torch.manual_seed(4)
    weights, bias, x = torch.randn(7, 5), torch.randn(5), torch.randn(6, 7)

    def train(params: list[Any], overflow: bool) -> tuple[torch.amp.GradScaler, list[torch.Tensor], Any]:
        w, b = params
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(params, lr=0.1)
        mine = distribute_tensor(x, mesh, [R] * mesh.ndim) if isinstance(w, DTensor) else x
        loss = ((mine @ w) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.scale((b * b).mean()).backward()
        if overflow:
            w.grad._local[0, 0] = INF
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(params, 0.25)
        scaler.step(optimizer)
        scaler.update()
        return scaler, [whole(p) for p in params], norm

    where = [S0] if mesh.ndim == 1 else [S0, S1]
    for first in (0, 1):  # whichever comes first in the list of gradients
        plain = [weights.clone().requires_grad_(), bias.clone().requires_grad_()]
        mixed: list[Any] = [distribute_tensor(weights, mesh, where).requires_grad_(), bias.clone().requires_grad_()]
        if first:
            mixed.reverse()
            placed_last: list[Any] = [mixed[1], mixed[0]]
            grouped = torch.optim.SGD(mixed, lr=0.1)
            assert isinstance(grouped.param_groups[0]["params"][1], DTensor)
            mixed = placed_last
        overflow = rank_of_overflow is not None and mesh.get_local_rank(0) == rank_of_overflow
        scaler, after, norm = train(mixed, overflow)
        if rank_of_overflow is not None:
            assert scaler.get_scale() == 512.0, "every rank must see the overflow of one"
            for p, before in zip(after, (weights, bias), strict=True):
                assert torch.equal(p, before)
            continue
        expected, of_one, norm_of_one = train(plain, False)
        assert scaler.get_scale() == expected.get_scale() == 1024.0
        torch.testing.assert_close(whole(norm), whole(norm_of_one))
        for p, q in zip(after, of_one, strict=True):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize("rank_of_overflow", [None, 0, 1])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_gradient_scaling(rank_of_overflow, mesh_shape):
    run_ranks(math.prod(mesh_shape), scaled_training, rank_of_overflow, mesh_shape)


# ------------------------------------------------------------------ no needless communication, any order of gradients


def rows_that_stay() -> None:
    mesh = init_device_mesh("cpu", (4,))
    functions: dict[str, Callable[[Any], Any]] = {
        "norm": lambda x: x.norm(dim=1),
        "vector norm": lambda x: torch.linalg.vector_norm(x, 3, 1),
        "matrix norm": lambda x: torch.linalg.matrix_norm(x.view(9, 2, 8)),
        "normalize": lambda x: F.normalize(x, dim=1),
        "var": lambda x: x.var(1),
        "std": lambda x: torch.std(x, dim=1, keepdim=True),
        "var_mean": lambda x: torch.var_mean(x, 1)[0],
        "std_mean": lambda x: torch.std_mean(x, 1)[1],
        "logsumexp": lambda x: x.logsumexp(1),
        "cosine similarity": lambda x: F.cosine_similarity(x, x * 2, 1),
    }
    for dtype in (torch.float32, *HALF):
        values = torch.randn(9, 16).to(dtype)
        for name, function in functions.items():
            plain, placed = values.clone().requires_grad_(), distribute_tensor(values, mesh, [S0]).requires_grad_()
            expected = function(plain)
            expected.backward(torch.ones_like(expected))
            with CommDebugMode() as seen:
                result = function(placed)
                result.backward(torch.ones_like(result))
            assert seen.get_total_counts() == 0, f"{name}: {seen.get_comm_counts()}"
            assert result.placements == (S0,), name
            assert torch.equal(whole(result), expected.detach()), f"{name} is another function than PyTorch's"
            assert torch.equal(whole(placed.grad), plain.grad), name


def test_what_is_not_cut_stays_where_it_is():
    run_ranks(4, rows_that_stay)


def one_reduction_each() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for dtype in HALF:
        x = distribute_tensor(torch.randn(7, 3).to(dtype), mesh, [S0])
        for function in (torch.sum, torch.mean, torch.norm, torch.nansum, torch.prod):
            for _ in range(2):  # with the plan that is kept, too
                with CommDebugMode() as seen:
                    result = function(x)
                assert seen.get_total_counts() == 1, (function, seen.get_comm_counts())
                assert result.placements == (R,)
    x = distribute_tensor(torch.randn(7, 3), mesh, [S0])
    with CommDebugMode() as seen:
        # The same plans, for a type that needs no joining: terms, reduced when they are used.
        assert [f(x).placements for f in (torch.sum, torch.mean, torch.nansum)] == [(P,)] * 3
    assert seen.get_total_counts() == 0


def test_joining_is_one_reduction():
    run_ranks(2, one_reduction_each)


def second_gradients() -> None:
    """In float64, where nothing else differs; and in float16 for what is joined only there."""
    functions: dict[str, Callable[[Any], Any]] = {
        "sum": lambda x: (x * x).sum(),
        "mean": lambda x: (x * x * x).mean(0),
        "norm": lambda x: x.norm(),
        "norm 3": lambda x: torch.linalg.vector_norm(x, 3, 0),
        "var": lambda x: x.var(),
        "std": lambda x: x.std(0),
        "both": lambda x: sum(t.sum() for t in torch.var_mean(x)),
        "loss": lambda x: F.mse_loss(x, x.detach() * 0),
        "layer norm": lambda x: F.layer_norm(x, (7, 6))[:3] * 2,
        "prod": lambda x: x.prod(0),
    }
    for mesh, where in ((init_device_mesh("cpu", (4,)), [S0]), (init_device_mesh("cpu", (2, 2)), [S0, S1])):
        for dtype in (torch.float64, torch.float16):
            for name, function in functions.items():
                torch.manual_seed(5)
                values = (torch.rand(7, 6) + 0.5).to(dtype)
                grads = []
                for x in (values.clone(), distribute_tensor(values, mesh, where), values.double()):
                    x.requires_grad_()
                    out = function(x)
                    (first,) = torch.autograd.grad(out.sum() if out.ndim else out, x, create_graph=True)
                    (first * first).sum().backward()
                    grads.append(x.grad)
                if dtype is torch.float64:
                    torch.testing.assert_close(whole(grads[1]), grads[0], msg=lambda m, n=name: f"{n}: {m}")
                else:
                    # Rounded twice on the way, so this only tells a wrong gradient from a right one.
                    torch.testing.assert_close(whole(grads[1]).double(), grads[2], rtol=0.02, atol=0.02)
    classes_of_no_rank(init_device_mesh("cpu", (4,)))


def classes_of_no_rank(mesh: DeviceMesh) -> None:
    """Six classes on four ranks: the last has none, and takes part in what the others communicate."""
    torch.manual_seed(5)
    values, wanted, weight = torch.randn(4, 6), torch.tensor([1, 0, 5, 2]), torch.rand(6)
    for options in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"weight": weight}, {"label_smoothing": 0.1}):
        grads = []
        for x in (values.clone(), distribute_tensor(values, mesh, [S1])):
            x.requires_grad_()
            given = {"target": wanted, **options}
            if isinstance(x, DTensor):
                given = {k: replicated(v, mesh) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
            (first,) = torch.autograd.grad(F.cross_entropy(x, **given).sum(), x, create_graph=True)
            first.square().sum().backward()
            grads.append((first.detach(), x.grad))
        for ours, expected in zip(grads[1], grads[0], strict=True):
            torch.testing.assert_close(whole(ours), expected, msg=lambda m, o=options: f"{o}: {m}")


def replicated(values: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(values, mesh, [Replicate()] * mesh.ndim)


def test_second_gradients():
    run_ranks(4, second_gradients)


# ------------------------------------------------------------------ terms of one's own, autocast


def own_terms() -> None:
    """Terms of half types that are reduced as they are: accumulated in float32, whatever their number and size."""
    mesh = init_device_mesh("cpu", (4,))
    rank = mesh.get_local_rank()
    for dtype in HALF:
        for count in (5, 300_000):  # sent in one round, and in two
            torch.manual_seed(6)
            terms = (torch.randn(4, count) * 100).to(dtype)
            exact = terms.double().sum(0)
            placed = DTensor.from_local(terms[rank].clone(), mesh, [P])
            as_accurate(placed.redistribute(placements=[R]), terms.sum(0), exact, f"{count} terms")
            as_accurate(placed.redistribute(placements=[S0]), terms.sum(0), exact, f"{count} terms, scattered")
            as_accurate(placed.sum(), terms.sum(), exact.sum(), f"sum of {count} terms")


def test_terms_are_accumulated_in_single():
    run_ranks(4, own_terms)


def products_of_terms() -> None:
    """Terms whose products float16 cannot hold, of a sum whose products it can."""
    mesh = init_device_mesh("cpu", (2,))
    large = 30_000.0 if mesh.get_local_rank() == 0 else -29_999.0
    x = DTensor.from_local(torch.full((3, 4), large, dtype=torch.float16), mesh, [P], grad_placements=[R])
    sums = x.full_tensor()
    w = distribute_tensor(torch.full((4, 4), 3.0, dtype=torch.float16), mesh, [R])
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (torch.mm, (x, w)),
        (torch.matmul, (w, x.t())),
        (F.linear, (x, w, w[0])),
        (torch.addmm, (w[:3], x, w)),
        (torch.einsum, ("ij,kj->ik", x, w)),
        (torch.dot, (x.flatten(), w[:3].flatten())),
        (torch.mv, (x, w[0])),
        (torch.Tensor.addmm_, (w[:3].clone(), x, w)),
    ]
    for func, args in calls:
        alone = [sums if a is x else whole(a) if isinstance(a, DTensor) else a for a in args]
        assert torch.equal(whole(func(*args)), func(*alone)), func
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(whole(F.linear(x.float(), w.float())), F.linear(sums, whole(w)))
    # Of wide types terms pass, and nothing is sent.
    with CommDebugMode() as counted:
        assert torch.mm(x.float(), w.float()).placements == (P,)
    assert not counted.get_total_counts()
    assert "receives" in str(explain(torch.mm, x, w)) and explain(torch.mm, x, w).choices[0].chosen.results == (R,)


def test_products_of_terms_are_of_their_sum():
    run_ranks(2, products_of_terms)


def under_autocast() -> None:
    """The types are those that autocast gives on one device."""
    mesh = init_device_mesh("cpu", (2,))
    functions: list[Callable[[Any], Any]] = [
        lambda x: x.sum(), lambda x: x.mean(), lambda x: x.prod(), lambda x: x.norm(), lambda x: x.var(),
        lambda x: F.mse_loss(x, x), lambda x: x.softmax(0), lambda x: F.layer_norm(x, (5, 4)),
        lambda x: torch.linalg.vector_norm(x), lambda x: x.logsumexp(0), lambda x: x.nansum(0),
    ]  # fmt: skip
    values = torch.rand(5, 4).bfloat16()
    placed = distribute_tensor(values, mesh, [S0])
    for i, function in enumerate(functions):
        for enabled in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                expected, result = function(values), function(placed)
            assert result.dtype == expected.dtype, (i, enabled, result.dtype, expected.dtype)
            torch.testing.assert_close(whole(result), expected, rtol=0.01, atol=0.01)


def one_row_under_autocast() -> None:
    """On one row an einsum multiplies in float32 where others take a product in bfloat16: ranks would not agree."""
    mesh = init_device_mesh("cpu", (2,))
    values = torch.rand(5, 3)
    placed = distribute_tensor(values, mesh, [S1])
    for equation in ("ab,cb->ac", "ab,ab->a", "ab,ab->"):
        with torch.autocast("cpu", torch.bfloat16):
            expected, result = torch.einsum(equation, values, values), torch.einsum(equation, placed, placed)
        assert result.dtype == result.to_local().dtype == expected.dtype, equation
        torch.testing.assert_close(whole(result), expected, rtol=0.02, atol=0.02)


def test_under_autocast():
    run_ranks(2, under_autocast)
    run_ranks(2, one_row_under_autocast)


def layers_of_terms() -> None:
    """Terms that are larger than their sum: no intermediate terms are rounded to the half type."""
    mesh = init_device_mesh("cpu", (2, 2))
    functions: dict[str, Callable[[Any], Any]] = {
        "layer norm": lambda x: F.layer_norm(x, (2,)),
        "rms norm": lambda x: F.rms_norm(x, (2,)),
        "log_softmax": lambda x: F.log_softmax(x, 1),
        "softmax": lambda x: F.softmax(x, 1),
    }
    values = torch.tensor([[1.0, 1.25], [-300.0, 200.0], [0.5, 0.5]])
    row, column = mesh.get_coordinate()
    for dtype in HALF:
        whole_value = values.to(dtype)
        mine = whole_value[:, column : column + 1] * (4.0 if row == 0 else -3.0)  # exact, also in bfloat16
        terms = DTensor.from_local(mine, mesh, [P, S1])
        for name, function in functions.items():
            as_accurate(function(terms), function(whole_value), function(whole_value.double()), name)


def test_layers_of_terms():
    run_ranks(4, layers_of_terms)
