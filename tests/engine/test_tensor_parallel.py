"""A small GPT, tensor-parallel under the engine: the same losses as one process, and checkpoints for any shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from engine.runs import averaged, config, drawn
from ranks import device_type, run_ranks
from terrazzo.checkpoint import Checkpoint
from terrazzo.engine import Engine, WarmupLR, initialize
from terrazzo.tensor import DTensor, Replicate, init_device_mesh
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.on_late

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 13, 12, 4, 6, 8
STEPS, BEFORE = 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # Without biases: that of keys has no gradient but rounding, which Adam makes steps of.
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (part(y).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Of two blocks, whose second has a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.words: nn.Module = nn.Embedding(VOCABULARY, WIDTH)
        self.places: nn.Module = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm: nn.Module = nn.LayerNorm(WIDTH)
        self.head: nn.Module = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks[1].up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            x = self.words(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(seed: int = 0) -> GPT:
    return drawn(GPT, seed)


def tokens(steps: int, start: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(start + steps)]
    return [(batch[:, :-1], batch[:, 1:]) for batch in drawn[start:]]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def parallelize(model: nn.Module, mesh: object) -> nn.Module:
    cut = {f"{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    cut |= {name: RowwiseParallel() for name in ("proj", "down")}
    plan = {f"blocks.{i}.{name}": style for i in range(2) for name, style in cut.items()}
    plan["words"] = RowwiseParallel(input_layouts=Replicate())
    own = {name for name, module in model.named_modules() if not isinstance(module, nn.Identity)}
    return parallelize_module(model, mesh, {name: style for name, style in plan.items() if name in own})


def engine_of(shape: tuple[int, int], stage: int, seed: int = 0) -> Engine:
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("dp", "tp"))
    return initialize(parallelize(gpt(seed), mesh["tp"]), mesh=mesh, config=config(stage))


def train(engine: Engine, steps: int, start: int = 0) -> list[float]:
    losses = []
    size, index = BATCH // engine.dp_world_size, engine.ranks.data.index
    for x, y in tokens(steps, start):
        loss = loss_fn(engine(x[index * size : (index + 1) * size]), y[index * size : (index + 1) * size])
        losses.append(averaged(engine.backward(loss)))
        engine.step()
    return losses


def train_plainly(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model = gpt()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    schedule = WarmupLR(optimizer, warmup_max_lr=0.02, warmup_num_steps=5)
    losses = []
    for x, y in tokens(steps):
        loss = loss_fn(model(x), y)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def close(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def check_stages(folder: str) -> None:
    expected, weights = train_plainly(STEPS)
    for stage in (0, 1, 2, 3):
        engine = engine_of((2, 2), stage)
        assert (engine.dp_world_size, engine.mp_world_size) == (2, 2)
        losses = train(engine, BEFORE)
        engine.save_checkpoint(f"{folder}/{stage}")
        close(losses + train(engine, STEPS - BEFORE, start=BEFORE), expected)
        state = engine.module_state_dict()
        assert isinstance(state["blocks.0.q.weight"], DTensor) and state.keys() == weights.keys()
        for name, value in state.items():
            torch.testing.assert_close(value.full_tensor(), weights[name].detach(), rtol=1e-4, atol=1e-5)


def resume(folder: str, shape: tuple[int, int], stage: int) -> list[float]:
    engine = engine_of(shape, stage, seed=4)
    engine.load_checkpoint(folder)
    assert engine.global_steps == BEFORE
    return train(engine, STEPS - BEFORE, start=BEFORE)


def test_a_gpt_trains_in_every_stage_and_resumes_in_every_shape(tmp_path):
    run_ranks(4, check_stages, str(tmp_path))
    stored = Checkpoint(tmp_path / "3" / f"global_step{BEFORE}").state_dict()
    assert (stored["dp_world_size"], stored["mp_world_size"]) == (2, 2)
    # Cut into the rows of two tensor-parallel ranks, and each of these among two data-parallel ones.
    assert stored["frozen_param_fragments"] == [
        ["blocks.1.up.weight", 0, [5, 5, 5, 5]],
        ["blocks.1.up.bias", 0, [5] * 4],
    ]
    expected = train_plainly(STEPS)[0][BEFORE:]
    for saved, world, shape, stage in (
        (1, 4, (4, 1), 3),
        (3, 2, (1, 2), 0),
        (0, 4, (1, 4), 2),
        (2, 1, (1, 1), 1),
    ):
        for losses in run_ranks(world, resume, str(tmp_path / str(saved)), shape, stage):
            close(losses, expected)


def stages_of_both(mesh: object, stage: int, seed: int) -> Engine:
    """Two pipeline stages of one block each, each of them tensor-parallel."""
    here = mesh.get_local_rank("pp")
    model = gpt(seed)
    model.blocks[1 - here] = nn.Identity()
    for name in ("norm", "head") if here == 0 else ("words", "places"):
        setattr(model, name, nn.Identity())
    module = parallelize(model, mesh["tp"])
    pipelined = PipelineStage(module, here, 2, torch.device(device_type()), group=mesh.get_group("pp"))
    options = config(stage, gradient_accumulation_steps=2)
    return initialize(pipelined, pipeline=ScheduleGPipe, loss_fn=loss_fn, mesh=mesh, config=options)


def check_with_pipeline(folder: str) -> None:
    expected = train_plainly(STEPS)[0]
    mesh = init_device_mesh(device_type(), (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    for stage in (1, 3):
        engine = stages_of_both(mesh, stage, seed=0)
        assert (engine.dp_world_size, engine.mp_world_size) == (1, 4)
        close([engine.train_batch(x, target=y).item() for x, y in tokens(STEPS)], expected)
    resumed = stages_of_both(mesh, 2, seed=9)
    resumed.load_checkpoint(folder)
    later = [resumed.train_batch(x, target=y).item() for x, y in tokens(STEPS - BEFORE, BEFORE)]
    close(later, expected[BEFORE:])


def save_plain(folder: str) -> None:
    engine = engine_of((1, 1), 0)
    train(engine, BEFORE)
    engine.save_checkpoint(folder)


def test_tensor_parallel_stages_of_a_pipeline(tmp_path):
    run_ranks(1, save_plain, str(tmp_path))
    run_ranks(4, check_with_pipeline, str(tmp_path))
