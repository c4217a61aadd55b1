"""Means, norms and losses of integers: what one device refuses, a DTensor refuses, also on a rank that holds no row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ranks import run_ranks
from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh

LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.binary_cross_entropy)
CASES: dict[str, Callable[[Any, Any], Any]] = {
    **{
        f"{loss.__name__} {how}": lambda x, y, loss=loss, how=how: loss(x, y, reduction=how)
        for loss in LOSSES
        for how in ("mean", "sum", "none")
    },
    "kl_div": F.kl_div,
    "cross_entropy": lambda x, y: F.cross_entropy(x, y[:, 0]),
    "nll_loss": lambda x, y: F.nll_loss(x, y[:, 0]),
    "mean": lambda x, y: x.mean(),
    "mean as integers": lambda x, y: x.mean(dtype=torch.int64),
    "nanmean": lambda x, y: x.nanmean(),
    "var": lambda x, y: x.var(0),
    "std_mean": lambda x, y: torch.std_mean(x),
    "norm": lambda x, y: x.norm(),
    "norm of rows": lambda x, y: torch.norm(x, 1, 0),
    "vector_norm": lambda x, y: torch.linalg.vector_norm(x, float("inf")),
    "vector_norm as floats": lambda x, y: torch.linalg.vector_norm(x, dtype=torch.float32),
    "norms of a list": lambda x, y: torch._foreach_norm([x])[0],
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, training=True),
    "logsumexp": lambda x, y: torch.logsumexp(x, 0),
    "trace": lambda x, y: x.trace(),
}


def runs(case: Callable[[Any, Any], Any], *tensors: torch.Tensor) -> bool:
    try:
        case(*tensors)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def check() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    differ = []
    for dtype in (torch.int64, torch.uint8, torch.bool):
        for rows in (4, 1):
            whole = torch.ones(rows, 3, dtype=dtype)
            for dim in (0, 1):
                parts = [distribute_tensor(whole, mesh, [Shard(dim)]) for _ in range(2)]
                for name, case in CASES.items():
                    if runs(case, whole, whole) != runs(case, *parts):
                        differ.append(f"{name} of {rows} rows of {dtype}, sharded along dim {dim}")
    return differ


def test_refused_as_on_one_device() -> None:
    assert run_ranks(2, check) == [[], []]
