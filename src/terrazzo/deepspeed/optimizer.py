"""The optimizer that `initialize` returns: the engine's, with what scripts ask DeepSpeed's for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from terrazzo.engine import Engine
from terrazzo.errors import EngineError


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """A view of the engine's optimizer: the same param groups and state.  Steps are the engine's.

    Attributes:
        optimizer: the one that steps.
    """

    # Learning-rate schedulers that were built with this one ask whether it has stepped.
    _opt_called = True

    def __init__(self, engine: Engine) -> None:
        # Not that of the base class, which would make groups of its own.
        self._engine = engine
        self.optimizer = engine.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # there it is an attribute
        """Those of the optimizer that steps."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Of its parameters."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Of its param groups."""
        return self.optimizer.defaults

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because gradients overflowed."""
        return self._engine.overflowed

    @property
    def loss_scale(self) -> float:
        """By what the loss is multiplied."""
        return self._engine.loss_scale.value

    @property
    def cur_scale(self) -> float:
        """The same."""
        return self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """The engine's, of a loss that is a share of the step's already."""
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> NoReturn:
        """Is the engine's business."""
        raise EngineError("optimizer.step() of an engine's optimizer: call engine.step()")

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer that steps; each rank has its part."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """What `state_dict` gave on this rank."""
        self.optimizer.load_state_dict(state_dict)


class NoOptimizer(torch.optim.Optimizer):
    """In the place of an optimizer where none was asked for: the model is only to be sharded."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(list(parameters) or [nn.Parameter(torch.empty(0))], {})

    def step(self, closure: Any = None) -> NoReturn:
        """Cannot be."""
        raise EngineError(
            "step() without an optimizer: pass one to deepspeed.initialize, or describe it in the config's `optimizer`"
        )
