"""`zero.Init`: the model is created as usual, and sharded later by `initialize`."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn

from terrazzo.layout.drawing import ShownAsCall


class Init(ShownAsCall):
    """A context in which a model is created.

    DeepSpeed shards every module as soon as it is created. Here `initialize` shards the model; until then each rank
    holds all of it in CPU memory. Create a model that does not fit on the meta device, which `initialize` supports.

    >>> with Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
    ...     model = nn.Linear(2, 2)
    >>> model.weight.shape
    torch.Size([2, 2])

    Args:
        module: A model that exists already: it is left as it is.
        dtype: The dtype of new parameters; they are trained in float32 in any case.
        enabled: If False, nothing happens.
        options: DeepSpeed's other arguments, for where and how it keeps shards; they have no effect.
    """

    def __init__(
        self, module: nn.Module | None = None, *args: Any, enabled: bool = True, dtype: Any = None, **options: Any
    ) -> None:
        self._dtype = dtype if enabled else None
        self._before: torch.dtype | None = None

    def __enter__(self) -> None:
        if self._dtype is not None:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            torch.set_default_dtype(self._before)
            self._before = None


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that a module uses a parameter of another one.

    Such modules must be gathered together: put the class of a module that contains both into the config's
    `zero_optimization.wrap`, or leave the model in one piece.
    """
