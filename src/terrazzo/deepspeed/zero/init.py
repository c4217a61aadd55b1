"""`zero.Init`: the model is made as it is without, and sharded by `initialize`."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn


class Init:
    """A context in which a model is made.

    DeepSpeed shards every module once it is made.  Here `initialize` does: until then each rank holds the whole model
    in the memory of the CPU.  A model that does not fit is made on the meta device, which `initialize` takes as well.

    >>> with Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
    ...     model = nn.Linear(2, 2)
    >>> model.weight.shape
    torch.Size([2, 2])

    Args:
        module: A model that was made already: it is left as it is.
        dtype: In which parameters are made, if it is given; they are trained in float32 all the same.
        enabled: Without it nothing happens.
        options: DeepSpeed's further arguments, which say where and how it keeps parts.
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
    """Say that a module uses a parameter of another one.

    Where that is so, both have to be gathered together: put the class of the module that holds both into the config's
    `zero_optimization.wrap`, or leave the model in one piece.
    """
