"""Whether a tensor is contiguous, and where a write through `reshape` goes, on ranks that hold one row or none.

Random chains of views and copies of small tensors, of which most ranks have little: after each step every rank must say
what one device says, and a write to the flattened result must reach the first tensor exactly where it does there.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ranks import run_ranks
from terrazzo.errors import DTensorError
from terrazzo.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.copied_view import CopiedView

Step = Callable[[Tensor], Tensor]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def a_conversion(choose: random.Random, ndim: int) -> Step:
    """To a memory format, by one of the functions that return their argument if it is in that format already."""
    name = choose.choice(["contiguous", "to", "float", "cpu", "clone"])
    memory_format = choose.choice([FORMATS[ndim], FORMATS[ndim], torch.contiguous_format])
    return lambda t: getattr(t, name)(memory_format=memory_format)


def a_step(choose: random.Random, x: Tensor) -> Step | None:
    """Some view or copy of `x`; None where the kind that was drawn does not fit."""
    dims = range(x.dim())
    d = choose.choice(dims) if dims else 0
    kind = choose.randrange(14 if x.dim() in FORMATS else 12)
    if kind >= 12:
        memory_format = choose.choice([FORMATS[x.dim()], torch.contiguous_format])
        convert = choose.choice(
            [Tensor.contiguous, Tensor.to, Tensor.clone, Tensor.float, Tensor.cpu, torch.zeros_like]
        )
        return lambda t: convert(t, memory_format=memory_format)  # type: ignore[call-overload]
    if kind == 0:
        return lambda t: t.unsqueeze(d)
    if kind == 1:
        return lambda t: t.exp()
    if kind == 2:
        return lambda t: t.clone()
    if kind == 3:
        return lambda t: t.contiguous()
    if not dims:
        return None
    if kind == 4:
        order = choose.sample(dims, len(dims))
        return lambda t: t.permute(order)
    if kind == 5:
        other = choose.choice(dims)
        return lambda t: t.transpose(d, other)
    if kind == 6:
        return lambda t: t.squeeze(d)
    if kind == 7:
        begin = choose.randrange(x.shape[d])
        length = choose.randint(1, x.shape[d] - begin)
        return lambda t: t.narrow(d, begin, length)
    if kind == 8:
        begin = choose.randrange(x.shape[d])
        return lambda t: t.select(d, begin)
    if kind == 9:
        index = (slice(None),) * d + (slice(None, None, 2),)
        return lambda t: t[index]
    if kind == 10 and len(dims) > 1:
        start = choose.randrange(len(dims) - 1)
        return lambda t: t.flatten(start, start + 1)
    factor = next((k for k in (2, 3) if x.shape[d] % k == 0), None)
    return None if factor is None else lambda t: t.unflatten(d, (factor, -1))


def says(x: Any) -> list[Any]:
    """What is compared: whether it is contiguous, and strides in memory order, but of dims of size 1."""
    steps = [(n, step) for n, step in zip(x.shape, x.stride(), strict=True) if n != 1]
    formats = [x.is_contiguous(memory_format=f) for n, f in FORMATS.items() if n == x.dim()]
    return [x.is_contiguous(), formats, tuple(x.shape), [sum(s > step for _, s in steps) for _, step in steps]]


def run_chain(choose: random.Random, mesh: DeviceMesh) -> tuple[str, list[Any], bool | str]:
    """The chain as text, what differed from one device, and whether the written tensor is right."""
    shape = [choose.choice((1, 2, 2, 3, 3, 4, 5, 6)) for _ in range(choose.choice((2, 2, 3, 3, 4)))]
    possible: list[Placement] = [Replicate(), *[Shard(d) for d in range(len(shape))] * 2]
    placements = [choose.choice(possible) for _ in range(mesh.ndim)]
    theirs = torch.arange(float(torch.Size(shape).numel())).view(shape) / 100
    ours = distribute_tensor(theirs.clone(), mesh, placements)
    x, y = ours, theirs
    text, differs = f"{shape} {placements}", []
    for _ in range(choose.randrange(2, 7)):
        step = a_step(choose, y)
        if step is None:
            continue
        try:
            y = step(y)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                step(x)
            continue
        try:
            x = step(x)  # type: ignore[assignment]
        except DTensorError:
            return text, differs, "refused"
        text += f" {step.__code__.co_names} {[cell.cell_contents for cell in step.__closure__ or ()]}"
        if not isinstance(x, CopiedView) and says(x) != says(y):
            differs.append((text, says(x), says(y)))
    through: Step = lambda t: t.reshape(-1)  # noqa: E731
    if y.dim() in FORMATS and choose.random() < 0.7:
        through = a_conversion(choose, y.dim())
        text += f" written through {[cell.cell_contents for cell in through.__closure__ or ()]}"
    try:
        through(x).add_(1)
    except DTensorError:
        return text, differs, "refused"
    through(y).add_(1)
    return text, differs, torch.equal(ours.full_tensor(), theirs)


def run_chains(seed: int, count: int, mesh_shape: tuple[int, ...]) -> list[tuple[str, list[Any], bool | str]]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [run_chain(random.Random(f"{seed} {k}"), mesh) for k in range(count)]


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_every_rank_says_what_one_device_says(mesh_shape, count) -> None:
    written = 0
    for ranks in zip(*run_ranks(4, run_chains, 0, count, mesh_shape), strict=True):
        text = ranks[0][0]
        assert not any(differs for _, differs, _ in ranks), (text, [differs for _, differs, _ in ranks])
        outcomes = {outcome for _, _, outcome in ranks}
        assert outcomes in ({True}, {"refused"}), (text, outcomes)
        written += outcomes == {True}
    assert written > count / 3


def gathered(shape: tuple[int, ...], dim: int, terms: bool) -> list[bool]:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(float(torch.Size(shape).numel())).view(shape), mesh, [Shard(dim)])
    whole = x.full_tensor()
    scattered = DTensor.from_local(whole, mesh, [Partial() if terms else Replicate()]).redistribute(mesh, [Shard(dim)])
    return [whole.is_contiguous(), scattered.to_local().is_contiguous(), whole.view(-1)[-1].item() == whole.numel() - 1]


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize(("shape", "dim"), [((2, 3, 3), 1), ((2, 5, 3), 1), ((3, 2), 1), ((2, 4, 1), 2)])
def test_what_was_gathered_or_scattered_is_contiguous(shape, dim, terms) -> None:
    assert run_ranks(4, gathered, shape, dim, terms) == [[True, True, True]] * 4


def conversions_differ() -> list[Any]:
    """Conversions with a memory format, also where they are copies for another reason."""
    mesh = init_device_mesh("cpu", (2,))
    given = [torch.randn(4, 6).t(), torch.randn(2, 4).t(), torch.randn(2, 6, 3, 2).contiguous(memory_format=FORMATS[4])]
    given += [torch.randn(2, 3, 4, 2), torch.randn(4, 2, 3, 2).transpose(0, 3)]
    differ = []
    for theirs in given:
        for placement in (Replicate(), Shard(0), Shard(1)):
            ours = DTensor.from_local(theirs, mesh, [Replicate()]).redistribute(placements=[placement])
            one = theirs if says(ours) == says(theirs) else theirs.contiguous()  # which communication may make it
            assert says(ours) == says(one)
            for memory_format in (torch.contiguous_format, *([FORMATS[4]] if one.dim() == 4 else [])):
                for name, args in (("to", (torch.float64,)), ("to", (torch.float32,)), ("double", ()), ("float", ())):
                    for more in ({}, {"copy": True}) if name == "to" else ({},):
                        both = [getattr(t, name)(*args, memory_format=memory_format, **more) for t in (ours, one)]
                        if says(both[0]) != says(both[1]) or not torch.equal(both[0].full_tensor(), both[1]):
                            differ.append((one.stride(), placement, memory_format, name, args, more, *map(says, both)))
    return differ


def test_conversions_give_the_memory_format_of_one_device() -> None:
    for differ in run_ranks(2, conversions_differ):
        assert not differ, differ
