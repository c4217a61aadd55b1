"""New tensors made from another one's type: the result takes the other's placement where it has its shape."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.tensor.dispatch.spec import Call, Chosen, Dims, LocalFunction, Operand, Spec
from terrazzo.tensor.ops.table import rule


@rule("new_zeros", "new_ones", "new_empty", "new_full")
def new_tensor(call: Call, input: Operand, size: Any, *args: Any, **kwargs: Any) -> Spec | None:
    values = args[:1] if call.name == "new_full" else ()
    if isinstance(size, int):
        size = (size, *args)
    if not all(isinstance(n, int) for n in size) or any(isinstance(v, Operand) for v in values):
        return None
    if call.name == "new_full":
        values = values or (kwargs["fill_value"],)
    shape = tuple(size)
    dims: Dims = tuple(range(input.ndim)) if shape == tuple(input.shape) else (None,) * input.ndim
    out: Dims = dims if shape == tuple(input.shape) else (None,) * len(shape)
    options = {k: v for k, v in kwargs.items() if k not in ("size", "fill_value")}
    make = getattr(torch.Tensor, call.name)

    def localize(chosen: Chosen) -> LocalFunction:
        local_shape = tuple(chosen.outs[0].local_shape)

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            result: torch.Tensor = make(loc[0].detach(), local_shape, *values, **options)
            return result

        return run

    return Spec([dims], [out], [shape], localize=localize)
