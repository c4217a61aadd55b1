"""A GPT trained on four ranks, under every parallelism, is the GPT trained on one device: each loss, each gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from ranks import run_ranks
from terrazzo.tensor import DeviceMesh, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from tests.tensor.models import GPT, batch_of_words, distribute, tensor_parallel, whole, worst_difference

STEPS = 10
TOLERANCE = 1e-5
R = Replicate()


def sharded_first(name: str, parameter: nn.Parameter) -> Placement:
    return Shard(0)


def both_ways(name: str, parameter: nn.Parameter) -> Sequence[Placement]:
    """Cut along the second mesh dim as tensor parallelism does, and along the first on dim 0, as FSDP does."""
    return [Shard(0), tensor_parallel(name, parameter)]


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Activations between the cut layers are sharded along the sequence; logits along the words."""
    to_whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=R)
    column, row = (
        ColwiseParallel(use_local_output=False),
        RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    )
    return parallelize_module(
        model,
        mesh,
        {
            "words": RowwiseParallel(input_layouts=R, output_layouts=Shard(1), use_local_output=False),
            "places": RowwiseParallel(input_layouts=R, output_layouts=Shard(0), use_local_output=False),
            "blocks.*.norm?": SequenceParallel(),
            "blocks.*.attention": to_whole,
            "blocks.*.attention.[qkv]": column,
            "blocks.*.attention.out": row,
            "blocks.*.mlp": to_whole,
            "blocks.*.mlp.up": column,
            "blocks.*.mlp.down": row,
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        },
    )


def plain_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The default styles: everything between the cut layers is a plain tensor."""
    return parallelize_module(
        model,
        mesh,
        {
            "words": RowwiseParallel(input_layouts=R),
            "blocks.*.attention.[qkv]": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.mlp.up": ColwiseParallel(),
            "blocks.*.mlp.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=R),
        },
    )


@dataclass(frozen=True)
class Way:
    """One parallelism: the mesh, where the batch lies, and how the model is distributed."""

    mesh: tuple[int, ...]
    batch: tuple[Placement, ...] | None
    place: Callable[[nn.Module, DeviceMesh], nn.Module]
    loss_parallel: bool = False


def by(placement_of: Callable[[str, nn.Parameter], Any]) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    return lambda model, mesh: distribute(
        model, mesh, lambda n, p: (lambda q: q if isinstance(q, Sequence) else [q])(placement_of(n, p))
    )


WAYS = {
    "data parallel": Way((4,), (Shard(0),), by(lambda n, p: R)),
    "tensor parallel": Way((4,), (R,), by(tensor_parallel)),
    "tensor parallel, parallel loss": Way((4,), (R,), by(tensor_parallel), loss_parallel=True),
    "data x tensor parallel": Way(
        (2, 2), (Shard(0), R), by(lambda n, p: [R, tensor_parallel(n, p)]), loss_parallel=True
    ),
    "sharded parameters": Way((4,), (Shard(0),), by(sharded_first)),
    "hybrid sharded parameters": Way((2, 2), (Shard(0), Shard(0)), by(lambda n, p: [R, Shard(0)])),
    "sharded parameters x tensor parallel": Way((2, 2), (Shard(0), R), by(both_ways), loss_parallel=True),
    "sequence parallel": Way((4,), (R,), sequence_parallel, loss_parallel=True),
    "tensor parallel by plan, plain activations": Way((4,), None, plain_tensor_parallel),
}


def place_batch(tensors: Sequence[torch.Tensor], mesh: DeviceMesh, way: Way) -> list[torch.Tensor]:
    return [t if way.batch is None else distribute_tensor(t, mesh, way.batch) for t in tensors]


def train_both(name: str, sizes: dict[str, Any], steps: int = STEPS, batch: int = 8) -> list[tuple[float, float, str]]:
    """Train on one device and distributed; per step the differences of loss, of gradients (and where), of the norm."""
    way = WAYS[name]
    torch.manual_seed(0)
    reference = GPT(**sizes)
    mesh = init_device_mesh("cpu", way.mesh, mesh_dim_names=("a", "b")[: len(way.mesh)])
    model = way.place(copy.deepcopy(reference), mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    rows = []
    for step in range(steps):
        data = batch_of_words(step, batch, length=sizes.get("length", 16), vocabulary=sizes.get("vocabulary", 64))
        expected = reference(*data)
        expected.backward()
        with loss_parallel() if way.loss_parallel else nullcontext():
            loss = model(*place_batch(data, mesh, way))
            loss.backward()
        gradient, where = worst_difference(model, reference, grads=True)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (reference, model)]
        difference = abs(whole(loss).item() - expected.item())
        rows.append((difference, gradient, where, abs(norms[0].item() - whole(norms[1]).item())))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return rows


# Of ways that are parts of another way, the short tests take the other one.
LONG = (
    "data parallel",
    "tensor parallel",
    "tensor parallel, parallel loss",
    "data x tensor parallel",
    "sharded parameters",
)


def ways(names: Iterable[str], short: Collection[str] = WAYS) -> list[Any]:
    """The names, of which those in `LONG`, and those that are not in `short`, are for long tests."""
    return [pytest.param(name, marks=pytest.mark.long if name in LONG or name not in short else ()) for name in names]


SHORT_RUNS = [(name, 4) for name in WAYS if name not in LONG]


@pytest.mark.parametrize(
    ("name", "steps"), [*SHORT_RUNS, *(pytest.param(name, STEPS, marks=pytest.mark.long) for name in WAYS)]
)
def test_gpt_trains_as_on_one_device(name, steps):
    for rows in run_ranks(4, train_both, name, {}, steps):
        assert len(rows) == steps
        for loss, gradient, where, norm in rows:
            assert loss < TOLERANCE
            assert gradient < TOLERANCE, where
            assert norm < TOLERANCE


UNEVEN = {"vocabulary": 61, "width": 24, "heads": 3, "length": 7}


@pytest.mark.parametrize("name", ways(name for name in WAYS if "sequence" not in name and "plain" not in name))
def test_uneven_words_heads_and_samples(name):
    """Three heads, 61 words and five samples do not divide among four ranks; one rank has no samples."""
    for rows in run_ranks(4, train_both, name, UNEVEN, 2, 5):
        for loss, gradient, where, norm in rows:
            assert max(loss, gradient, norm) < TOLERANCE, where


@pytest.mark.parametrize(
    "name", ways(list(WAYS)[1:], short=("sharded parameters x tensor parallel", "sequence parallel"))
)
def test_tied_weights(name):
    for rows in run_ranks(4, train_both, name, {"tied": True}, 3):
        for loss, gradient, where, norm in rows:
            assert max(loss, gradient, norm) < TOLERANCE, where
