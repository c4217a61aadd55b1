"""Marks for Dynamo. `torch._dynamo` itself is not imported, as that takes long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from terrazzo._torch.declared import attribute, private

_WHY = "torch.compile breaks the graph at DTensors and fully_shard's hooks, and does not trace the code that runs them"
_set_strategy: Any = private("torch._C._dynamo.eval_frame.set_code_exec_strategy", _WHY)
_action: Any = private("torch._C._dynamo.eval_frame._FrameAction", _WHY)
_strategy: Any = private("torch._C._dynamo.eval_frame._FrameExecStrategy", _WHY)

calls_of_modules: Any = (
    torch.nn.Module.__call__,
    private("torch.nn.Module._call_impl", "`module.compile()` compiles it, with torch.compile"),
)


# Only set on functions of terrazzo, so no torch can lack it; the tests of compilation check that it works. The next one
# is not looked up, because importing its module takes long.
attribute("torch.compiler.disable._torchdynamo_disable", _WHY, there=lambda: True)
attribute(
    "torch._dynamo.config.error_on_nested_fx_trace",
    "functions that torch.compile has compiled are captured as what they compile",
    there=lambda: True,
)


def stay_eager(function: Any) -> None:
    """Make Dynamo break the graph at calls of `function`, and not trace what runs inside.

    The marks are on the code object, so eager code has no cost.
    """
    function = getattr(function, "__func__", function)
    function._torchdynamo_disable = True
    _set_strategy(function.__code__, _strategy(_action.SKIP, _action.SKIP))


@contextmanager
def compiled_functions_run_eagerly() -> Iterator[None]:
    """A block in which a function of `torch.compile` is the function that was compiled, for what traces programs."""
    from torch._dynamo import config

    with torch.compiler.set_stance("force_eager"), config.patch(error_on_nested_fx_trace=False):
        yield
