"""Random operations: the same values however the tensor is placed, and distributed as they should be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ranks import run_ranks
from terrazzo.tensor import Partial, Replicate, Shard, init_device_mesh
from tests.tensor.sweep.placing import distribute

SHAPE = (61, 50)
N = math.prod(SHAPE)

# What to draw, with the expected mean and standard deviation (None: it has none).
DRAWS: dict[str, tuple[Callable[[Any], Any], float | None, float | None]] = {
    "rand_like": (torch.rand_like, 0.5, 12**-0.5),
    "randn_like": (torch.randn_like, 0.0, 1.0),
    "randint_like": (lambda x: torch.randint_like(x, 10), 4.5, 8.25**0.5),
    "bernoulli": (torch.bernoulli, 0.3, 0.21**0.5),
    "bernoulli_": (lambda x: x.clone().bernoulli_(0.2), 0.2, 0.16**0.5),
    "uniform_": (lambda x: x.clone().uniform_(1, 3), 2.0, 2 / 12**0.5),
    "normal_": (lambda x: x.clone().normal_(2, 3), 2.0, 3.0),
    "exponential_": (lambda x: x.clone().exponential_(2.0), 0.5, 0.5),
    "geometric_": (lambda x: x.clone().geometric_(0.5), 2.0, 2**0.5),
    "log_normal_": (lambda x: x.clone().log_normal_(0.0, 0.25), math.exp(1 / 32), None),
    "cauchy_": (lambda x: x.clone().cauchy_().clamp(-1, 1), 0.0, None),
    "random_": (lambda x: x.clone().random_(0, 10), 4.5, 8.25**0.5),
    "normal": (lambda x: torch.normal(x, 2.0), 0.3, 2.0),
    "dropout": (lambda x: F.dropout(x / 0.3, 0.25), 1.0, (1 / 0.75 - 1) ** 0.5),
    "dropout in place": (lambda x: F.dropout(x / 0.3, 0.25, inplace=True), 1.0, (1 / 0.75 - 1) ** 0.5),
    "alpha dropout": (lambda x: F.alpha_dropout(x - 0.3, 0.2, training=True), None, None),
    "feature dropout": (lambda x: F.dropout1d(x.unsqueeze(-1).expand(*SHAPE, 3) / 0.3, 0.25), 1.0, 3**-0.5),
    "rrelu": (lambda x: F.rrelu(-x / 0.3, 0.1, 0.3, training=True), -0.2, 0.2 / 12**0.5),
    "multinomial": (lambda x: torch.multinomial(x, 5, True).float(), 24.5, (2499 / 12) ** 0.5),
    "multinomial without replacement": (lambda x: torch.multinomial(x, 10).float(), 24.5, (2499 / 12) ** 0.5),
    "attention": (lambda x: F.scaled_dot_product_attention(x * 0, x * 0, x / 0.3, dropout_p=0.5), 1.0, None),
}


def values_do_not_depend_on_placements(names: list[str]) -> None:
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    everywhere = [(line, [Replicate()]), (line, [Shard(0)]), (line, [Shard(1)]), (line, [Partial()])]
    everywhere += [(square, [Shard(0), Shard(0)]), (square, [Shard(1), Shard(0)]), (square, [Partial(), Shard(0)])]
    for name in names:
        draw, mean, std = DRAWS[name]
        first = None
        for mesh, placements in everywhere:
            x = distribute(torch.full(SHAPE, 0.3), mesh, placements)
            torch.manual_seed(3)
            drawn = draw(x).full_tensor()
            if first is None:
                first = drawn
            # Attention sums what it draws, in an order that depends on the placement.
            torch.testing.assert_close(drawn, first, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}, {placements}: {m}")  # noqa: B023
        torch.manual_seed(4)
        assert first is not None
        assert not torch.equal(draw(x).full_tensor(), first), f"{name} does not heed the seed"
        # Six standard errors of the mean; as many of the deviation, generously.
        spread = std if std is not None else 1.0
        if mean is not None:
            assert abs(first.mean() - mean) < 6 * max(spread, 0.1) / N**0.5, (name, first.mean())
        if std is not None:
            assert abs(first.std() / std - 1) < 0.15, (name, first.std())
        # Neighbours have nothing to do with each other.
        centred = (first - first.mean()).flatten()
        if name not in ("feature dropout", "attention", "multinomial without replacement"):
            assert abs((centred[1:] * centred[:-1]).mean() / centred.square().mean()) < 6 / N**0.5, name


def test_values_do_not_depend_on_placements():
    run_ranks(4, values_do_not_depend_on_placements, list(DRAWS))
