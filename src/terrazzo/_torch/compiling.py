"""Marks that Dynamo reads. `torch._dynamo` itself, which takes long to import, is not."""

from __future__ import annotations

from typing import Any

from terrazzo._torch.declared import attribute, private

_WHY = "torch.compile breaks the graph at DTensors and fully_shard's hooks, and leaves the code that runs them alone"
_set_strategy: Any = private("torch._C._dynamo.eval_frame.set_code_exec_strategy", _WHY)
_action: Any = private("torch._C._dynamo.eval_frame._FrameAction", _WHY)
_strategy: Any = private("torch._C._dynamo.eval_frame._FrameExecStrategy", _WHY)

# It is only ever set, on functions of terrazzo, so no torch can lack it; the tests of compilation see whether it works.
attribute("torch.compiler.disable._torchdynamo_disable", _WHY, there=lambda: True)


def stay_eager(function: Any) -> None:
    """Have Dynamo break the graph at calls of `function`, and leave alone whatever runs inside.

    The marks are on the code object: eager code pays nothing for them.
    """
    function = getattr(function, "__func__", function)
    function._torchdynamo_disable = True
    _set_strategy(function.__code__, _strategy(_action.SKIP, _action.SKIP))
