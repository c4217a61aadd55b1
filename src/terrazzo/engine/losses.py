"""The backward passes of a step, and the factor by which their gradients are too large.

The engine's own `backward` divides the loss by the number of micro-batches and multiplies it by the loss scale. A user
may also call `loss.backward()`, which does neither; then the gradients are divided before the optimizer steps. A step
that mixes the two cannot be corrected, so it raises an error, and so does a float16 loss that was not scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from terrazzo._torch.autograd import adds_to_leaves, current_backward
from terrazzo._torch.dispatching import tree_leaves
from terrazzo.engine.config import EngineConfig
from terrazzo.errors import EngineError

_UNSCALED: Final = (
    "loss.backward() in float16 without the loss scale, so small gradients vanish: call engine.backward(loss), or "
    "engine.scale(loss).backward()"
)


class _Trainer(Protocol):
    module: Any
    config: EngineConfig
    global_steps: int

    def _prepare_backward(self) -> None: ...


class Losses:
    """The backward passes of the current step.

    Attributes:
        scaled: whether the next backward is that of a loss that `Engine.scale` returned.
        backwards: how many there have been in this step, of `Engine.backward` or of a loss.
        last: the sum of the losses that `Engine.backward` returned in the last step, on the device; None if none.
    """

    def __init__(self, engine: _Trainer) -> None:
        self._engine = engine
        self._inside = False  # the engine's own backward is running
        self._own = False  # the engine's own backward was part of this step
        self._direct = False  # a backward that the user called was
        self._sync = True  # whether the next backward reduces gradients
        self._reduced = True  # whether the last one did
        self.scaled = False
        self.backwards = 0
        self._counted = -1  # the last backward that the user called, which arrives at each output of the model
        self._total: Tensor | None = None
        self.last: Tensor | None = None

    def watch(self, module: nn.Module) -> None:
        """Register hooks that see every forward of the module, and the backward from its outputs."""
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        engine = self._engine
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
        if self._inside or current_backward() == self._counted or not adds_to_leaves():
            return
        if self._engine.config.fp16.enabled and not self.scaled:
            raise EngineError(_UNSCALED)
        self._direct, self._counted = True, current_backward()
        self.backwards += 1

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """A block in which the engine's own backward runs."""
        self._inside = self._own = True
        try:
            yield
        finally:
            self._inside = False
        self._reduced = self._sync
        self.backwards += 1

    def add(self, share: Tensor) -> None:
        """Add a micro-batch's part of the step's loss."""
        self._total = share if self._total is None else self._total + share

    def expect(self, sync: bool) -> None:
        """Set whether the next backward reduces gradients or only accumulates them."""
        self._sync = sync

    def reduce_rest(self) -> None:
        """At the end of a step, reduce gradients that have only been accumulated."""
        if not self._reduced:
            self._engine.module.reduce_gradients()
            self._reduced = True

    def gradient_scale(self, loss_scale: float, accumulation: int) -> float:
        """The factor by which the gradients so far are too large."""
        if self._own:
            if self._direct and accumulation > 1:
                raise EngineError(
                    "this step has gradients of engine.backward(loss), which divides by gradient_accumulation_steps, "
                    "and of loss.backward(), which does not: use one of them"
                )
            return loss_scale
        # Also if no backward was seen: outputs of unknown classes may hide their tensors from the hooks.
        if self._engine.config.fp16.enabled and not self.scaled:
            if any(p.grad is not None for p in self._engine.module.parameters()):
                raise EngineError(_UNSCALED)
        return loss_scale * accumulation

    @property
    def pending(self) -> bool:
        """Whether there has been a backward since the last step."""
        return self._own or self._direct

    def end_step(self) -> None:
        """Called when the optimizer has stepped, or the step was skipped."""
        self.last = self._total
        self.drop()

    def drop(self) -> None:
        """Called when the gradients are gone."""
        self._own = self._direct = self.scaled = False
        self._total, self.backwards, self._reduced = None, 0, True
