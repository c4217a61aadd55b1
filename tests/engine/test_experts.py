"""Experts divided among the data-parallel ranks: one process's losses and weights in every stage, on every degree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from engine.runs import averaged, config, drawn
from ranks import device_type, run_ranks
from terrazzo.engine import Engine, WarmupLR, initialize
from terrazzo.errors import EngineConfigError
from terrazzo.tensor import DTensor, Shard, init_device_mesh
from terrazzo.tensor.parallel import (
    ColwiseParallel,
    ExpertParallel,
    GroupedExperts,
    MixtureOfExperts,
    RowwiseParallel,
    parallelize_module,
)
from terrazzo.tensor.parallel.experts import expert_mesh

pytestmark = pytest.mark.on_late

PARTS, SIZE, STEPS, BEFORE = 4, 2, 4, 2  # a batch has four parts, each with a load-balance loss of its own
EXPERTS = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.moe = MixtureOfExperts(8, 5, EXPERTS, shared=3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, balance = self.moe(self.norm(x))
        return x + y, balance


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.out = nn.Linear(8, 3)
        self.layers[1].moe.experts.w3.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.into(x), torch.zeros(())
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return self.out(x), total


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the parts in x."""
    found = []
    for one, target in zip(x.split(SIZE), y.split(SIZE), strict=True):
        out, balance = model(one)
        found.append(F.mse_loss(out.float(), target) + 0.05 * balance)
    return torch.stack(found).mean()


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(PARTS * SIZE, 5, n, generator=generator) for n in (6, 3))  # type: ignore[return-value]


def train_plainly() -> tuple[list[float], dict[str, Tensor]]:
    model = drawn(Model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    schedule = WarmupLR(optimizer, warmup_max_lr=0.02, warmup_num_steps=5)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, *data(step))
        loss.backward()
        losses.append(loss.item())
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def engine_of(degree: int, stage: int, seed: int = 0, **options: object) -> Engine:
    """With 2 of 4 ranks the user has divided the experts; else the engine does."""
    model = drawn(Model, seed)
    if degree == 2 and dist.get_world_size() == 4:
        torch.manual_seed(seed)
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("rest", "ep"))
        parallelize_module(model, mesh["ep"], {"layers.*.moe.experts": ExpertParallel()})
    else:
        for layer in model.layers:
            layer.moe.experts.expert_parallel_size = degree
    return initialize(model, config={**config(stage), **options})


def train(engine: Engine, start: int, stop: int) -> list[float]:
    losses = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(start, stop):
        x, y = (whole.chunk(ranks)[rank] for whole in data(step))
        loss = loss_of(engine, x, y)
        losses.append(averaged(engine.backward(loss)))
        engine.step()
    return losses


def close(mine: object, expected: object, msg: str | None = None) -> None:
    torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(expected), rtol=1e-4, atol=1e-5, msg=msg)


def check_stages(folder: str) -> None:
    expected, weights = train_plainly()
    for stage, degree in ((0, 2), (1, 4), (2, 2), (3, 2), (3, 4)):
        engine = engine_of(degree, stage)
        experts = engine.module.layers[0].moe.experts
        assert expert_mesh(experts).size() == degree and experts.w1.shape[0] == EXPERTS
        losses = train(engine, 0, BEFORE)
        engine.save_checkpoint(f"{folder}/{stage}-{degree}")
        close(losses + train(engine, BEFORE, STEPS), expected)
        for name, value in engine.module_state_dict().items():
            torch.testing.assert_close(value.full_tensor(), weights[name].detach(), rtol=1e-3, atol=1e-4)
    summed = engine_of(2, 2, gradient_allreduce_op="sum", gradient_clipping=0.0)
    plain = drawn(Model)
    (loss_of(plain, *data(0)) * dist.get_world_size()).backward()
    loss = loss_of(summed, *(whole.chunk(4)[dist.get_rank()] for whole in data(0)))
    summed.backward(loss)
    for name, p in summed.module.named_parameters():
        wanted = plain.get_parameter(name.removeprefix("module."))
        if wanted.grad is not None:
            close(p.grad.full_tensor(), wanted.grad)
    half = engine_of(2, 3, bf16={"enabled": True})
    torch.testing.assert_close(torch.tensor(train(half, 0, STEPS)), torch.tensor(expected), rtol=0.05, atol=0.05)


def check_meta() -> None:
    """A model on the meta device gets the same values on every degree."""
    found = []
    for degree in (1, 2, 4):
        with torch.device("meta"):
            model = Model()
        for layer in model.layers:
            layer.moe.experts.expert_parallel_size = degree
        torch.manual_seed(0)
        state = initialize(model, config=config(3)).module_state_dict()
        found.append({name: value.full_tensor() for name, value in state.items()})
    weight = found[0]["layers.0.moe.experts.w2"]
    assert 0.3 < weight.abs().max() * 5**0.5 <= 1 and not torch.equal(weight[0], weight[1])
    for other in found[1:]:
        for name, value in other.items():
            torch.testing.assert_close(value, found[0][name], rtol=0, atol=0, msg=name)


