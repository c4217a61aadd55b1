"""`PipelineEngine`: one call trains a whole batch, read from an iterator of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import Dataset

from terrazzo._torch.dispatching import tree_map
from terrazzo.deepspeed.dataloader import RepeatingLoader
from terrazzo.deepspeed.engine import ROUTE_EVAL, DeepSpeedEngine
from terrazzo.engine import Engine
from terrazzo.errors import EngineError


class PipelineEngine(DeepSpeedEngine):
    """Trains a `PipelineModule`. Micro-batches are pairs of inputs and labels."""

    def __init__(
        self,
        core: Engine,
        config: Mapping[str, Any],
        training_data: Dataset[Any] | None,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        super().__init__(core, config, None, collate_fn)
        self._batches: Iterator[Any] | None = None
        if training_data is not None:
            # A pipeline sees its samples in their own order: those of a batch may have a shape that others have not.
            self.training_dataloader = self.deepspeed_io(training_data, route=ROUTE_EVAL)
            self.set_dataloader(self.training_dataloader)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on `gradient_accumulation_steps` micro-batches; returns the mean loss, on every rank."""
        if data_iter is not None:
            self._batches = data_iter
        inputs, labels = self._read(self._batches)
        self.module.train()
        return self.core.train_batch(*inputs, target=labels)

    def eval_batch(self, data_iter: Iterator[Any], *, compute_loss: bool = True, **options: Any) -> Tensor:
        """The mean loss of `gradient_accumulation_steps` micro-batches, on every rank."""
        wanted = {name: value for name, value in options.items() if value not in (None, False)}
        if not compute_loss or wanted.keys() - {"reduce_output", "bcast_loss"}:
            raise EngineError(
                "eval_batch only returns the mean loss; it does not support "
                f"{', '.join(wanted) or 'compute_loss=False'}"
            )
        inputs, labels = self._read(data_iter)
        return self.core.eval_batch(*inputs, target=labels)

    def _read(self, batches: Iterator[Any] | None) -> tuple[tuple[Any, ...], Any]:
        """The inputs and the labels of a whole batch; empty on stages that need neither."""
        first, last = self.is_first_stage(), self.is_last_stage()
        if not (first or last):
            return (), None
        if batches is None:
            raise EngineError("train_batch needs data_iter=, or training_data= in initialize")
        # As in DeepSpeed, ranks of the first and of the last stage read data, and the others do not.
        pairs = [next(batches) for _ in range(self.core.batch.accumulation)]
        inputs = self._joined([pair[0] for pair in pairs]) if first else ()
        labels = self._joined([pair[1] for pair in pairs]) if last else None
        return inputs if isinstance(inputs, tuple) else (inputs,), labels

    def _joined(self, parts: list[Any]) -> Any:
        parts = [tuple(part) if isinstance(part, list) else part for part in parts]

        def join(*values: Any) -> Tensor:
            if isinstance(values[0], Tensor):
                return torch.cat(values).to(self.core.device)
            return torch.tensor(values, device=self.core.device)  # labels that are numbers

        return tree_map(join, *parts)

    def is_first_stage(self) -> bool:
        """Whether this rank's stage gets the inputs."""
        return bool(self.module.stage_id == 0)

    def is_last_stage(self) -> bool:
        """Whether this rank's stage computes the loss."""
        return bool(self.module.stage_id == self.module.num_stages - 1)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the iterator that `train_batch` reads from."""
        self._batches = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Set the loader that `train_batch` reads from, repeatedly."""
        self._batches = RepeatingLoader(loader)

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Raises: the schedule runs forward."""
        raise EngineError("a PipelineEngine cannot be called: call train_batch or eval_batch")
