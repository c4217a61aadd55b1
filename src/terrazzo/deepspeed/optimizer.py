"""The optimizer that `initialize` returns: the engine's, with the attributes of DeepSpeed's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from terrazzo.engine import Engine
from terrazzo.errors import EngineError


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """A view of the engine's optimizer: the same param groups and state. Call the engine's `step`, not this one's.

    Attributes:
        optimizer: the engine's optimizer.
    """

    # Learning-rate schedulers that were built with this optimizer check that it has stepped.
    _opt_called = True

    def __init__(self, engine: Engine) -> None:
        # Without the base class's __init__, which would create separate param groups.
        self._engine = engine
        self.optimizer = engine.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in the base class
        """The param groups of the engine's optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the engine's optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the engine's optimizer."""
        return self.optimizer.defaults

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because gradients overflowed."""
        return self._engine.overflowed

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss is multiplied."""
        return self._engine.loss_scale.value

    @property
    def cur_scale(self) -> float:
        """The same as `loss_scale`."""
        return self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """The engine's backward, of a loss that is divided by the number of micro-batches already."""
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> NoReturn:
        """Raises: call the engine's `step`."""
        raise EngineError("this optimizer belongs to an engine: call engine.step() instead of optimizer.step()")

    def state_dict(self) -> dict[str, Any]:
        """The state of the engine's optimizer; each rank has its part."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load what `state_dict` returned on this rank."""
        self.optimizer.load_state_dict(state_dict)


class NoOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer of an engine without one: the model is sharded, but cannot be trained."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(list(parameters) or [nn.Parameter(torch.empty(0, device="cpu"))], {})

    def step(self, closure: Any = None) -> NoReturn:
        """Raises: there is nothing to step."""
        raise EngineError(
            "step() needs an optimizer: pass one to deepspeed.initialize, or describe it in the config's `optimizer`"
        )
