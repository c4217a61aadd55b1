"""What stands for integers (0-d tensors, numpy's, enums) as bounds, sizes, counts, dims, compared with one device."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ranks import run_ranks
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.dispatch.keys import routes


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    return [whole(v) for v in value] if isinstance(value, (list, tuple)) else value


def agree(name: str, call: Callable[..., Any], full: torch.Tensor, x: DTensor, plain: Any, given: Any) -> None:
    torch.testing.assert_close(whole(call(x, given)), whole(call(full, plain)), msg=lambda m: f"{name}: {m}")


class Number:
    """A mutable object that Python takes as an index."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Items(NamedTuple):
    rows: Any


# (x, t), called with t = 3, then 2, then 1
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "slice from": lambda x, t: x[t:],
    "slice to": lambda x, t: x[:t],
    "step": lambda x, t: x[::t],
    "slice in a tuple": lambda x, t: x[1:t, None],
    "slice in a list": lambda x, t: x[[slice(t, None), 0]],
    "slice in a named tuple": lambda x, t: x[Items(slice(t, None))],
    "item": lambda x, t: x[t],
    "item and slice": lambda x, t: x[t, t:],
    "select": lambda x, t: x.select(0, t),
    "narrow": lambda x, t: x.narrow(0, t, 2),
    "narrow, by name": lambda x, t: torch.narrow(x, dim=0, start=t, length=2),
    "chunk": lambda x, t: x.chunk(t),
    "split": lambda x, t: x.split(t),
    "split into sizes": lambda x, t: torch.split(x, [t, 6 - t]),
    "tensor_split": lambda x, t: torch.tensor_split(x, t),
    "tensor_split, by name": lambda x, t: torch.tensor_split(x, tensor_indices_or_sections=t),
    "tensor_split along a dim": lambda x, t: x.tensor_split(2, t % 2),
    "hsplit": lambda x, t: torch.hsplit(x[:, :1].expand(6, 6), t),
    "repeat_interleave": lambda x, t: x.repeat_interleave(t, 0),
    "repeat": lambda x, t: x.repeat(t, 1),
    "view": lambda x, t: x.view(t, -1),
    "reshape": lambda x, t: x.reshape((-1, t)),
    "unflatten": lambda x, t: x.unflatten(0, (t, -1)),
    "transpose": lambda x, t: x[None, None].transpose(t, 0),
    "topk": lambda x, t: x.topk(t),
    "sum": lambda x, t: x[None, None].sum(t),
    "cat": lambda x, t: torch.cat([x[None, None], x[None, None]], t),
    "chunk along a dim": lambda x, t: x[None, None].chunk(2, t),
    "stack": lambda x, t: torch.stack([x[None], x[None]], dim=t),
    "roll": lambda x, t: x.roll(t, 0),
    "new_zeros": lambda x, t: x.new_zeros((t, 2)),
    "softmax": lambda x, t: F.softmax(x[None, None], t),
    "adaptive_avg_pool2d": lambda x, t: F.adaptive_avg_pool2d(x[None], (t, 2)),
    "max_pool2d": lambda x, t: F.max_pool2d(x[None], t),
    "avg_pool1d": lambda x, t: F.avg_pool1d(x[None], t),
    "conv2d": lambda x, t: F.conv2d(x[None], x[None, None, :3, :3], padding=t),
}
"""Each with integers that change in place: a plan of before must not be used again."""


def check_changing_values() -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(24.0).reshape(6, 4)
    x = distribute_tensor(full, mesh, [Shard(0)])
    for name, call in CALLS.items():
        plain, replicated = torch.tensor(3), distribute_tensor(torch.tensor(3), mesh, [Replicate()])
        number = Number(3)
        for _ in range(3):
            agree(name, call, full, x, plain.clone(), plain)
            agree(name, call, full, x, plain.clone(), replicated)
            if "slice" in name:
                agree(name, call, full, x, plain.clone(), number)
            plain -= 1
            replicated -= 1
            number.value -= 1
    agree("a bound from an array", lambda x, t: x[t:], full, x, 2, np.array(2))
    agree("a bound from an array", lambda x, t: x[t:, 0], full, x, 2, np.array(2))
    before = len(routes)
    for _ in range(3):
        x[torch.tensor(1) :], x[Number(1) :, 0], x.narrow(0, torch.tensor(1), 2)
    assert len(routes) == before, "routes that can never be used again"


