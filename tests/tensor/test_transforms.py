"""DTensors in the transforms of `torch.func`, as arguments and as what functions refer to: what one device gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vjp, vmap

from ranks import run_ranks
from terrazzo.errors import CommError, DTensorError, MixedTensorError
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)

PLACEMENTS = [(R, R), (R, S0), (R, S1), (S0, R), (S0, S1), (S1, S0), (S1, R)]


def rows() -> Tensor:
    return torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5).exp()


def weight() -> Tensor:
    return torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)


def whole(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [whole(each) for each in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def programs(x: Any, w: Any, v: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """`x` and `v` are rows; most functions refer to `w`, and some communicate to compute with it."""
    plain = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def f(a: Any) -> Any:
        return torch.tanh(a @ w)

    yield "rows", lambda: vmap(f)(x)
    yield "columns", lambda: vmap(lambda column: x @ column, in_dims=1, out_dims=1)(w)
    yield "two arguments", lambda: vmap(lambda a, b: (a * 2).sum() + b.sum())(x, v)
    yield "a column of the weight", lambda: vmap(lambda a: torch.where(a > 1, a, w[:, 1]) * w[:, 0])(x)
    yield "cat", lambda: vmap(lambda a: torch.cat([a, w[:, 0]]))(x)
    yield "linear, softmax", lambda: vmap(lambda a: F.softmax(F.linear(a, w.t()), -1))(x)
    yield "layer_norm", lambda: vmap(lambda a: F.layer_norm(a @ w, (4,)))(x)
    yield "einsum, in chunks", lambda: vmap(lambda a: torch.einsum("i,ij->j", a, w), chunk_size=1)(x)
    yield "functional_call", lambda: vmap(lambda a: functional_call(LINEAR, {"weight": w.t()}, (a,)))(x)
    yield "vmap in vmap", lambda: vmap(vmap(lambda c: c * (w * 2).sum()))(x)
    yield "vjp", lambda: vjp(f, x)[1](v)
    yield "vjp of both", lambda: vjp(lambda a, b: torch.tanh(a @ b), x, w)[1](v)
    yield "jacrev", lambda: [jacrev(f)(x), jacrev(lambda b: torch.tanh(x @ b))(w)]
    yield "jacrev of jacrev", lambda: jacrev(jacrev(lambda a: torch.tanh(a @ w).sum()))(x[0])
    yield "grad", lambda: grad(lambda a: (f(a) * w.sum()).sum())(x)
    yield "grad of grad", lambda: grad(lambda a: grad(lambda b: f(b).sum())(a).square().sum())(x)
    yield "grads of samples", lambda: vmap(grad(lambda b, a: torch.tanh(a @ b).sum()), in_dims=(None, 0))(w, x)
    yield "a reduction", lambda: vmap(lambda a: (a - w.mean(1)).std() * w.max())(x)
    yield "plain samples", lambda: vmap(lambda s: s * whole(w).square().sum())(plain)
    yield "plain samples' grads", lambda: vmap(grad(lambda s: (s * whole(w).sum()).sin()))(plain)


LINEAR = nn.Linear(5, 4, bias=False)


def check_transforms() -> None:
    mesh = init_device_mesh("cpu", (2,))
    v = torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4)
    expected = dict(programs(rows(), weight(), v))
    for of_rows, of_weight in PLACEMENTS:
        x, w = distribute_tensor(rows(), mesh, [of_rows]), distribute_tensor(weight(), mesh, [of_weight])
        for name, run in programs(x, w, distribute_tensor(v, mesh, [S0 if of_rows == S0 else R])):
            torch.testing.assert_close(
                whole(run()),
                whole(expected[name]()),
                msg=lambda text, where=(name, of_rows, of_weight): f"{where}: {text}",
            )


def check_backward() -> None:
    """Gradients of what a transformed function refers to."""
    mesh = init_device_mesh("cpu", (2,))
    for of_rows, of_weight in PLACEMENTS:
        found = []
        for x, w in (
            (rows(), nn.Parameter(weight())),
            (distribute_tensor(rows(), mesh, [of_rows]), nn.Parameter(distribute_tensor(weight(), mesh, [of_weight]))),
        ):
            out = vmap(lambda a, w=w: torch.tanh(a @ w) * w[0].sum())(x)
            slope = vjp(lambda a, w=w: torch.tanh(a @ w), x)[1](torch.ones_like(out))[0]
            (out.square().sum() + slope.square().sum()).backward()
            found.append(whole(w.grad))
        torch.testing.assert_close(found[1], found[0], msg=lambda text, where=(of_rows, of_weight): f"{where}: {text}")


def check_refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    w = distribute_tensor(weight(), mesh, [S0])
    with pytest.raises(MixedTensorError, match="mm: argument 0 is a plain Tensor"):
        vmap(lambda a: a @ w)(rows())
    with pytest.raises(MixedTensorError, match="mul: argument 1 is a plain Tensor"):
        vmap(lambda s: w.sum() * s)(torch.ones(3, dtype=torch.float64))
    with pytest.raises(DTensorError, match="forward-mode derivatives"):
        torch.func.jvp(lambda a: a * 2, (w,), (w,))
    with pytest.raises(CommError, match="transforms cannot pass through communication"):
        grad(lambda s: (DTensor.from_local(s, mesh, [S0]).full_tensor() * 2).sum())(torch.ones(3))


def test_transforms_give_what_one_device_gives():
    run_ranks(2, check_transforms)


def test_gradients_of_what_a_transformed_function_refers_to():
    run_ranks(2, check_backward)
    run_ranks(2, check_refusals)
