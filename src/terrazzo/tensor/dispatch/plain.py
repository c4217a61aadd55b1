"""The arguments of a call: in the form that rules get, and with plain tensors among them.

Plain tensors in calls with DTensors are refused, unless they are known to be the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from terrazzo._torch.autograd import is_transformed
from terrazzo._torch.counting import CountingParameter
from terrazzo.errors import DTensorError, MixedTensorError
from terrazzo.layout import Layout, Replicate
from terrazzo.tensor.dispatch.spec import Call, Operand
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.foreign import is_torch_dtensor
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
            admitted = admitted and admits is not None and admits(value)
            if value.numel() != 1 and not counts_as_replicated() and not admitted:
                theirs = is_torch_dtensor(type(value))  # of which no note of a parameter says the reason
                notes = "" if theirs else _notes_on([*args, *kwargs.values()])
                raise MixedTensorError(f"{name}: {where} is {_what(value)}{notes}")
            found = True
            return replicated(value, like)
        if type(value) in (list, tuple):
            return type(value)([walk(v, f"{where}[{i}]", admitted) for i, v in enumerate(value)])
        return value

    new_args = [walk(a, f"argument {i}", i > 0) for i, a in enumerate(args)]
    new_kwargs = {k: walk(v, f"argument {k!r}", True) for k, v in kwargs.items()}
    return (new_args, new_kwargs) if found else None


def _what(value: torch.Tensor) -> str:
    """What is mixed with DTensors, and what to do."""
    shape = f"of shape {tuple(value.shape)}"
    if is_torch_dtensor(type(value)):
        return (
            f"a DTensor of torch.distributed.tensor {shape}, mixed with those of terrazzo, which are another class. "
            "Import distribute_tensor and the like from terrazzo.tensor and fully_shard from terrazzo.fsdp, or convert "
            "it with terrazzo.tensor.interop.from_torch_dtensor"
        )
    if isinstance(value, CountingParameter):
        return (
            f"a parameter {shape} that fully_shard has gathered, so it is a plain tensor, mixed with DTensors. Give "
            "the model plain tensors, this rank's part of the batch: x.to_local(), or x.full_tensor() if every rank "
            "is to compute the same"
        )
    return (
        f"a plain {type(value).__name__} {shape}, mixed with DTensors. Make it a DTensor (distribute_tensor(t, mesh, "
        "placements), or DTensor.from_local for each rank's part), or call this inside "
        "terrazzo.tensor.experimental.implicit_replication() if every rank has the same values"
    )


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


def in_transform(values: Sequence[Any]) -> bool:
    """Whether there are tensors that `torch.func`'s transforms have wrapped, also inside lists."""
    return any(
        in_transform(v) if type(v) in (list, tuple) else isinstance(v, torch.Tensor) and is_transformed(v)
        for v in values
    )


def _notes_on(values: Sequence[Any]) -> str:
    """Notes that the creators of the DTensors among the arguments have attached, for error messages."""
    notes = [value.__dict__.get("_note") for value in values if isinstance(value, DTensor)]
    return "".join(f". {note}" for note in dict.fromkeys(notes) if note)


def describe(
    name: str, inplace: bool, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Call, list[Any], dict[str, Any]]:
    """The call with operands in place of DTensors, and its arguments with local tensors in place of them."""
    operands: list[Operand] = []

    def walk(value: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
        if isinstance(value, DTensor):
            operand = Operand(value._layout, path)
            operands.append(operand)
            return operand, value._local
        if type(value) in (list, tuple):
            pairs = [walk(v, (*path, i)) for i, v in enumerate(value)]
            return type(value)([p[0] for p in pairs]), type(value)([p[1] for p in pairs])
        return value, value

    pairs = [walk(a, (i,)) for i, a in enumerate(args)]
    named = {k: walk(v, (k,)) for k, v in kwargs.items()}
    call = Call(name, func, tuple(p[0] for p in pairs), {k: v[0] for k, v in named.items()}, operands, inplace)
    return call, [p[1] for p in pairs], {k: v[1] for k, v in named.items()}


def check_one_mesh(call: Call) -> None:
    """Raise if the operands are on several meshes."""
    meshes = {o.layout.mesh for o in call.operands}
    if len(meshes) > 1:
        raise DTensorError(
            f"{call.name}: its DTensors are on different meshes, {', '.join(str(m) for m in meshes)}; move them to one "
            "mesh with x.redistribute(mesh, placements)"
        )
