"""`torch.compile` under `install()`, for modules that compute with DTensors.

PyTorch's compiler traces PyTorch's DTensors, but not terrazzo's: it would break its graph at each of them, and raise
with `fullgraph=True`. So a module that computes with DTensors becomes a graph of `terrazzo.compile`, also by
`module.compile()`, which calls `torch.compile`. Everything else is compiled by PyTorch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from terrazzo._torch.compiling import calls_of_modules
from terrazzo.fsdp.group import group_of
from terrazzo.tensor import DTensor


def compiling(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile`, which is `plain`, with graphs of `terrazzo.compile` for modules that compute with DTensors."""

    @functools.wraps(plain)
    def compile(model: Any = None, **options: Any) -> Any:
        of_module = isinstance(model, MethodType) and model.__func__ in calls_of_modules  # of `module.compile()`
        module = model.__self__ if of_module else model
        backend = options.get("backend", "inductor")
        if not isinstance(module, nn.Module) or backend not in ("inductor", "aot_eager") or options.get("disable"):
            return plain(model, **options)
        if not computes_with_dtensors(module):
            return plain(model, **options)
        from terrazzo.graphs import CompileWarning  # takes long
        from terrazzo.graphs.api import compile_for_torch

        if options.get("mode") not in (None, "default") or options.get("options"):
            warnings.warn(
                f"torch.compile of a {type(module).__name__} with DTensors: mode and options, which tune PyTorch's "
                "compiler, are not used by terrazzo.compile",
                CompileWarning,
                stacklevel=2,
            )
        compiled = compile_for_torch(module, backend, bool(options.get("fullgraph")), in_place=of_module)
        return model if of_module else compiled

    return compile


def computes_with_dtensors(module: nn.Module) -> bool:
    """Whether some parameter or buffer is a DTensor while the module runs, when `fully_shard` has gathered its own."""
    groups = {group for each in module.modules() if (group := group_of(each)) is not None}
    parameters = [p for group in groups for p in group.params]
    unsharded = {id(p.sharded) for p in parameters if p.within is None}
    tensors = (*module.parameters(), *module.buffers())
    return any(isinstance(t, DTensor) and id(t) not in unsharded for t in tensors)
