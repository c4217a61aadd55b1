"""A call in the form that rules get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terrazzo.errors import DTensorError
from terrazzo.tensor.dispatch.spec import Call, Operand
from terrazzo.tensor.dtensor import DTensor


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
