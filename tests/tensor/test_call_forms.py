"""Every form of a call is the same call: positional, keyword, numpy's names, method, `out=`, in place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks
from terrazzo.tensor import Replicate, Shard, distribute_tensor
from terrazzo.tensor.dispatch.keys import any_float, routes
from terrazzo.tensor.dtensor import key_of_call

FORMS = {
    "mean": [
        lambda x: torch.mean(x, 0), lambda x: torch.mean(input=x, dim=0), lambda x: x.mean(dim=0),
        lambda x: x.mean(axis=0), lambda x: torch.mean(dim=0, input=x), lambda x: torch.mean(x, (0,)),
    ],
    "sum": [
        lambda x: torch.sum(x, 1, True), lambda x: x.sum(dim=1, keepdim=True), lambda x: x.sum(axis=1, keepdims=True),
        lambda x: torch.sum(keepdim=True, input=x, dim=1), lambda x: x.sum((1,), keepdim=True),
    ],
    "full mean": [lambda x: torch.mean(x), lambda x: torch.mean(input=x), lambda x: x.mean()],
    "squeeze": [lambda x: torch.squeeze(x), lambda x: torch.squeeze(input=x), lambda x: x.squeeze()],
    "flatten": [lambda x: torch.flatten(x, 0, 1), lambda x: torch.flatten(input=x, start_dim=0, end_dim=1)],
    "reshape": [
        lambda x: torch.reshape(x, (-1,)), lambda x: torch.reshape(input=x, shape=(-1,)),
        lambda x: x.reshape(shape=(24,)), lambda x: x.reshape(24),
    ],
    "transpose": [
        lambda x: torch.transpose(x, 0, 1), lambda x: torch.transpose(input=x, dim0=0, dim1=1),
        lambda x: x.transpose(dim1=1, dim0=0),
    ],
    "softmax": [
        lambda x: torch.softmax(x, 0), lambda x: torch.softmax(input=x, dim=0), lambda x: F.softmax(input=x, dim=0),
        lambda x: x.softmax(dim=0), lambda x: F.softmax(x, 0),
    ],
    "add": [
        lambda x: torch.add(x, x, alpha=2), lambda x: torch.add(input=x, other=x, alpha=2),
        lambda x: x.add(other=x, alpha=2), lambda x: x + x * 2, lambda x: torch.add(x1=x, x2=x, alpha=2),
    ],
    "norm": [
        lambda x: torch.linalg.vector_norm(x, 2, 0), lambda x: torch.linalg.vector_norm(x, ord=2, dim=0),
        lambda x: torch.linalg.vector_norm(x=x, ord=2, dim=0), lambda x: torch.norm(input=x, p=2, dim=0),
        lambda x: x.norm(dim=0),
    ],
    "mse_loss": [
        lambda x: F.mse_loss(x, x * 2), lambda x: F.mse_loss(input=x, target=x * 2),
        lambda x: F.mse_loss(x, x * 2, reduction="mean"), lambda x: F.mse_loss(target=x * 2, input=x),
        lambda x: F.mse_loss(x, x * 2, None, None, "mean"), lambda x: torch._C._nn.mse_loss(x, x * 2, 1),
    ],
    "layer_norm": [
        lambda x: F.layer_norm(x, (6,)), lambda x: F.layer_norm(input=x, normalized_shape=(6,)),
        lambda x: torch.layer_norm(x, (6,)), lambda x: torch.layer_norm(input=x, normalized_shape=[6]),
    ],
    "batch_norm": [
        lambda x: F.batch_norm(x, None, None, None, None, True), lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
    ],
    "linear": [lambda x: F.linear(x, x), lambda x: F.linear(input=x, weight=x), lambda x: x @ x.t()],
    "where": [
        lambda x: torch.where(x > 0, x, -x), lambda x: torch.where(condition=x > 0, input=x, other=-x),
        lambda x: x.where(condition=x > 0, other=-x),
    ],
    "cat": [
        lambda x: torch.cat([x, x], 1), lambda x: torch.cat(tensors=[x, x], dim=1), lambda x: torch.cat((x, x), dim=1),
        lambda x: torch.cat([x, x], axis=1),
    ],
    "clamp": [lambda x: torch.clamp(x, None, 0.5), lambda x: x.clamp(max=0.5), lambda x: torch.clamp(input=x, max=0.5)],
    "relu": [
        lambda x: F.relu(x), lambda x: F.relu(input=x, inplace=False), lambda x: F.relu(x.clone(), True),
        lambda x: F.relu(x.clone(), inplace=True), lambda x: x.clone().relu_(),
    ],
    "var": [
        lambda x: torch.var(x, 0), lambda x: torch.var(input=x, dim=0), lambda x: x.var(dim=0, correction=1),
        lambda x: x.var(axis=0, unbiased=True),
    ],
    "max": [
        lambda x: torch.max(x, x * 2), lambda x: torch.max(input=x, other=x * 2), lambda x: torch.maximum(x, x * 2),
    ],
}  # fmt: skip


def every_form() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = torch.randn(4, 6)
    for (name, forms), placement in itertools.product(FORMS.items(), (Shard(0), Shard(1), Replicate())):
        expected = forms[0](plain)
        x = distribute_tensor(plain, mesh, [placement])
        for i, form in enumerate(forms):
            for _ in range(2):  # the second call takes the route that the first one left
                torch.testing.assert_close(
                    form(x).full_tensor(), expected, msg=lambda m, what=(name, i, placement): f"{what}: {m}"
                )


def test_every_form_of_a_call_gives_the_same() -> None:
    run_ranks(2, every_form)


def out_forms() -> None:
    mesh = init_device_mesh("cpu", (2,))
    plain = torch.randn(4, 6)
    x = distribute_tensor(plain, mesh, [Shard(0)])
    for placement in (Shard(0), Shard(1), Replicate()):
        for dtype in (torch.float32, torch.float64, torch.complex64):
            out = distribute_tensor(torch.zeros(4, 6, dtype=dtype), mesh, [placement])
            assert torch.add(x, x, out=out) is out
            assert torch.equal(out.full_tensor(), torch.add(plain, plain).to(dtype))
        for wrong in (torch.int64, torch.bool):
            out = distribute_tensor(torch.zeros(4, 6, dtype=wrong), mesh, [placement])
            with pytest.raises(RuntimeError, match="cast"):
                torch.add(x, x, out=out)
            assert not out.full_tensor().any()
    grown = distribute_tensor(torch.zeros(0), mesh, [Replicate()])
    torch.mul(x, 2, out=grown)
    assert torch.equal(grown.full_tensor(), plain * 2)
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.mul(x.detach().requires_grad_(), 2, out=distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)]))


def test_out_casts_as_torch_does() -> None:
    run_ranks(2, out_forms)


STATIC = [
    0, 1, 2, True, False, 0.0, -0.0, 1.0, 2.0, None, "mean", 1j, 1 + 0j, torch.float32, float, int, np.int64(1),
    np.float64(1.0), (0, 2, 1), torch.Size([0, 2, 1]), [0, 2, 1], slice(0, 2, 1), (slice(0, 2, 1),), (1, 2), [1, 2], (),
    [], ((1, 2),), (1, (2,)), Ellipsis, ("dim", 0), (True, 2), (1.0, 2), torch.Size([1, 2]), (None,), (slice(None),),
]  # fmt: skip


def keys_differ() -> None:
    x = distribute_tensor(torch.zeros(2, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    calls = [((x, a), {}) for a in STATIC]
    calls += [((x, a, b), {}) for a in STATIC for b in STATIC]
    calls += [((x,), {"dim": a}) for a in STATIC] + [((x, "dim", a), {}) for a in STATIC]
    calls += (
        [(([x, x], a), {}) for a in STATIC] + [((a, x, x), {}) for a in STATIC] + [(((x, x), a), {}) for a in STATIC]
    )
    seen: dict[object, object] = {}
    for args, kwargs in calls:
        key = key_of_call(torch.add, args, kwargs)
        assert key is not None
        assert key not in seen, f"{args[1:]} {kwargs} and {seen[key]} share a key"
        seen[key] = (args[1:], kwargs)


def test_different_calls_have_different_keys() -> None:
    any_float.discard(torch.add)
    run_ranks(1, keys_differ)


def collisions() -> None:
    """Pairs of calls that Python would take for the same: what the first one decided must not serve the second."""
    mesh = init_device_mesh("cpu", (2,))
    plain = torch.arange(24.0).reshape(4, 6)
    x = distribute_tensor(plain, mesh, [Shard(0)])

    def result(function, value):
        try:
            found = function(value)
        except Exception as error:
            return type(error).__name__
        return [
            t.full_tensor() if hasattr(t, "full_tensor") else t for t in (found if type(found) is tuple else (found,))
        ]

    pairs = [
        (lambda t: t[0:2:1], lambda t: t[torch.Size([0, 2, 1])]),
        (lambda t: t[0:2:1], lambda t: t[(0, 2)]),
        (lambda t: t[1], lambda t: t[True]),
        (lambda t: t[True], lambda t: t[1]),
        (lambda t: t[[0, 2]], lambda t: t[(0, 2)]),
        (lambda t: torch.tensor_split(t, (1, 2)), lambda t: torch.tensor_split(t, 1, 1)),
        (lambda t: t.split((1, 3)), lambda t: t.split(1, 1)),
        (lambda t: t.new_full((2,), 1), lambda t: t.new_full((2,), 1.5)),
        (lambda t: 1 / t.new_full((4, 6), 0.0), lambda t: 1 / t.new_full((4, 6), -0.0)),
        (lambda t: torch.full_like(t, 1), lambda t: torch.full_like(t, True)),
        (lambda t: t.roll(1, 0), lambda t: t.roll((1, 0), (0, 1))),
        (lambda t: t.sum((0, 1)), lambda t: t.sum(0, True)),
    ]
    for first, second in pairs:
        for order in ((first, second), (second, first)):
            routes.clear()
            for function in order:
                mine, expected = result(function, x), result(function, plain)
                if isinstance(expected, str):
                    assert isinstance(mine, str), (mine, expected)
                else:
                    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True)), (mine, expected)


def test_what_one_call_decided_does_not_serve_another() -> None:
    run_ranks(2, collisions)
