"""`torch.autograd.Function.apply`: C++ would run a user's Function on DTensors without recording it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from terrazzo._torch.declared import attribute, like, private, replace

_PATH = "torch.autograd.Function.apply"
private(_PATH, "a user's autograd Function of DTensors runs on their local tensors", patched=True)

substitute: Callable[[tuple[Any, ...]], Sequence[Any]] | None = None
"""Gives each call the arguments that a program has while it is captured."""

# A class method, in Python or, since PyTorch 2.14, in C.
_original: Any = inspect.getattr_static(torch.autograd.Function, "apply")

attribute(
    "torch.autograd.Function._backward_cls",
    "hooks on the node of such a Function see DTensors",
    there=lambda: hasattr(torch.autograd.Function, "_backward_cls"),
)


def node_class_of(function: Any) -> Any:
    """The class of the nodes that a Function puts into the graph."""
    return function._backward_cls


def plain_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's own `apply`."""
    return _original.__get__(None, cls)(*args, **kwargs)


def only_saves(cls: Any) -> bool:
    """Whether the Function is that of non-reentrant checkpointing, which only saves its inputs."""
    return cls.__name__ == "_NoopSaveInputs"


def install(is_ours: type, run: Callable[..., Any], made: Callable[[Any], Any]) -> None:
    """Call `run(cls, *args, **kwargs)` if a tensor of class `is_ours` is among the arguments.

    If one is only among the results, C++ has recorded the call for the wrapper, and `made(wrapper)` is returned for it.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if substitute is not None:
            args = tuple(substitute(args))
        for a in args:
            if isinstance(a, is_ours):
                return run(cls, *args, **kwargs)
        result = _original.__get__(None, cls)(*args, **kwargs)
        if isinstance(result, is_ours):
            return made(result)
        if type(result) is tuple and any(isinstance(r, is_ours) for r in result):
            return tuple(made(r) if isinstance(r, is_ours) else r for r in result)
        return result

    plain = _original.__get__(None, torch.autograd.Function)
    like(apply, plain)
    replace(_PATH, classmethod(apply))