def check_lists_of_values() -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(24.0).reshape(6, 4)
    x = distribute_tensor(full, mesh, [Shard(0)])
    for values in ([1, 3], [0, 0], [], [5]):
        cuts = torch.tensor(values, dtype=torch.int64)
        agree("tensor_split", torch.tensor_split, full, x, cuts, cuts)
        agree("tensor_split", torch.tensor_split, full, x, cuts, distribute_tensor(cuts, mesh, [Replicate()]))
    counts = torch.tensor([2, 0, 1, 3, 1, 1])
    for placement in (Replicate(), Shard(0)):
        placed = distribute_tensor(counts, mesh, [placement])
        agree("repeat_interleave", lambda x, t: x.repeat_interleave(t, 0), full, x, counts, placed)
        agree("repeat_interleave", lambda x, t: x.repeat_interleave(t, dim=0, output_size=8), full, x, counts, placed)
    dims = torch.tensor([[0], [0]])
    agree(
        "tensordot", lambda x, t: torch.tensordot(x, x, t), full, x, dims, distribute_tensor(dims, mesh, [Replicate()])
    )


class Dims(enum.IntEnum):
    ROWS = 0
    COLUMNS = 1


NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: lambda x, n, name=name: getattr(x, name)(n) for name in ("sum", "amax", "cumsum", "softmax", "argmax")},
    "sum, of a list": lambda x, n: x.sum([n]),
    "renorm": lambda x, n: x.renorm(2, n, 1.0),
    "topk": lambda x, n: x.topk(1 + n, n),
    "cat": lambda x, n: torch.cat([x, x], dim=n),
    "glu": lambda x, n: F.glu(x, n),
    "roll": lambda x, n: x.roll(1, n),
    "new_zeros": lambda x, n: x.new_zeros(n, n),
    "layer_norm": lambda x, n: F.layer_norm(x[:, :1], (n,)),
    "group_norm": lambda x, n: F.group_norm(x, n),
    "max_pool2d": lambda x, n: F.max_pool2d(x[None], n),
    "avg_pool2d": lambda x, n: F.avg_pool2d(x[None], n, stride=n),
    "cross_entropy": lambda x, n: F.cross_entropy(x, x.argmax(1), ignore_index=n),
    "conv2d": lambda x, n: F.conv2d(x[None, None], x[None, None, :3, :3], stride=n, groups=n),
}


def check_numbers_that_are_not_pythons() -> None:
    """They are planned as Python's integers are."""
    mesh = init_device_mesh("cpu", (2,))
    full = torch.randn(6, 4)
    x = distribute_tensor(full, mesh, [Shard(0)])
    for name, call in NUMBERS.items():
        for n in (np.int64(1), np.int32(1), Dims.COLUMNS):
            expected = call(full, 1)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                result, usual = call(x, n), call(x, 1)
            torch.testing.assert_close(whole(result), whole(expected), msg=name)
            for one, other in zip(*[r if isinstance(r, tuple) else (r,) for r in (result, usual)], strict=True):
                assert one.placements == other.placements, name


def test_a_value_that_changes_in_place_gives_another_plan() -> None:
    run_ranks(2, check_changing_values)


def test_numbers_of_numpy_and_of_enums() -> None:
    run_ranks(2, check_numbers_that_are_not_pythons)


def test_lists_of_sizes_as_tensors() -> None:
    run_ranks(2, check_lists_of_values)
