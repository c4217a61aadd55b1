"""Every list operation of PyTorch (`torch._foreach_*`), in every form, on tensors that are placed alike or not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import run_ranks
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

NAMES = sorted(name for name in dir(torch) if name.startswith("_foreach_"))
PLACED: dict[str, tuple[list[Any], list[Any]]] = {  # how the first list is placed, and the others
    "alike": ([Shard(0), Shard(1)], [Shard(0), Shard(1)]),
    "otherwise": ([Shard(0), Replicate()], [Shard(1), Shard(0)]),
    "partial": ([Replicate(), Shard(0)], [Partial(), Partial()]),
    "with plain ones": ([None, Shard(0)], [None, Shard(0)]),
    "otherwise, with plain ones": ([Shard(1), None], [Shard(0), None]),
}


def lists_for(name: str) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments of a list operation, in all of its forms."""
    torch.manual_seed(0)
    xs, ys, zs = ([torch.rand(5, 4).add_(0.5), torch.rand(3, 5).add_(0.5)] for _ in range(3))
    single = name.removeprefix("_foreach_").rstrip("_")
    number = torch.tensor(0.75)
    if single == "mm":
        yield [xs, [y.T.contiguous() for y in ys]], {}
    elif single in ("addcmul", "addcdiv"):
        for more in ({}, {"value": 0.5}, {"scalars": [0.5, 2.0]}):
            yield [xs, ys, zs], more
        yield [xs, ys, zs, torch.tensor([0.5, 2.0])], {}
    elif single == "lerp":
        for weight in (zs, 0.25, [0.25, 0.5]):
            yield [xs, ys, weight], {}
    elif single in ("norm", "powsum"):
        for order in (1, 2, 3.0) if single == "powsum" else (0, 1, 2, 3.0, float("inf")):
            yield [xs, order], {}
        yield [xs, 2], {"dtype": torch.float64}
    elif single == "copy":
        yield [xs, ys], {}
        yield [xs, ys, True], {}
    elif single in ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_max", "clamp_min"):
        for other in (ys, 0.75, [0.75, 2.0]):
            yield [xs, other], {}
        if single in ("add", "sub"):
            yield [xs, ys], {"alpha": 2.0}
        if single in ("add", "mul", "div"):
            yield [xs, number], {}
            yield [xs, [number, number]], {}
        if single == "add":
            yield [xs, number], {"alpha": 2.0}
        if name == "_foreach_pow":
            yield [2.0, ys], {}
    else:
        yield [xs], {}


def placed(value: Any, mesh: Any, placements: list[Any]) -> Any:
    """The same with DTensors for its tensors, apart from numbers."""
    if not isinstance(value, list) or not isinstance(value[0], Tensor) or value[0].dim() == 0:
        return value
    found = []
    for x, placement in zip(value, placements, strict=True):
        if placement is None:
            found.append(x)
        elif placement.is_partial():
            found.append(DTensor.from_local(x / mesh.size(), mesh, [placement], run_check=False))
        else:
            found.append(distribute_tensor(x, mesh, [placement]))
    return found


def whole(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.full_tensor() if hasattr(value, "full_tensor") else value
    return [whole(each) for each in value] if isinstance(value, list | tuple) else value


def close(found: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda text: f"{what}: {text}")


def with_names(name: str, args: list[Any], kwargs: dict[str, Any]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """The same call with all arguments named, by each overload's names; those that are for others are among them."""
    packet = getattr(torch.ops.aten, name)
    for overload in packet.overloads():
        names = [each.name for each in getattr(packet, overload)._schema.arguments]
        if len(names) >= len(args) and not overload.endswith("out"):
            for first in (0, 1):
                yield args[:first], {**dict(zip(names[first:], args[first:], strict=False)), **kwargs}


def placed_otherwise(args: list[Any], kwargs: dict[str, Any], mesh: Any, how: str) -> tuple[list[Any], dict[str, Any]]:
    """A copy of the arguments with DTensors."""
    first, others = PLACED[how]
    found = [placed(each, mesh, others if i else first) for i, each in enumerate([*args, *kwargs.values()])]
    return found[: len(args)], dict(zip(kwargs, found[len(args) :], strict=True))


def compare(name: str) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    function = getattr(torch, name)
    calls = list(lists_for(name))
    named = [each for call in calls for each in with_names(name, *call)]
    for i, (args, kwargs) in enumerate([*calls, *named]):
        for how in PLACED if i < len(calls) else ("alike", "otherwise, with plain ones"):
            what = f"{name} {how} {[type(each).__name__ for each in args]} {list(kwargs)}"
            plain, plain_named = copy.deepcopy((args, kwargs))
            ours, ours_named = placed_otherwise(*copy.deepcopy((args, kwargs)), mesh, how)
            try:
                expected = function(*plain, **plain_named)
            except (RuntimeError, TypeError):
                assert i >= len(calls), what  # the names of another overload
                continue
            found = function(*ours, **ours_named)
            if expected is None:
                assert found is None, what
            else:
                assert type(found) is type(expected), what
                close(whole(list(found)), list(expected), what)
            left, expected_left = ([*ours, *ours_named.values()], [*plain, *plain_named.values()])
            for one, other in zip(left, expected_left, strict=True):
                if isinstance(other, list):
                    close(whole(one), other, what)


@pytest.mark.parametrize("name", NAMES)
def test_every_list_operation(name: str) -> None:
    run_ranks(2, compare, name)


def fused_steps() -> None:
    """The first parameter has no dims, as numbers of steps have; the second one's gradient is placed otherwise."""
    mesh = init_device_mesh("cpu", (2,))
    values = [torch.tensor(2.0), torch.arange(12.0).reshape(4, 3)]
    gradients = [torch.tensor(-1.0), torch.linspace(-1, 1, 12).reshape(4, 3)]
    for grad_placement in (Shard(1), Replicate()):
        places = [(Replicate(), Replicate()), (Shard(0), grad_placement)]
        grads = [distribute_tensor(g, mesh, [at]) for g, (_, at) in zip(gradients, places, strict=True)]
        params = [distribute_tensor(v, mesh, [at]) for v, (at, _) in zip(values, places, strict=True)]
        plain = [v.clone() for v in values]

        def step(params: list[Any], grads: list[Any]) -> None:
            average, square = [[torch.zeros_like(p) for p in params] for _ in range(2)]
            steps = [torch.tensor(1.0) for _ in params]
            settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
            more = {"amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None}
            torch._fused_adam_(params, grads, average, square, [], steps, **settings, **more)

        step(params, grads)
        step(plain, gradients)
        for mine, theirs in zip(params, plain, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)


def test_a_fused_step_whose_first_parameter_has_no_dims() -> None:
    run_ranks(2, fused_steps)
