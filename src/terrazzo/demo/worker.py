"""What each process of the demo does, and what it tells the terminal."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.demo.model import GPT, loss_of, tensor_parallel
from terrazzo.demo.plan import Leg, Plan
from terrazzo.demo.text import Passages
from terrazzo.engine import Engine, ResumableSampler, initialize
from terrazzo.engine.config import Batch
from terrazzo.tensor import DTensor, init_device_mesh

LIMIT = datetime.timedelta(seconds=120)


@dataclass(frozen=True)
class Ready:
    """A leg is about to train."""

    step: int  # after which it goes on
    parameters: int
    held: int  # of them, by this rank


@dataclass(frozen=True)
class Trained:
    """A step is done."""

    step: int
    loss: float


@dataclass(frozen=True)
class Probed:
    """How well a trained model guesses the probe."""

    loss: float


@dataclass(frozen=True)
class Saved:
    """A checkpoint is committed."""

    step: int


@dataclass(frozen=True)
class Warned:
    """The library has something to say."""

    text: str


Message = Ready | Trained | Saved | Probed | Warned
Report = Callable[[Message], None]


def _reporter(connection: Connection | None) -> Report:
    """Sends messages, if there is someone to send them to."""
    return (lambda message: None) if connection is None else connection.send


class _Forward(logging.Handler):
    """Hands warnings to the terminal, which else would be written through its bars."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report(Warned(record.getMessage()))


def train_sharded(rank: int, plan: Plan, leg: Leg, store: Path, connection: Connection | None) -> None:
    """One rank of a leg: goes on from the last checkpoint, if there is one, and saves while it trains."""
    report = _reporter(connection)
    if connection is not None:
        logging.getLogger("terrazzo").addHandler(_Forward(report))
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), leg.ranks), rank=rank, world_size=leg.ranks, timeout=LIMIT
    )
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
    dist.destroy_process_group()


def _finish(saving: tuple[int, Future[None]], report: Report) -> None:
    """Have a save behind us, or its error."""
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


def train_alone(rank: int, plan: Plan, connection: Connection | None) -> None:
    """The same run by PyTorch alone, in one process that nobody kills."""
    report = _reporter(connection)
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
    """Over the ranks, which saw different data."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _count(parameters: list[torch.nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def _held(parameters: list[torch.nn.Parameter]) -> int:
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
