"""What gathers its operands says so, at the user's line; what everybody calls every day does not gather."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ranks import run_ranks
from terrazzo.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.dispatch import fallback
from terrazzo.tensor.dispatch.fallback import ReplicationWarning


def sharded(*shape: int) -> DTensor:
    torch.manual_seed(0)
    return distribute_tensor(torch.rand(shape), init_device_mesh("cpu", (2,)), [Shard(0)])


class Histogram(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.histc(x, 4)


@torch.no_grad()
def decorated(x: Any) -> Any:
    return x.nonzero()


def lines() -> list[Any]:
    """For each call: how many warnings, and whether they point at this file and at the call's line."""
    x, images = sharded(4, 6), sharded(2, 4, 4, 4)
    calls: list[Callable[[], Any]] = [
        lambda: torch.histc(x, 4),  # a function in C++
        lambda: x.histc(4),  # a method
        lambda: x.nonzero(),
        lambda: torch.unique(x),  # a function with a body in Python
        lambda: F.max_unpool2d(images, (images * 0).long(), 2),
        lambda: x.masked_scatter_(x > 2, x),  # in place
        lambda: Histogram()(x),  # in a module
        lambda: decorated(x),
        lambda: torch.ops.aten.histc(x, 4),
    ]
    found = []
    for call in calls:
        fallback._warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        given = [w for w in caught if issubclass(w.category, ReplicationWarning)]
        code, first = inspect.getsourcelines(call)
        found.append((code[0].strip(), [(w.filename, w.lineno - first) for w in given]))
    return found


def test_each_warning_points_at_the_users_line():
    (found, _) = run_ranks(2, lines)
    _, module = inspect.getsourcelines(Histogram)
    _, function = inspect.getsourcelines(decorated)
    for code, places in found:
        assert places, f"{code} gathers nothing, choose another function"
        for file, offset in places:
            assert file == __file__, code
            assert "Histogram" in code or "decorated" in code or offset == 0, code


def everyday() -> list[str]:
    fallback._warned.clear()
    x, y, integers = sharded(5, 6), sharded(5, 6), sharded(5, 6).mul(9).long()
    images = sharded(3, 4, 6, 6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for initialise in ("trunc_normal_", "xavier_uniform_", "kaiming_normal_", "normal_", "zeros_", "orthogonal_"):
            getattr(torch.nn.init, initialise)(sharded(6, 4))
        torch.nn.init.trunc_normal_(sharded(6, 4), 0.0, 1.0, 3.0, 4.0)  # far from the mean: another way
        for call in (
            *(lambda: x.argmax(), lambda: x.argmax(0), lambda: x.argmin(-1), lambda: torch.allclose(x, y)),
            *(lambda: x.is_pinned(), lambda: torch.isclose(x, y), lambda: x.max(0), lambda: x.median()),
            *(lambda: x.quantile(0.5), lambda: x.sort(0), lambda: x.topk(2, 0), lambda: x.cumsum(0)),
            *(lambda: x.std(), lambda: x.var(0), lambda: x.norm(), lambda: F.normalize(x, dim=0)),
            *(lambda: x.flip(0), lambda: x.roll((1, 1), (0, 1)), lambda: x.diagonal(), lambda: x.tril()),
            *(
                lambda: F.one_hot(integers, 9),
                lambda: F.pad(images, (1, 1)),
                lambda: F.interpolate(images, scale_factor=2),
            ),
            *(lambda: torch.fft.rfft(x), lambda: torch.linalg.inv(images), lambda: torch.cdist(x, y)),
            *(lambda: x.new_zeros(3), lambda: x.to(y), lambda: x.repeat_interleave(2, 0), lambda: x.repeat(2, 2)),
            *(lambda: torch.einsum("...i,...i->...", x, y), lambda: torch.equal(x, y), lambda: x.logsumexp(0)),
            *(lambda: torch.cat([x, y]), lambda: torch.stack([x, y]), lambda: x[1], lambda: x[:, 1:3], lambda: x[None]),
        ):
            call()  # fmt: skip
    return [str(w.message) for w in caught if issubclass(w.category, ReplicationWarning)]


def test_nothing_that_is_called_every_day_warns():
    for messages in run_ranks(2, everyday):
        assert not messages, "\n".join(messages)
