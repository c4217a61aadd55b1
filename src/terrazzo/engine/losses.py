"""Which backward passes a step has seen, and by what its gradients are too large.

The engine's own `backward` divides the loss by the number of micro-batches and multiplies it with the loss scale.  A
user may as well call `loss.backward()`: then neither has happened, so the gradients are divided before the optimizer
steps.  A step that mixes the two cannot be put right, and is an error, as is a float16 loss that nobody scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from terrazzo._torch.dispatching import tree_leaves
from terrazzo.engine.config import EngineConfig
from terrazzo.engine.random_ltd import RandomLTD
from terrazzo.errors import EngineError

_UNSCALED: Final = (
    "loss.backward() in float16 without the loss scale, by which small gradients survive: call engine.backward(loss), "
    "or engine.scale(loss).backward()"
)


class _Trainer(Protocol):
    module: Any
    config: EngineConfig
    random_ltd: RandomLTD | None
    global_steps: int

    def _prepare_backward(self) -> None: ...


class Losses:
    """What is known about the backward passes of the step at hand.

    Attributes:
        scaled: whether the next backward is that of a loss that `Engine.scale` returned.
        backwards: how many there have been in this step.
        last: the sum of the shares that `Engine.backward` returned in the last step, on the device; None if none.
    """

    def __init__(self, engine: _Trainer) -> None:
        self._engine = engine
        self._inside = False  # the engine's own backward
        self._own = False  # such a one was part of this step
        self._direct = False  # one that the user called was
        self._sync = True  # whether the backward to come is reduced
        self._reduced = True  # whether the last one was
        self.scaled = False
        self.backwards = 0  # the engine's own, of this step
        self._total: Tensor | None = None
        self.last: Tensor | None = None

    def watch(self, module: nn.Module) -> None:
        """See every forward of the module, and the backward that comes out of it."""
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        engine = self._engine
        if engine.random_ltd is not None:
            engine.random_ltd.begin_forward(engine.global_steps)
        if torch.is_grad_enabled():
            engine._prepare_backward()

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._at_output)

    def _at_output(self, gradient: Tensor) -> None:
        """A gradient arrives at the model's output."""
        self._reduced = self._sync
        if self._inside:
            return
        if self._engine.config.fp16.enabled and not self.scaled:
            raise EngineError(_UNSCALED)
        self._direct = True
        self.backwards += 1

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """The engine's own backward runs within."""
        self._inside = self._own = True
        try:
            yield
        finally:
            self._inside = False
        self._reduced = self._sync
        self.backwards += 1

    def add(self, share: Tensor) -> None:
        """A share of the step's loss."""
        self._total = share if self._total is None else self._total + share

    def expect(self, sync: bool) -> None:
        """The next backward is reduced, or its gradients only add up."""
        self._sync = sync

    def reduce_rest(self) -> None:
        """Reduce what has only been added up, at the end of a step."""
        if not self._reduced:
            self._engine.module.reduce_gradients()
            self._reduced = True

    def gradient_scale(self, loss_scale: float, accumulation: int) -> float:
        """By what the gradients so far are too large."""
        if self._own:
            if self._direct and accumulation > 1:
                raise EngineError(
                    "this step has gradients of engine.backward(loss), which divides by gradient_accumulation_steps, "
                    "and of loss.backward(), which does not: use one of them"
                )
            return loss_scale
        # Whether or not it was seen: outputs of unknown classes have no tensors that could tell.
        if self._engine.config.fp16.enabled and not self.scaled:
            if any(p.grad is not None for p in self._engine.module.parameters()):
                raise EngineError(_UNSCALED)
        return loss_scale * accumulation

    @property
    def pending(self) -> bool:
        """Whether there has been a backward since the last step."""
        return self._own or self._direct

    def end_step(self) -> None:
        """The optimizer has stepped, or skipped it."""
        self._own = self._direct = self.scaled = False
        self.last, self._total, self.backwards = self._total, None, 0
