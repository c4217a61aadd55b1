"""Optimizers: the functions that run a step on lists of tensors, and the methods that collect parameters and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from terrazzo._torch.declared import like, private, replace
from terrazzo._torch.dispatching import without_subclass_functions

_TAKES_LISTS = "optimizers and clipping take lists of DTensors as lists of tensors (as PyTorch does for its own)"
_supported: list[Any] = [
    private(
        f"{module}._foreach_supported_types",
        _TAKES_LISTS,
        instead=[],
        without="they loop over DTensors",
        patched=True,
    )
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils")
]

# These write their tensors in place and leave the lists alone, whether they take all tensors at once or one by one.
# Those of SGD and ASGD are not among them, as they put new tensors into the lists.
_STEPS: dict[str, Any] = {
    path: private(
        path,
        "the lists of a step are unwrapped once",
        instead=None,
        without="each operation unwraps its tensors",
        patched=True,
    )
    for name in ("adadelta", "adagrad", "adam", "adamax", "nadam", "radam", "rmsprop")
    for path in (f"torch.optim.{name}._multi_tensor_{name}", f"torch.optim.{name}._single_tensor_{name}")
}

_KINDS = tuple(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and "_init_group" in vars(kind)
)
_COLLECTORS: dict[str, Any] = {
    path: private(path, "DTensors are not asked for dtype and the like through their overrides", patched=True)
    for path in (f"torch.optim.{kind.__name__}._init_group" for kind in _KINDS)
}


def install(is_ours: type, unwrap: Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]] | None]) -> None:
    """Make optimizers accept tensors of class `is_ours`.

    `unwrap(parameters, others)` returns the tensors to use in place of the parameters, and the other arguments to
    match; None if the step must run on the tensors as they are.
    """
    for known in _supported:
        if is_ours not in known:
            known.append(is_ours)
    for path, step in _STEPS.items():
        if step is not None:
            replace(path, _stepping(step, is_ours, unwrap))
    for path, collect in _COLLECTORS.items():
        replace(path, _collecting(collect, is_ours))


def _stepping(step: Callable[..., None], is_ours: type, unwrap: Callable[..., Any]) -> Callable[..., None]:
    def run(params: list[Any], *lists: Any, **options: Any) -> None:
        if not any(isinstance(p, is_ours) for p in params) or options.get("differentiable"):
            step(params, *lists, **options)
            return
        names = list(options)
        found = unwrap(params, [*lists, *options.values()])
        if found is None:
            step(params, *lists, **options)
            return
        locals_, others = found
        step(locals_, *others[: len(lists)], **dict(zip(names, others[len(lists) :], strict=True)))

    return like(run, step)


def _collecting(collect: Callable[..., Any], is_ours: type) -> Callable[..., Any]:
    """Skipped if there are other subclasses among the parameters: their overrides must see how state is created."""
    plain = (torch.Tensor, torch.nn.Parameter)

    def _init_group(self: Any, group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ours = False
        for p in group["params"]:
            if isinstance(p, is_ours):
                ours = True
            elif type(p) not in plain:
                return collect(self, group, *args, **kwargs)
        if not ours:
            return collect(self, group, *args, **kwargs)
        with without_subclass_functions():
            return collect(self, group, *args, **kwargs)

    return like(_init_group, collect)
