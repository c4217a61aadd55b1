"""The order in which a run sees its data: shuffled, divided among ranks, resumable on any number of ranks.

Samples are taken in turn from one global order, which depends on the seed, not on the ranks: rank r of n takes the r-th
part of each micro-batch. The position in that order is the whole state, so a run continues with the same data on any
number of ranks, as long as the number of samples per step is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import Sampler

from terrazzo.engine.config import Batch
from terrazzo.engine.seeds import generator_for
from terrazzo.errors import EngineConfigError, EngineError
from terrazzo.layout.drawing import ShownAsCall

LOGGER = logging.getLogger("terrazzo.engine")


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
        shuffle: bool = True,
    ) -> None:
        if samples < 1:
            raise EngineConfigError("the training data holds no samples")
        self._samples, self._batch, self._rank, self._ranks = samples, batch, rank, ranks
        self._seed, self._shuffle = seed, shuffle
        self._start = {"step": 0, "passes": 0, "taken": 0}
        self._trained = 0  # steps since the start

    def __iter__(self) -> Iterator[list[int]]:
        start = self._start
        order = self._from(start["passes"] * self._samples + start["taken"])
        while True:
            step = list(islice(order, self._batch.total))
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
        passes, taken = divmod(self._position(), self._samples)
        self._start = {"step": self._start["step"] + self._trained, "passes": passes, "taken": taken}
        self._trained = 0
        return {
            **self._start,
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
        self._start = {key: int(state[key]) for key in ("step", "passes", "taken")}
        if any(event["limits"] for event in state.get("growth", ())):
            LOGGER.warning(
                "data sampler: the checkpoint is of a run with a curriculum, which terrazzo no longer has, so the rest "
                "of its pass is unknown: this run begins a new pass over all samples"
            )
            self._start |= {"passes": self._start["passes"] + 1, "taken": 0}
        self._trained = 0

    def _position(self) -> int:
        """The number of samples before the next step, over all passes."""
        start = self._start
        return start["passes"] * self._samples + start["taken"] + self._trained * self._batch.total

    def _from(self, position: int) -> Iterator[int]:
        """The samples from this position on, without end."""
        first, taken = divmod(position, self._samples)
        for number in count(first):
            yield from self._order_of_pass(number)[taken:]
            taken = 0

    def _order_of_pass(self, number: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._samples))
        # The last number is of no use, but without it older checkpoints would continue in another order.
        generator = generator_for(self._seed, "order", number, 0)
        return torch.randperm(self._samples, generator=generator, device="cpu").tolist()
