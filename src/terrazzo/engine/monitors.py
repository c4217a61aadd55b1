"""Monitors: they write learning rate, loss and loss scale after each step to where the config says. The first rank
writes.

Events have DeepSpeed's names, and samples as their x axis. For other events, append a function of the engine to
`Engine.watchers`.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from terrazzo.engine.config import EngineConfig, FilesConfig, WandbConfig
from terrazzo.errors import EngineConfigError

Events = Mapping[str, float]


class Watched(Protocol):
    """What a monitor reads of the engine."""

    global_samples: int

    @property
    def step_loss(self) -> float | None:
        """This rank's mean loss of the last step."""

    def get_lr(self) -> list[float]:
        """The learning rates."""

    def fp16_enabled(self) -> bool:
        """Whether the loss is scaled."""

    @property
    def loss_scale(self) -> Any:
        """The loss scale."""


def monitors_of(config: EngineConfig) -> list[Callable[[Events, int], None]]:
    """The monitors that a config asks for: functions of events and the number of samples."""
    found: list[Callable[[Events, int], None]] = []
    if config.tensorboard.enabled:
        found.append(_tensorboard(config.tensorboard))
    if config.csv_monitor.enabled:
        found.append(_csv(config.csv_monitor))
    if config.wandb.enabled:
        found.append(_wandb(config.wandb))
    return found


def events_of(engine: Watched) -> dict[str, float]:
    """The events of a step; the host waits for the loss."""
    events = {"Train/Samples/lr": engine.get_lr()[0]}
    if engine.step_loss is not None:
        events["Train/Samples/train_loss"] = engine.step_loss
    if engine.fp16_enabled():
        events["Train/Samples/loss_scale"] = engine.loss_scale.value
    return events


def watcher(monitors: Iterable[Callable[[Events, int], None]]) -> Callable[[Watched], None]:
    """A function that the engine calls after each step."""
    written = list(monitors)

    def write(engine: Watched) -> None:
        events = events_of(engine)
        for monitor in written:
            monitor(events, engine.global_samples)

    return write


def _folder(config: FilesConfig) -> Path:
    folder = Path(config.output_path) / config.job_name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tensorboard(config: FilesConfig) -> Callable[[Events, int], None]:
    module = _library("torch.utils.tensorboard", "tensorboard", "tensorboard")
    writer = module.SummaryWriter(log_dir=str(_folder(config)))

    def write(events: Events, samples: int) -> None:
        for name, value in events.items():
            writer.add_scalar(name, value, samples)
        writer.flush()

    return write


def _csv(config: FilesConfig) -> Callable[[Events, int], None]:
    folder = _folder(config)
    begun: set[str] = set()

    def write(events: Events, samples: int) -> None:
        for name, value in events.items():
            with open(folder / f"{name.replace('/', '_')}.csv", "a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if name not in begun:
                    begun.add(name)
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])

    return write


def _wandb(config: WandbConfig) -> Callable[[Events, int], None]:
    wandb = _library("wandb", "wandb", "wandb")
    run = wandb.init(project=config.project, group=config.group, entity=config.team)

    def write(events: Events, samples: int) -> None:
        run.log(dict(events), step=samples)

    return write


def _library(module: str, package: str, section: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EngineConfigError(
            f"config: {section}.enabled needs the package {package}: pip install {package} ({error})"
        ) from error