def test_experts_are_initialised_from_the_meta_device():
    run_ranks(4, check_meta)


def check_resume(folder: str, degree: int, stage: int) -> list[float]:
    engine = engine_of(degree, stage, seed=4)
    engine.load_checkpoint(folder)
    return train(engine, BEFORE, STEPS)


def test_experts_train_in_every_stage_and_resume_on_every_degree(tmp_path):
    run_ranks(4, check_stages, str(tmp_path))
    expected = train_plainly()[0][BEFORE:]
    for saved, world, degree, stage in (("3-2", 2, 2, 2), ("0-2", 4, 4, 3), ("1-4", 1, 1, 0), ("2-2", 2, 1, 1)):
        for losses in run_ranks(world, check_resume, str(tmp_path / saved), degree, stage):
            close(losses, expected)


def check_errors() -> None:
    model = nn.Sequential(GroupedExperts(2, 2, 6))
    model[0].expert_parallel_size = 3  # type: ignore[assignment]
    with pytest.raises(EngineConfigError, match="divided among 3 ranks: that does not divide the 2 data-parallel"):
        initialize(model, config=config(1))
    model = nn.Sequential(GroupedExperts(2, 2, 6))
    parallelize_module(model, init_device_mesh(device_type(), (2,)), {"0": ExpertParallel()})
    with pytest.raises(EngineConfigError, match=r"named dims of the 2 data-parallel ranks.*\(1, 2\)"):
        initialize(model, config=config(1))


def test_degrees_that_do_not_fit_are_errors():
    run_ranks(2, check_errors)


class Words(nn.Module):
    """Attention and experts; one of them is a stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.moe = MixtureOfExperts(8, 5, EXPERTS, shared=3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(torch.relu(self.up(x)))
        return x + self.moe(x)[0]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Words() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def check_together() -> None:
    """Experts with shared sequences, with tensor parallelism, and in a pipeline."""
    data = [torch.randn(2, 4, 4, 8, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    one = drawn(Stack)
    steps = torch.optim.SGD(one.parameters(), lr=0.5)  # which shows errors as large as they are
    expected = []
    for x, y in data:
        loss = F.mse_loss(one(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        steps.step()
        steps.zero_grad()
        expected.append(loss.item())
    settings = {"train_batch_size": 4, "gradient_clipping": 0.5, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}

    def divided(stage: int) -> tuple[Stack, dict[str, Any]]:
        model = drawn(Stack)
        for layer in model.layers:
            layer.moe.experts.expert_parallel_size = 2
        return model, {**settings, "zero_optimization": {"stage": stage}}

    def compare(name: str, engine: Engine, losses: list[float]) -> None:
        close(losses, expected, msg=name)
        weights = dict(one.named_parameters())
        for at, value in engine.module_state_dict().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            far = (whole - weights[at].detach()).abs().max().item()
            assert far < 1e-5, f"{name}: {at} by {far}"

    for stage in (1, 3):
        model, options = divided(stage)
        engine = initialize(model, config={**options, "sequence_parallel_size": 2})
        samples, losses = engine.ranks.samples, []
        for x, y in data:
            mine = slice(samples.index, None, samples.size)
            loss = F.mse_loss(engine(x[mine]), engine.sequences.part(y[mine]))
            losses.append(averaged(engine.backward(loss)))
            engine.step()
        compare(f"sequence {stage}", engine, losses)

        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
        inner = init_device_mesh(device_type(), (1, 2, 2), mesh_dim_names=("rest", "ep", "tp"))["ep", "tp"]
        within = ExpertParallel(tensor={"w1": Shard(1), "w3": Shard(1), "w2": Shard(2)})
        for inside in (False, True):
            model, options = divided(stage)
            parallelize_module(
                model, mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
            )
            if inside:
                parallelize_module(model, inner, {"layers.*.moe.experts": within})
                with pytest.raises(EngineConfigError, match="of the 4 data-parallel ranks.* inside experts is beside"):
                    initialize(copy.deepcopy(model), config=options)
            engine = initialize(model, config=options, mesh=mesh)
            losses = []
            for x, y in data:
                mine = slice(engine.ranks.data.index, None, 2)
                loss = F.mse_loss(engine(x[mine]), y[mine])
                losses.append(averaged(engine.backward(loss)))
                engine.step()
            compare(f"tensor {stage} {inside}", engine, losses)

        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "dp"))
        model, options = divided(stage)
        here = mesh.get_local_rank("pp")
        model.layers[1 - here] = nn.Identity()
        part = PipelineStage(model, here, 2, torch.device(device_type()), group=mesh.get_group("pp"))
        options["gradient_accumulation_steps"] = 2
        engine = initialize(part, config=options, mesh=mesh, pipeline=Schedule1F1B, loss_fn=F.mse_loss)
        mine = slice(engine.ranks.data.index, None, 2)
        compare(f"pipeline {stage}", engine, [engine.train_batch(x[mine], target=y[mine]).item() for x, y in data])


def test_experts_with_shared_sequences_tensor_parallelism_and_pipelines():
    run_ranks(4, check_together)
