"""What each rank of the demo does."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.demo.messages import ForwardWarnings, Probed, Ready, Report, Saved, Trained, reporter
from terrazzo.demo.model import GPT, loss_of, tensor_parallel
from terrazzo.demo.plan import Leg, Plan
from terrazzo.demo.text import Passages
from terrazzo.engine import Engine, ResumableSampler, initialize
from terrazzo.engine.config import Batch
from terrazzo.tensor import DTensor, init_device_mesh


def train_sharded(plan: Plan, leg: Leg, messages: Path) -> None:
    """One rank of a leg: resumes from the last checkpoint, if there is one, and saves while it trains."""
    report = reporter(messages, dist.get_rank())
    if dist.get_rank() == 0:
        logging.getLogger("terrazzo").addHandler(ForwardWarnings(report))
    engine = make_engine(plan, leg)
    if (plan.checkpoints / "latest").exists():
        engine.load_checkpoint(plan.checkpoints)
    parameters = list(engine.module.parameters())
    report(Ready(engine.global_steps, _count(parameters), _held(parameters)))
    saving: tuple[int, Future[None]] | None = None
    assert engine.training_dataloader is not None
    for passages in engine.training_dataloader:
        loss = loss_of(engine(passages[:, :-1]), passages)
        engine.backward(loss)
        engine.step()
        step = engine.global_steps
        report(Trained(step, _mean(loss)))
        due = step % plan.save_every == 0
        if saving is not None and (due or saving[1].done() or step == plan.steps):
            _finish(saving, report)
            saving = None
        if due:
            saving = step, engine.save_checkpoint(plan.checkpoints, async_op=True)
        if step == plan.steps:
            break
    if saving is not None:
        _finish(saving, report)


def _finish(saving: tuple[int, Future[None]], report: Report) -> None:
    """Wait for a save, and report it."""
    step, future = saving
    future.result()
    report(Saved(step))


def make_engine(plan: Plan, leg: Leg) -> Engine:
    """The model on this leg's ranks."""
    torch.manual_seed(plan.seed)
    model = GPT(plan.sizes)
    mesh = init_device_mesh("cpu", (leg.data_parallel, leg.tensor_parallel), mesh_dim_names=("data", "tensor"))
    if leg.tensor_parallel > 1:
        model = tensor_parallel(model, mesh["tensor"])
    data = Passages(plan.sizes.length)
    return initialize(model, training_data=data, config=plan.engine_config(leg), mesh=mesh, data_dim="data")


def train_alone(plan: Plan, messages: Path) -> None:
    """The same run by PyTorch alone, in one process that is not killed."""
    report = reporter(messages, 0)
    torch.manual_seed(plan.seed)
    model = GPT(plan.sizes)
    optimizer = torch.optim.AdamW(model.parameters(), **plan.optimizer)
    data = Passages(plan.sizes.length)
    parameters = list(model.parameters())
    report(Ready(0, _count(parameters), _held(parameters)))
    order = ResumableSampler(len(data), Batch(plan.batch, plan.batch, 1), rank=0, ranks=1, seed=plan.seed)
    for step, numbers in zip(range(1, plan.steps + 1), order, strict=False):
        passages = torch.stack([data[number] for number in numbers])
        loss = loss_of(model(passages[:, :-1]), passages)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, plan.clipping)
        optimizer.step()
        optimizer.zero_grad()
        report(Trained(step, loss.item()))
    report(Probed(probe(model)))


def probe(model: GPT) -> float:
    """The loss of a plain model on the text's first passages."""
    data = Passages(model.length)
    passages = torch.stack([data[number] for number in range(8)])
    with torch.no_grad():
        return loss_of(model(passages[:, :-1]), passages).item()


def _mean(loss: Tensor) -> float:
    """The mean of the losses of all ranks, which have different data."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _count(parameters: list[torch.nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def _held(parameters: list[torch.nn.Parameter]) -> int:
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
