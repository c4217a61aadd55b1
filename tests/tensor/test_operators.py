"""Python's operators between a tensor and what is none: the same answer or type of error as without a mesh."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ranks import run_ranks
from terrazzo.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

BINARY = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
BINARY_OF_BITS = ("and_", "or_", "xor", "lshift", "rshift")
IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ipow")
OTHERS = ([1], (1, 2), [1, 2, 3, 4], None, "x", {}, {1}, object(), 2, 0.5, True, 1 + 2j)


def outcome(function: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """The result as Python's values, or the type of error."""
    try:
        result = function(one, other)
    except (TypeError, RuntimeError, IndexError, ValueError) as error:
        return next(kind for kind in (TypeError, IndexError, ValueError, RuntimeError) if isinstance(error, kind))
    return result.tolist() if isinstance(result, torch.Tensor) else result


def check_operators() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with torch.no_grad():
        for plain in (torch.arange(1.0, 5.0), torch.arange(1, 5)):
            for placement in (Shard(0), Replicate()):
                for name in (*BINARY, *BINARY_OF_BITS, *IN_PLACE, "contains"):
                    function = getattr(operator, name)
                    for other in OTHERS:
                        for swap in (False, True) if name not in IN_PLACE and name != "contains" else (False,):
                            call = (lambda x, y, f=function: f(y, x)) if swap else function
                            expected = outcome(call, plain.clone(), other)
                            for _ in range(2):  # the second call is a remembered one
                                found = outcome(call, distribute_tensor(plain, mesh, [placement]), other)
                                assert found == expected, (name, other, swap, placement, plain.dtype)


def test_operators_with_what_is_no_tensor() -> None:
    run_ranks(2, check_operators)
