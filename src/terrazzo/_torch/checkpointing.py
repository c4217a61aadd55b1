"""Activation checkpointing: settings that a thread had in the forward hold in the recomputation, too.

The recomputation runs when backward needs it: on a thread of autograd's for an accelerator, and perhaps after the
block that made a setting has ended. With other settings it would compute something else than the forward did.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

from terrazzo._torch.declared import like, private, replace

T = TypeVar("T")

_WHY = "implicit_replication, loss_parallel, context_parallel and policies hold in recomputations"
_FRAME = "torch.utils.checkpoint._CheckpointFrame.__init__"  # made in the forward of non-reentrant checkpointing
_FORWARD = "torch.utils.checkpoint.CheckpointFunction.forward"  # of reentrant checkpointing
_plain_init: Any = private(_FRAME, _WHY, patched=True)
_plain_forward: Any = private(_FORWARD, _WHY, patched=True)
_SELECTIVE = "torch.utils.checkpoint._CachingTorchDispatchMode.__init__"  # one for each forward of a region
_plain_selective: Any = private(
    _SELECTIVE, "terrazzo.compile's graphs hold selectively checkpointed regions", patched=True
)
_regions = itertools.count()

_carried: list[tuple[Callable[[], Any], Callable[[Any], AbstractContextManager[Any]]]] = []


def carry(get: Callable[[], T], block: Callable[[T], AbstractContextManager[Any]]) -> None:
    """Recompute what activation checkpointing forgot in `block(value)`, where `get()` was `value` in the forward.

    A setting that is not made has a value that is false.
    """
    _carried.append((get, block))


def captured() -> Callable[[], AbstractContextManager[None]]:
    """A function that makes blocks in which the settings that are carried have the values that they have now."""
    values = [get() for get, _ in _carried]

    @contextmanager
    def in_force() -> Iterator[None]:
        with ExitStack() as stack:
            for value, (get, block) in zip(values, _carried, strict=False):  # more may have been imported since
                if value or get():
                    stack.enter_context(block(value))
            yield

    return in_force


def _with_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    in_force = captured()

    def run(*args: Any, **kwargs: Any) -> Any:
        with in_force():
            return function(*args, **kwargs)

    return run


def _init(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
    _plain_init(self, _with_settings(recompute_fn), *args, **kwargs)


def _forward(ctx: Any, run_function: Any, *args: Any) -> Any:
    recomputed = _with_settings(run_function)
    outputs = _plain_forward(ctx, run_function, *args)
    ctx.run_function = recomputed
    return outputs


def _selective(self: Any, *args: Any, **kwargs: Any) -> None:
    """With a number, as torch.compile gives one: PyTorch's partitioner compares those of neighbouring regions."""
    _plain_selective(self, *args, **kwargs)
    if getattr(self, "ac_graph_id", 0) is None:  # torch 2.11 has none
        self.ac_graph_id = next(_regions)


replace(_SELECTIVE, like(_selective, _plain_selective))
replace(_FRAME, like(_init, _plain_init))
replace(_FORWARD, staticmethod(like(_forward, _plain_forward)))
