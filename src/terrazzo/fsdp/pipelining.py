"""Stages of `torch.distributed.pipelining` whose modules are sharded, also under schedules that split backward.

A schedule runs many backwards before it reduces gradients. Zero-bubble schedules run each backward in two parts: first
the gradients of a stage's inputs, later those of its registered parameters. So parameters stay unsharded from the first
backward until the reduction, and gradients are accumulated without communication.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

from terrazzo.errors import FSDPError
from terrazzo.fsdp.module import FSDPModule, expect_backward


def register_fsdp_pipeline_stage(stage: Any) -> None:
    """Make a pipeline stage reduce the gradients of its sharded module once, after its last backward.

    PyTorch's stages do this only for PyTorch's own sharded modules, but under `terrazzo.install()` for these, too. It
    works with all schedules: GPipe, 1F1B, interleaved, and those that compute gradients of inputs and of parameters
    separately (zero bubble, DualPipeV).

    >>> import torch
    >>> from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    >>> from terrazzo.fsdp import fully_shard
    >>> stage = PipelineStage(fully_shard(torch.nn.Linear(2, 2)), 0, 1, torch.device("cpu"))
    >>> register_fsdp_pipeline_stage(stage)
    >>> schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
    >>> _ = schedule.step(torch.ones(4, 2), target=torch.ones(4, 2))
    >>> stage.submod.weight.grad.placements
    (Shard(dim=0),)

    Args:
        stage: From `PipelineStage` or `build_stage`, with a module that `fully_shard` was called on.
    """
    module: Any = getattr(stage, "submod", None)
    if not isinstance(module, FSDPModule):
        raise FSDPError(
            "register_fsdp_pipeline_stage expected a pipeline stage whose module fully_shard was called on, not "
            + (type(stage).__name__ if module is None else f"one of {type(module).__name__}")
        )
    for name, own in STAGE_METHODS.items():
        setattr(stage, name, types.MethodType(own(getattr(type(stage), name)), stage))


def _without_reduction(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A stage's method that runs one of its backwards; PyTorch's other methods choose the kind."""

    @functools.wraps(backward)
    def backward_maybe_with_nosync(stage: Any, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        module = stage.submod
        if isinstance(module, FSDPModule):
            expect_backward(module, reduces=False, reshards=False)
            if backward_type != "full":
                for inner in _sharded_modules(module):
                    inner.unshard()
        return backward(stage, backward_type, *args, **kwargs)

    return backward_maybe_with_nosync


def _reducing(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """A stage's method that is called after its last backward."""

    @functools.wraps(reduce)
    def perform_reduce_grad(stage: Any, grad_scale_factor: int) -> None:
        module = stage.submod
        if not isinstance(module, FSDPModule):
            return reduce(stage, grad_scale_factor)
        expect_backward(module, reduces=True, reshards=True)
        module.reduce_gradients()
        for inner in _sharded_modules(module):
            inner.reshard()
        if grad_scale_factor != 1:
            stage.scale_grads(grad_scale_factor)

    return perform_reduce_grad


STAGE_METHODS: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "backward_maybe_with_nosync": _without_reduction,
    "perform_reduce_grad": _reducing,
}
"""Methods of PyTorch's stages, and what makes of each one that also knows terrazzo's sharded modules."""


def _sharded_modules(module: FSDPModule) -> list[FSDPModule]:
    return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
