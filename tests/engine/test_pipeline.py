"""A model cut into pipeline stages trains as the whole one does in one process, and its checkpoints are the same."""

from __future__ import annotations

import copy
import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.utils.data import TensorDataset

from engine.runs import INPUTS, OUTPUTS, TOTAL, WIDTH, Block, averaged, batches, config, drawn
from ranks import device_type, run_fresh, run_ranks
from terrazzo.checkpoint import Checkpoint, verify
from terrazzo.engine import Engine, WarmupLR, initialize
from terrazzo.errors import CheckpointMismatchError, CheckpointNotFoundError, EngineConfigError, EngineError, RankError
from terrazzo.tensor import init_device_mesh

pytestmark = pytest.mark.on_late

STEPS, BEFORE = 4, 2
SPLIT = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV)


class Chain(nn.Module):
    """Four blocks, of which one is half frozen; each stage has a buffer of its own and one in common."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head: nn.Module = nn.Linear(WIDTH, OUTPUTS)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.blocks[1].up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def whole(seed: int = 0) -> Chain:
    return drawn(Chain, seed)


def part(model: Chain, index: int, count: int) -> Chain:
    """A stage: other stages' layers are gone, and the rest keeps its names."""
    model = copy.deepcopy(model)
    size = len(model.blocks) // count
    for i in range(len(model.blocks)):
        if i // size != index:
            model.blocks[i] = nn.Identity()
    if index > 0:
        model.embed = nn.Identity()
    if index < count - 1:
        model.head = nn.Identity()
    return model


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return ((output.float() - target) ** 2).mean()


