"""What saving and loading use of the engine: the parts of a run that a checkpoint stores."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from terrazzo.engine.config import Batch, EngineConfig
from terrazzo.engine.loaders import StatefulLoader
from terrazzo.engine.loss_scale import LossScale
from terrazzo.engine.lr import Scheduler
from terrazzo.engine.paging import PagedState
from terrazzo.engine.pipeline import Pipeline
from terrazzo.engine.placing import RankRoles
from terrazzo.engine.sampler import ResumableSampler


class Trained(Protocol):
    """A run: its model, its optimizer and its counters. `Engine` implements it."""

    module: Any
    optimizer: torch.optim.Optimizer
    pages: PagedState | None
    lr_scheduler: Scheduler | None
    data_sampler: ResumableSampler | None
    stateful_loader: StatefulLoader | None
    pipeline: Pipeline | None
    loss_scale: LossScale
    shared_params: dict[str, str]
    config: EngineConfig
    batch: Batch
    ranks: RankRoles
    stage: Any
    dtype: torch.dtype
    micro_steps: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    unfinished: str | None
    _has_checkpoint: bool  # whether it has loaded or saved one

    @property
    def between_steps(self) -> bool:
        """Whether there are no accumulated gradients that the optimizer has not used."""

    @property
    def dp_world_size(self) -> int:
        """How many ranks see different data."""

    @property
    def mp_world_size(self) -> int:
        """How many ranks hold parts of one model."""

    def drop_gradients(self) -> None:
        """Discard the gradients that have been accumulated."""

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's state."""
