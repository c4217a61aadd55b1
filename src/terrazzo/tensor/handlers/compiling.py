"""`torch.compile` with DTensors: they stay eager, and what is plain around and inside them is compiled.

Dynamo would trace the Python of the hot path, whose caches and layouts it cannot guard. So the ways into this package
are marked: where one is called Dynamo breaks the graph, and while it runs Dynamo does not look at frames. The marks are
on the code objects, so eager code pays nothing for them, and `torch._dynamo` is not imported. For a whole graph capture
a function of local tensors (see `make_fx`): what it does with DTensors inside leaves operations and collectives.
"""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.tensor.api import distribute_module, distribute_tensor
from terrazzo.tensor.dtensor import DTensor

_frames: Any = torch._C._dynamo.eval_frame


def stay_eager(function: Any) -> None:
    """Have Dynamo break the graph at calls of `function`, and leave alone whatever runs inside."""
    function = getattr(function, "__func__", function)
    function._torchdynamo_disable = True
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))


def install() -> None:
    """Mark the ways into the package."""
    for name in ("__torch_function__", "__torch_dispatch__", "to_local", "full_tensor", "redistribute", "backward"):
        stay_eager(getattr(DTensor, name))
    for function in (DTensor.from_local, distribute_tensor, distribute_module):
        stay_eager(function)