def pipelined(depth: int, stage: int, schedule: Any = Schedule1F1B, seed: int = 0, **options: Any) -> Engine:
    """All ranks, in pipelines of `depth` ranks; schedules of several stages per rank get two."""
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh(device_type(), (depth, ranks // depth), mesh_dim_names=("pp", "dp"))
    per_rank = 1 if schedule in (ScheduleGPipe, Schedule1F1B) else 2
    count, here = depth * per_rank, mesh.get_local_rank("pp")
    mine = list(range(here, count, depth))
    if schedule in (ScheduleZBVZeroBubble, ScheduleDualPipeV):  # which go down the ranks and come back
        mine = [here, count - 1 - here]
    stages = [
        PipelineStage(part(whole(seed), i, count), i, count, torch.device(device_type()), group=mesh.get_group("pp"))
        for i in mine
    ]
    options = {"gradient_accumulation_steps": depth, **options}
    model = stages[0] if per_rank == 1 else stages
    return initialize(model, pipeline=schedule, loss_fn=loss_fn, mesh=mesh, config=config(stage, **options))


def train(engine: Engine, steps: int, start: int = 0) -> list[float]:
    size, index = TOTAL // engine.dp_world_size, engine.ranks.data.index
    own = slice(index * size, (index + 1) * size)
    return [engine.train_batch(x[own], target=y[own]).item() for x, y in batches(steps, start)]


def train_plainly(steps: int, dtype: torch.dtype = torch.float32) -> tuple[list[float], dict[str, Tensor]]:
    master = whole()
    model = copy.deepcopy(master).to(dtype)
    pairs = [(m, p) for m, p in zip(master.parameters(), model.parameters(), strict=True) if m.requires_grad]
    optimizer = torch.optim.AdamW([m for m, _ in pairs], lr=0.01, weight_decay=0.1)
    schedule = WarmupLR(optimizer, warmup_max_lr=0.02, warmup_num_steps=5)
    losses = []
    for x, y in batches(steps):
        with torch.no_grad():
            for m, p in pairs:
                p.copy_(m)
        loss = loss_fn(model(x.to(dtype)), y)
        loss.backward()
        losses.append(loss.item())
        for m, p in pairs:
            m.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_([m for m, _ in pairs], 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, dict(master.named_parameters())


def close(losses: list[float], expected: list[float], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)


def evaluate_plainly(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> float:
    model = whole()
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        return loss_fn(model.eval()(x), y).item()


def check_training(depth: int, runs: list[tuple[Any, int]]) -> None:
    expected, weights = train_plainly(STEPS)
    for schedule, stage in runs:
        engine = pipelined(depth, stage, schedule, gradient_accumulation_steps=4 if schedule in SPLIT else depth)
        ranks = torch.distributed.get_world_size()
        assert (engine.dp_world_size, engine.mp_world_size) == (ranks // depth, depth)
        close(train(engine, STEPS), expected)
        assert (engine.global_steps, engine.global_samples) == (STEPS, STEPS * TOTAL)
        if schedule in SPLIT:
            (x, y), size = next(batches(1, STEPS)), TOTAL // engine.dp_world_size
            own = slice(size * engine.ranks.data.index, size * (engine.ranks.data.index + 1))
            if schedule is ScheduleInterleavedZeroBubble:
                found = engine.eval_batch(x[own], target=y[own]).item()
                assert found == pytest.approx(evaluate_plainly(weights, x, y), rel=1e-4)
            else:
                with pytest.raises(EngineError, match=r"cannot run forward only .* here \[1, 2\], are on one rank"):
                    engine.eval_batch(x[own], target=y[own])
        for name, ours in engine.module.named_parameters():
            torch.testing.assert_close(ours.detach().full_tensor(), weights[name].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("world", "depth", "schedules"),
    [
        (2, 2, [(ScheduleGPipe, 0), (ScheduleGPipe, 3), (ScheduleInterleaved1F1B, 1), (ScheduleLoopedBFS, 3)]),
        (4, 2, [(Schedule1F1B, 0), (Schedule1F1B, 1), (Schedule1F1B, 2), (Schedule1F1B, 3)]),
        (4, 4, [(Schedule1F1B, 1)]),
        (2, 2, [(ScheduleInterleavedZeroBubble, 3), (ScheduleZBVZeroBubble, 0), (ScheduleDualPipeV, 2)]),
        pytest.param(
            *(4, 2, [(ScheduleInterleavedZeroBubble, 1), (ScheduleZBVZeroBubble, 3), (ScheduleDualPipeV, 2)]),
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_stage_and_schedule_trains_like_one_process(world, depth, schedules):
    run_ranks(world, check_training, depth, schedules)


def check_traced() -> None:
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("pp", "dp"))
    split = {"blocks.2": SplitPoint.BEGINNING}
    pipe = pipeline(whole(), mb_args=(torch.zeros(TOTAL // 2, INPUTS),), split_spec=split)
    stage = pipe.build_stage(mesh.get_local_rank("pp"), torch.device(device_type()), mesh.get_group("pp"))
    options = config(2, gradient_accumulation_steps=2)
    engine = initialize(stage, pipeline=ScheduleGPipe, loss_fn=loss_fn, mesh=mesh, config=options)
    close(train(engine, STEPS), train_plainly(STEPS)[0])
    state = engine.module_state_dict()
    assert ("head.weight" in state) is (mesh.get_local_rank("pp") == 1) and state.keys() <= whole().state_dict().keys()


def test_stages_that_pytorch_has_cut_out_of_the_whole_model():
    run_ranks(2, check_traced)


def check_sixteen_bits() -> None:
    expected, _ = train_plainly(STEPS, torch.bfloat16)
    first = None
    for stage in (0, 1, 2, 3):
        engine = pipelined(2, stage, bf16={"enabled": True})
        losses = train(engine, STEPS)
        close(losses, expected, 2e-2)
        first = losses if first is None else first
        close(losses, first, 1e-3)
        assert all(p.dtype is torch.float32 for p in engine.module.parameters())


def check_overflow() -> None:
    counted = None
    for stage in (0, 2, 3):
        engine = pipelined(2, stage, fp16={"enabled": True, "initial_scale_power": 18, "hysteresis": 1})
        train(engine, 8)
        taken = 8 - engine.skipped_steps
        assert 0 < engine.skipped_steps < 8 and engine.lr_scheduler.last_batch_iteration == taken - 1
        here = (engine.skipped_steps, engine.loss_scale.value)
        assert averaged(torch.tensor(float(here[0]))) == here[0]  # every rank has skipped the same
        counted = here if counted is None else counted
        assert here == counted
        static = pipelined(2, stage, fp16={"enabled": True, "loss_scale": 128})
        close(train(static, STEPS), train_plainly(STEPS, torch.float16)[0], 2e-3)


@pytest.mark.long
def test_sixteen_bits_and_overflow_decided_by_all_stages():
    run_ranks(4, check_sixteen_bits)
    run_ranks(4, check_overflow)


# ------------------------------------------------------------------ checkpoints


def unpipelined(stage: int, **options: Any) -> Engine:
    return initialize(whole(seed=7), config=config(stage, **options))


def train_unpipelined(engine: Engine, steps: int, start: int = 0) -> list[float]:
    size, index = TOTAL // engine.dp_world_size, engine.ranks.data.index
    losses = []
    for x, y in batches(steps, start):
        loss = loss_fn(engine(x[index * size : (index + 1) * size]), y[index * size : (index + 1) * size])
        losses.append(averaged(engine.backward(loss)))
        engine.step()
    return losses


def save_pipelined(folder: str, depth: int, stage: int, schedule: Any) -> None:
    engine = pipelined(depth, stage, schedule)
    train(engine, BEFORE)
    engine.save_checkpoint(folder, client_state={"note": "piped"})


def save_unpipelined(folder: str, stage: int, layout: str = "native") -> None:
    engine = initialize(whole(), config=config(stage))
    train_unpipelined(engine, BEFORE)
    engine.save_checkpoint(folder, client_state={"note": "piped"}, layout=layout)


def resume_pipelined(folder: str, depth: int, stage: int, schedule: Any) -> list[float]:
    engine = pipelined(depth, stage, schedule, seed=3)
    assert engine.load_checkpoint(folder)[1] == {"note": "piped"}
    start = engine.global_steps
    assert engine.lr_scheduler.last_batch_iteration == start - 1
    return train(engine, STEPS - start, start=start)


def resume_unpipelined(folder: str, stage: int) -> list[float]:
    engine = unpipelined(stage)
    assert engine.load_checkpoint(folder)[1] == {"note": "piped"}
    start = engine.global_steps
    return train_unpipelined(engine, STEPS - start, start=start)


def test_checkpoints_are_those_of_the_whole_model(tmp_path):
    expected = train_plainly(STEPS)[0][BEFORE:]
    run_ranks(1, save_unpipelined, str(tmp_path / "whole"), 0)
    run_ranks(2, save_unpipelined, str(tmp_path / "deepspeed"), 2, "deepspeed")
    reference = Checkpoint(tmp_path / "whole" / f"global_step{BEFORE}").state_dict()
    saved = {
        "whole": (None, [(4, 2, 2, ScheduleGPipe), (2, 2, 1, ScheduleInterleaved1F1B), (4, 4, 3, Schedule1F1B)]),
        "deepspeed": (None, [(4, 2, 1, Schedule1F1B)]),
        "2x2": ((4, 2, 1, Schedule1F1B), [None, (4, 4, 2, Schedule1F1B)]),
        "4": ((4, 4, 0, ScheduleGPipe), [None, (2, 2, 3, Schedule1F1B)]),
        "2": ((2, 2, 3, ScheduleInterleaved1F1B), [None, (4, 2, 0, Schedule1F1B)]),
    }
    for name, (how, others) in saved.items():
        folder = str(tmp_path / name)
        if how is not None:
            run_ranks(how[0], save_pipelined, folder, *how[1:])
            verify(tmp_path / name / f"global_step{BEFORE}")
            stored = Checkpoint(tmp_path / name / f"global_step{BEFORE}").state_dict()
            assert stored["module"].keys() == reference["module"].keys()
            assert stored["optimizer"]["state"].keys() == reference["optimizer"]["state"].keys()
            assert len(stored["optimizer"]["param_groups"]) == len(stored["param_shapes"]) == 1
            assert sorted(stored["param_shapes"][0]) == sorted(reference["param_shapes"][0])
            assert stored["frozen_param_shapes"] == reference["frozen_param_shapes"]
            assert stored["buffer_names"] == reference["buffer_names"]
            assert stored["mp_world_size"] == how[1]
        for other in others:
            if other is None:
                resumed = run_ranks(2, resume_unpipelined, folder, 3)
            else:
                resumed = run_ranks(other[0], resume_pipelined, folder, *other[1:])
            for losses in resumed:
                close(losses, expected)


def train_until_killed(folder: str) -> None:
    engine = pipelined(2, 1)
    while True:
        train(engine, 1, start=engine.global_steps)
        saving = engine.save_checkpoint(folder, client_state={"note": "piped"}, async_op=True)
        if engine.global_steps > BEFORE:
            time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
        saving.result()


def test_a_pipeline_that_is_killed_goes_on(tmp_path):
    outcomes = run_fresh(2, train_until_killed, str(tmp_path), timeout=60)
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL] * 2
    start = int((tmp_path / "latest").read_text().removeprefix("global_step"))
    assert start in (BEFORE, BEFORE + 1)  # whether or not the last save was through
    expected = train_plainly(STEPS)[0][start:]
    resumed = run_ranks(2, resume_unpipelined, str(tmp_path), 2)
    resumed += run_ranks(4, resume_pipelined, str(tmp_path), 4, 1, Schedule1F1B)
    for losses in resumed:
        close(losses, expected)


def check_misfits(folder: str) -> None:
    """What the checkpoint lacks of one stage is an error on all."""
    model = whole()
    model.head = nn.Linear(WIDTH, OUTPUTS, bias=False)
    initialize(model, config=config(1)).save_checkpoint(folder)
    engine = pipelined(2, 1)
    with pytest.raises(CheckpointMismatchError, match=r"head.bias: not in the checkpoint"):
        engine.load_checkpoint(folder)
    with pytest.raises(RankError, match=r"head.bias.exp_avg: not in the checkpoint"):
        engine.load_checkpoint(folder, load_module_strict=False)
    engine.load_checkpoint(folder, load_module_only=True, load_module_strict=False)
    with pytest.raises(CheckpointNotFoundError, match="rank 1: .*there is no checkpoint .*gone"):  # on both ranks
        engine.load_checkpoint(f"{folder}/gone" if torch.distributed.get_rank() == 1 else folder, "global_step0")
    engine.load_checkpoint(folder, load_module_only=True, load_module_strict=False)


def test_checkpoints_that_do_not_fit(tmp_path):
    run_ranks(2, check_misfits, str(tmp_path))


# ------------------------------------------------------------------ parameters that stages share


class Tied(Chain):
    """The head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight


def tied(seed: int = 0) -> Tied:
    return drawn(Tied, seed)


def square_batches(steps: int, start: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    drawn = [torch.randn(2, TOTAL, WIDTH, generator=generator) for _ in range(start + steps)]
    return [(x, y) for x, y in drawn[start:]]


def tied_pipeline(stage: int, seed: int = 0) -> Engine:
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh(device_type(), (2, ranks // 2), mesh_dim_names=("pp", "dp"))
    here = mesh.get_local_rank("pp")
    own = PipelineStage(
        part(tied(seed + here), here, 2), here, 2, torch.device(device_type()), group=mesh.get_group("pp")
    )
    options = config(stage, gradient_accumulation_steps=2)
    same = {"head.weight": "embed.weight"}
    return initialize(own, pipeline=Schedule1F1B, loss_fn=loss_fn, mesh=mesh, tied=same, config=options)


def train_tied(engine: Engine, steps: int, start: int = 0) -> list[float]:
    size, index = TOTAL // engine.dp_world_size, engine.ranks.data.index
    losses = []
    for x, y in square_batches(steps, start):
        x, y = (part[index * size : (index + 1) * size] for part in (x, y))
        if engine.pipeline is not None:
            losses.append(engine.train_batch(x, target=y).item())
        else:
            losses.append(averaged(engine.backward(loss_fn(engine(x), y))))
            engine.step()
    return losses


def tied_plainly() -> list[float]:
    """Of the whole model, whose stages other than the first were made of other seeds; in PyTorch alone."""
    model, other = tied(), tied(1)
    for name, value in other.state_dict().items():
        if name.startswith(("blocks.2", "blocks.3", "head.bias")):
            model.state_dict()[name].copy_(value)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    schedule = WarmupLR(optimizer, warmup_max_lr=0.02, warmup_num_steps=5)
    losses = []
    for x, y in square_batches(STEPS):
        loss = loss_fn(model(x), y)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


def check_tied(folder: str) -> None:
    for stage in (0, 2, 3):
        engine = tied_pipeline(stage)
        losses = train_tied(engine, BEFORE)
        engine.save_checkpoint(folder + str(stage))
        close(losses + train_tied(engine, STEPS - BEFORE, start=BEFORE), tied_plainly())


def resume_tied(folder: str, pipeline: bool) -> list[float]:
    engine = tied_pipeline(1, seed=5) if pipeline else initialize(tied(9), config=config(3))
    engine.load_checkpoint(folder)
    losses = train_tied(engine, STEPS - BEFORE, start=BEFORE)
    if not pipeline:
        again = initialize(tied(3), config=config(1))
        again.load_checkpoint(folder)
        again.save_checkpoint(folder, "whole")
    return losses


def test_parameters_that_stages_share(tmp_path):
    run_ranks(4, check_tied, str(tmp_path / "tied"))
    expected = tied_plainly()[BEFORE:]
    for stage in (0, 3):
        stored = Checkpoint(tmp_path / f"tied{stage}" / f"global_step{BEFORE}").state_dict()
        assert stored["shared_params"] == {"head.weight": "embed.weight"}
        assert "head.weight" not in stored["module"] and "head.weight" not in stored["optimizer"]["state"]
        close(run_ranks(2, resume_tied, str(tmp_path / f"tied{stage}"), False)[0], expected)
        close(run_ranks(2, resume_tied, str(tmp_path / f"tied{stage}"), True)[0], expected)  # of the one saved last


# ------------------------------------------------------------------ several param groups


class Words(nn.Module):
    """Made of an embedding and a head, either of which another stage may have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words: nn.Module = nn.Embedding(11, 5)
        self.head: nn.Module = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


def check_param_groups(folder: str) -> None:
    """In two param groups, of which the second stage has one only."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "dp"))
    here, data = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    tokens = torch.randint(0, 11, (5, 8, 3), generator=torch.Generator().manual_seed(3))
    target = torch.randn(5, 8, 3, 2, generator=torch.Generator().manual_seed(4))
    plain, module = Words(), Words()
    setattr(module, "words" if here else "head", nn.Identity())

    def optimizer(model: Words, rate: float) -> torch.optim.Optimizer:
        parts = [(model.head, 0.1), (model.words, 0.0)]
        groups = [{"params": list(m.parameters()), "weight_decay": decay} for m, decay in parts]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate)

    options = config(0, gradient_accumulation_steps=2)
    del options["optimizer"], options["scheduler"]
    stage = PipelineStage(module, here, 2, torch.device(device_type()), group=mesh.get_group("pp"))
    passed = {"pipeline": ScheduleGPipe, "loss_fn": loss_fn, "mesh": mesh, "config": options}
    engine, reference = initialize(stage, optimizer(module, 0.02), **passed), optimizer(plain, 0.02)
    for step, (x, y) in enumerate(zip(tokens, target, strict=True)):
        if step == 3:
            engine.save_checkpoint(folder)
            for group in engine.optimizer.param_groups:
                group["weight_decay"], group["lr"] = 0.5, 0.0
            engine.load_checkpoint(folder)
        own = slice(4 * data, 4 * data + 4)
        loss = loss_fn(plain(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        assert engine.train_batch(x[own], target=y[own]).item() == pytest.approx(loss.item(), rel=1e-5)


def test_stages_with_some_of_the_param_groups(tmp_path):
    run_ranks(4, check_param_groups, str(tmp_path))
    stored = Checkpoint(tmp_path / "global_step3").state_dict()
    groups = stored["optimizer"]["param_groups"]
    found = {tuple(group["params"]): group["weight_decay"] for group in groups}
    assert found == {("words.weight",): 0.0, ("head.weight", "head.bias"): 0.1}
    assert [[name for name, _ in shapes] for shapes in stored["param_shapes"]] == [list(names) for names in found]


# ------------------------------------------------------------------ data, evaluation, what is refused


def check_data_and_evaluation(folder: str) -> None:
    x = torch.randn(48, INPUTS, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, x[:, :OUTPUTS].contiguous())
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "dp"))
    here = mesh.get_local_rank("pp")

    def build() -> Engine:
        stage = PipelineStage(part(whole(), here, 2), here, 2, torch.device(device_type()), group=mesh.get_group("pp"))
        options = config(1, gradient_accumulation_steps=2, train_batch_size=16)
        make = partial(ScheduleGPipe)
        return initialize(stage, training_data=data, pipeline=make, loss_fn=loss_fn, mesh=mesh, config=options)

    engine, plain = build(), whole()
    engine.module.blocks[2 * here].norm.eval()
    before = loss_fn(plain(x[:8]), x[:8, :OUTPUTS])
    assert engine.eval_batch(x[:8], target=x[:8, :OUTPUTS]).item() == pytest.approx(before.item(), rel=1e-5)
    assert engine.module.training and not engine.module.blocks[2 * here].norm.training
    batches = iter(engine.training_dataloader)
    for _ in range(2):
        inputs, target = next(batches)
        assert len(inputs) == 8
        engine.train_batch(inputs, target=target)
    engine.save_checkpoint(folder)
    expected = [engine.train_batch(i, target=t).item() for (i, t), _ in zip(batches, range(3), strict=False)]
    again = build()
    again.load_checkpoint(folder)
    batches = iter(again.training_dataloader)
    assert [again.train_batch(i, target=t).item() for (i, t), _ in zip(batches, range(3), strict=False)] == expected
    after = again.eval_batch(x[:8], target=x[:8, :OUTPUTS])
    assert after == engine.eval_batch(x[:8], target=x[:8, :OUTPUTS]) and after < before

    with pytest.raises(EngineError, match="call train_batch"):
        engine(x[:8])
    with pytest.raises(EngineError, match="have 5 samples, but a step of this rank takes 8: 2 micro-batches of 4"):
        engine.train_batch(x[:5], target=x[:5])
    with pytest.raises(EngineError, match=r"shapes \[\(8, 2, 6\)\] and had \[\(8, 6\)\] before: .*dynamic_shape"):
        engine.eval_batch(x[:8, None].expand(8, 2, INPUTS), target=x[:8, None, :OUTPUTS])


def test_data_and_evaluation(tmp_path):
    run_ranks(4, check_data_and_evaluation, str(tmp_path))


def check_refusals() -> None:
    mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("pp", "dp"))
    here = mesh.get_local_rank("pp")

    def stage(module: nn.Module, index: int = here, count: int = 2) -> PipelineStage:
        return PipelineStage(module, index, count, torch.device(device_type()), group=mesh.get_group("pp"))

    def build(model: Any, make: Any = ScheduleGPipe, loss: Any = loss_fn, **options: Any) -> Engine:
        return initialize(model, pipeline=make, loss_fn=loss, mesh=mesh, config=config(1, **options))

    own = part(whole(), here, 2)
    with pytest.raises(EngineConfigError, match=r"embed.weight on ranks \[0, 1\].*nn.Identity"):
        build(stage(whole()))
    for same, message in (
        ({"head.weight": "embed.bias"}, "have different shapes"),
        ({"head.weight": "tail.weight"}, r"tail.weight must be a parameter of exactly one stage.*none"),
        ({"head.weight": "head.bias"}, "are on the same rank"),
    ):
        with pytest.raises(EngineConfigError, match=message):
            initialize(stage(own), pipeline=ScheduleGPipe, loss_fn=loss_fn, mesh=mesh, tied=same, config=config(1))
    with pytest.raises(EngineConfigError, match="needs pipeline=.* and loss_fn="):
        build(stage(own), loss=None)
    with pytest.raises(EngineConfigError, match="pass the class of the schedule"):
        build(stage(own), ScheduleGPipe(stage(own), 1))
    with pytest.raises(EngineConfigError, match=rf"communicates with ranks \[{here}\].*get_group\('pp'\)"):
        alone = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("pp", "dp")).get_group("dp")
        build(PipelineStage(own, here, 2, torch.device(device_type()), group=alone))
    for key, options in (
        ("sequence_parallel_size", {"sequence_parallel_size": 2}),
        ("tensor_parallel.autotp_size", {"tensor_parallel": {"autotp_size": 2}}),
        ("managed_gradient_accumulation", {"managed_gradient_accumulation": False}),
    ):
        with pytest.raises(EngineConfigError, match=f"{key} does not support pipeline"):
            build(stage(own), **options)
    with pytest.raises(EngineConfigError, match="hold each stage exactly once"):
        build(stage(own, 0, 3))
    with pytest.raises(EngineConfigError, match="not a PipelineStage"):
        build(own)
    with pytest.raises(EngineConfigError, match="not Linear|not str"):
        build("model")
    with pytest.raises(EngineConfigError, match="needs a dim named 'pp'"):
        flat = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
        initialize(stage(own), pipeline=ScheduleGPipe, loss_fn=loss_fn, mesh=flat, config=config(1))
    with pytest.raises(
        EngineConfigError, match="Schedule1F1B could not create a schedule of 1 stage and 1 micro-batches"
    ):
        build(stage(own), Schedule1F1B, gradient_accumulation_steps=1)


def test_what_is_refused():
    run_ranks(2, check_refusals)
