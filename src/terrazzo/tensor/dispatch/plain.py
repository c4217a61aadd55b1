"""Plain tensors in calls with DTensors: refused, unless they are known to be the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from terrazzo._torch.autograd import is_transformed
from terrazzo.errors import DTensorError, MixedTensorError
from terrazzo.layout import Layout, Replicate
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.links import counts_as_replicated


def admit_plain_tensors(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    admits: Callable[[torch.Tensor], bool] | None = None,
) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments, with plain tensors as replicated DTensors where that is allowed; None if there are none.

    It is allowed for tensors of one element, inside `implicit_replication`, and where the operation `admits` the
    argument; the first argument is never admitted.
    """
    like = first_layout([*args, *kwargs.values()])
    if like is None:
        return None
    found = False

    def walk(value: Any, where: str, admitted: bool) -> Any:
        nonlocal found
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            _refuse_transformed(name, where, value)
            admitted = admitted and admits is not None and admits(value)
            if value.numel() != 1 and not counts_as_replicated() and not admitted:
                raise MixedTensorError(
                    f"{name}: {where} is a plain {type(value).__name__} of shape {tuple(value.shape)}, mixed with "
                    "DTensors. Make it a DTensor (distribute_tensor(t, mesh, placements), or DTensor.from_local for "
                    "each rank's part), or call this inside terrazzo.tensor.experimental.implicit_replication() if "
                    "every rank has the same values" + _notes_on([*args, *kwargs.values()])
                )
            found = True
            return replicated(value, like)
        if type(value) in (list, tuple):
            return type(value)([walk(v, f"{where}[{i}]", admitted) for i, v in enumerate(value)])
        return value

    new_args = [walk(a, f"argument {i}", i > 0) for i, a in enumerate(args)]
    new_kwargs = {k: walk(v, f"argument {k!r}", True) for k, v in kwargs.items()}
    return (new_args, new_kwargs) if found else None


def replicated(value: torch.Tensor, like: Layout) -> DTensor:
    """A plain tensor as a DTensor that every rank of `like`'s mesh holds."""
    return wrap(value, Layout.of(like.mesh, (Replicate(),) * len(like.mesh_shape), tuple(value.shape)))


def first_layout(values: Sequence[Any]) -> Layout | None:
    """The layout of the first DTensor, also inside lists."""
    for v in values:
        if isinstance(v, DTensor):
            return v._layout
        if type(v) in (list, tuple):
            found = first_layout(v)
            if found is not None:
                return found
    return None


def _refuse_transformed(name: str, where: str, value: torch.Tensor) -> None:
    if is_transformed(value):
        raise DTensorError(
            f"{name}: {where} belongs to a torch.func transform (vmap, vjp), mixed with a DTensor from outside the "
            "transform; pass all DTensors to the transformed function as transformed arguments, or use torch.func.grad "
            "or torch.autograd"
        )


def _notes_on(values: Sequence[Any]) -> str:
    """Notes that the creators of the DTensors among the arguments have attached, for error messages."""
    notes = [value.__dict__.get("_note") for value in values if isinstance(value, DTensor)]
    return "".join(f". {note}" for note in dict.fromkeys(notes) if note)
