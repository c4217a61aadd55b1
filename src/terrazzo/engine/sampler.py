"""The order in which a run sees its data: shuffled, divided among ranks, resumable on any number of ranks.

Samples are taken in turn from one global order, which depends on the seed and the curriculum, not on the ranks: rank r
of n takes the r-th part of each micro-batch. The position in that order is the whole state, so a run continues with
the same data on any number of ranks, as long as the number of samples per step is the same.

With a curriculum, a pass over the data starts with the samples that are easy enough; samples that become so during the
pass are added to the rest of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from terrazzo.engine.config import Batch
from terrazzo.engine.curriculum import Ramp, Staircase
from terrazzo.engine.seeds import generator_for
from terrazzo.errors import EngineConfigError, EngineError
from terrazzo.layout.drawing import ShownAsCall


class Curriculum(ShownAsCall):
    """Which samples are easy enough in which step.

    Args:
        difficulties: by metric, the difficulty of every sample.
        schedules: by metric, the largest difficulty as it grows with the steps.
    """

    def __init__(self, difficulties: Mapping[str, Any], schedules: Mapping[str, Ramp | Staircase]) -> None:
        absent = [name for name in schedules if name not in difficulties]
        if absent:
            raise EngineConfigError(
                f"the curriculum uses the metrics {', '.join(absent)}, but `initialize(difficulties=...)` has no "
                "values for them"
            )
        self._difficulties = {name: torch.as_tensor(difficulties[name]) for name in schedules}
        self._schedules = schedules

    def check_length(self, samples: int) -> None:
        """Raise unless every metric has a value for every sample."""
        for name, values in self._difficulties.items():
            if values.shape != (samples,):
                raise EngineConfigError(
                    f"difficulties[{name!r}] has shape {tuple(values.shape)}, but there are {samples} samples"
                )

    def limits(self, step: int) -> dict[str, int]:
        """The largest difficulty of a sample in the step after `step` others; schedules count from one."""
        return {name: schedule.at(step + 1) for name, schedule in self._schedules.items()}

    def eligible(self, limits: Mapping[str, int]) -> Tensor:
        """For each sample whether it is easy enough."""
        tests = [self._difficulties[name] <= limit for name, limit in limits.items()]
        return torch.stack(tests).all(0)


class ResumableSampler(ShownAsCall, Sampler[list[int]]):
    """Gives this rank's micro-batches, without end, starting at the position in its state.

    >>> sampler = ResumableSampler(6, Batch(total=3, micro=3, accumulation=1), rank=0, ranks=1, seed=0)
    >>> batches = iter(sampler)
    >>> sorted(next(batches) + next(batches))
    [0, 1, 2, 3, 4, 5]

    Args:
        samples: the number of samples in the data.
        batch: the sizes of a step.
        rank, ranks: this rank's number, and the count, of the ranks that see different data.
        seed: of the order.
        curriculum: which samples are easy enough; None: all.
        shuffle: if False, samples keep their own order.
    """

    def __init__(
        self,
        samples: int,
        batch: Batch,
        *,
        rank: int,
        ranks: int,
        seed: int,
        curriculum: Curriculum | None = None,
        shuffle: bool = True,
    ) -> None:
        if samples < 1:
            raise EngineConfigError("the training data holds no samples")
        if curriculum is not None:
            curriculum.check_length(samples)
        self._samples, self._batch, self._rank, self._ranks = samples, batch, rank, ranks
        self._seed, self._curriculum, self._shuffle = seed, curriculum, shuffle
        self._start: dict[str, Any] = {"step": 0, "passes": 0, "taken": 0, "growth": []}
        self._trained = 0  # steps since the start

    def __iter__(self) -> Iterator[list[int]]:
        order = _Order(self, self._start)
        while True:
            step = order.take(self._batch.total)
            size = self._batch.micro * self._ranks
            for first in range(0, self._batch.total, size):
                begin = first + self._rank * self._batch.micro
                yield step[begin : begin + self._batch.micro]

    def __len__(self) -> int:
        """Micro-batches of about one pass over the data."""
        return max(self._samples // self._batch.total, 1) * self._batch.accumulation

    def end_step(self) -> None:
        """Count a step as trained; samples that a loader has prefetched do not count."""
        self._trained += 1

    def generator(self) -> torch.Generator:
        """For what a loader draws on this rank from here on."""
        return generator_for(self._seed, "loader", self._rank, self._start["step"] + self._trained)

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps that have been trained."""
        order = _Order(self, self._start)
        for _ in range(self._trained):
            order.take(self._batch.total)
        self._start, self._trained = order.state(), 0
        return {
            **order.state(),
            "samples": self._samples,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "train_batch_size": self._batch.total,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, with the next `iter`."""
        here = {"samples": self._samples, "shuffle": self._shuffle}
        for name, value in here.items():
            if state[name] != value:
                raise EngineError(
                    f"data sampler: {name} is {value!r} in this run, but {state[name]!r} in the checkpoint: use the "
                    "same to resume"
                )
        self._seed = int(state["seed"])
        self._start = {key: state[key] for key in ("step", "passes", "taken", "growth")}
        self._trained = 0

    def order_of_pass(self, number: int, growth: Sequence[Mapping[str, Any]]) -> list[int]:
        """The samples of a pass in order, as far as it is known after the pool has grown `growth` times."""
        order = torch.empty(0, dtype=torch.int64, device="cpu")
        known = torch.zeros(self._samples, dtype=torch.bool, device="cpu")
        for part, event in enumerate(growth):
            pool = known.logical_not()
            if self._curriculum is not None:
                pool &= self._curriculum.eligible(event["limits"])
            known |= pool
            taken = event["taken"]
            rest = torch.cat([order[taken:], pool.nonzero()[:, 0]])
            if self._shuffle:
                rest = rest[
                    torch.randperm(len(rest), generator=generator_for(self._seed, "order", number, part), device="cpu")
                ]
            order = torch.cat([order[:taken], rest])
        return order.tolist()

    def limits(self, step: int) -> dict[str, int]:
        """The largest difficulty of a sample; empty without a curriculum."""
        return {} if self._curriculum is None else self._curriculum.limits(step)


class _Order:
    """A position in the global order, from which samples are taken."""

    def __init__(self, sampler: ResumableSampler, state: Mapping[str, Any]) -> None:
        self._sampler = sampler
        self._step, self._passes, self._taken = state["step"], state["passes"], state["taken"]
        self._growth: list[dict[str, Any]] = [dict(event) for event in state["growth"]]
        self._known: list[int] | None = None  # the samples of this pass, computed when needed

    def state(self) -> dict[str, Any]:
        return {"step": self._step, "passes": self._passes, "taken": self._taken, "growth": list(self._growth)}

    def take(self, count: int) -> list[int]:
        """The samples of the next step."""
        limits = self._sampler.limits(self._step)
        self._step += 1
        taken: list[int] = []
        while len(taken) < count:
            order = self._pass(limits)
            part = order[self._taken : self._taken + count - len(taken)]
            taken += part
            self._taken += len(part)
            if self._taken == len(order) and len(taken) < count:
                self._passes, self._taken, self._growth, self._known = self._passes + 1, 0, [], None
                if not self._pass(limits):
                    raise EngineConfigError(f"the curriculum's first limits, {limits}, leave no sample to train on")
        return taken

    def _pass(self, limits: dict[str, int]) -> list[int]:
        if not self._growth or self._growth[-1]["limits"] != limits:
            self._growth.append({"taken": self._taken, "limits": limits})
            self._known = None
        if self._known is None:
            self._known = self._sampler.order_of_pass(self._passes, self._growth)
        return self._known
