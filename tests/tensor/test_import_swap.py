"""A program written for PyTorch's distributed tensor runs with its imports changed, and gives the same numbers."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ranks import run_ranks


def names_of(package: str) -> SimpleNamespace:
    modules = [importlib.import_module(f"{package}{part}") for part in ("", ".parallel", ".experimental", ".debug")]
    found = {name: value for m in modules for name, value in vars(m).items() if not name.startswith("_")}
    return SimpleNamespace(**found)


def check_words_of_errors(package: str) -> None:
    t = names_of(package)
    mesh, other = t.init_device_mesh("cpu", (1, 1)), t.init_device_mesh("cpu", (1,))
    x = t.distribute_tensor(torch.ones(2, 2), mesh, [t.Shard(0), t.Shard(1)])
    with pytest.raises(ValueError, match="to a different device mesh"):
        t.distribute_tensor(x, other, [t.Shard(0)])
    with pytest.raises(ValueError, match="to a different placements"):
        t.distribute_tensor(x, mesh, [t.Shard(0), t.Replicate()])
    cut = [t.Shard(0), t.Shard(1)]
    both = t.local_map(torch.add, out_placements=cut, in_placements=(cut, None))
    with pytest.raises(AssertionError, match="expects placements"):
        both(x, x)


@pytest.mark.parametrize("package", ["torch.distributed.tensor", "terrazzo.tensor"])
def test_errors_have_the_words_that_programs_look_for(package: str) -> None:
    run_ranks(1, check_words_of_errors, package)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([MLP(), MLP()])
        self.head = nn.Linear(8, 32)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tensor_parallel_training(t: SimpleNamespace) -> list[float]:
    """The tutorial's program: tensor and sequence parallel, loss parallel, AdamW with clipping."""
    torch.manual_seed(0)
    mesh = t.init_device_mesh("cpu", (4,)) if hasattr(t, "init_device_mesh") else None
    mesh = mesh or torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
    model = Classifier()
    plan: dict[str, Any] = {
        "embedding": t.RowwiseParallel(input_layouts=t.Replicate(), output_layouts=t.Shard(1)),
        "head": t.ColwiseParallel(input_layouts=t.Shard(1), output_layouts=t.Shard(-1), use_local_output=False),
    }
    for i in range(2):
        plan[f"layers.{i}.norm"] = t.SequenceParallel()
        plan[f"layers.{i}"] = t.PrepareModuleInput(input_layouts=(t.Shard(1),), desired_input_layouts=(t.Shard(1),))
        plan[f"layers.{i}.up"] = t.ColwiseParallel(input_layouts=t.Shard(1))
        plan[f"layers.{i}.down"] = t.RowwiseParallel(output_layouts=t.Shard(1), use_local_output=False)
    t.parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        tokens = torch.randint(0, 32, (2, 8), generator=generator)
        optimizer.zero_grad()
        with t.loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss))
    return losses


def conversions_and_regions(t: SimpleNamespace) -> list[Any]:
    """Placements, redistribution, local regions, factories, modules, counting."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(24.0).reshape(6, 4)
    x = t.distribute_tensor(whole, mesh, [t.Shard(0), t.Shard(1)])
    assert isinstance(x, t.DTensor) and x.placements == (t.Shard(0), t.Shard(1))
    assert x.placements[0].is_shard(0) and not x.placements[0].is_replicate() and not x.placements[0].is_partial()
    y = x.redistribute(mesh, [t.Replicate(), t.Replicate()])
    z = t.DTensor.from_local(x.to_local(), mesh, [t.Shard(0), t.Shard(1)], run_check=False)
    doubled = t.local_map(lambda local: local * 2, out_placements=[t.Shard(0), t.Shard(1)])(x)
    module = t.distribute_module(nn.Linear(4, 4), mesh)
    with t.CommDebugMode() as mode:
        x.redistribute(mesh, [t.Replicate(), t.Replicate()])
    answers: list[Any] = [y.to_local(), z.full_tensor(), doubled.full_tensor(), (x + 1).sum().full_tensor()]
    answers += [t.ones(4, 3, device_mesh=mesh, placements=[t.Shard(0), t.Replicate()]).to_local()]
    answers += [mode.get_total_counts() > 0, isinstance(module.weight, t.DTensor), x.device_mesh.ndim, tuple(x.shape)]
    with t.implicit_replication():
        answers.append((x * torch.full((4,), 2.0)).full_tensor())
    return answers


def both(program_name: str) -> None:
    program = globals()[program_name]
    ours = program(names_of("terrazzo.tensor"))
    theirs = program(names_of("torch.distributed.tensor"))
    torch.testing.assert_close(ours, theirs)


def test_tensor_parallel_training() -> None:
    run_ranks(4, both, "tensor_parallel_training")


def test_conversions_and_regions() -> None:
    run_ranks(4, both, "conversions_and_regions")
