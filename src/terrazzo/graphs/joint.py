"""Forward and backward of a local program as two graphs, made by PyTorch's AOTAutograd, for any graph compiler.

AOTAutograd also moves out of the graphs what they cannot contain: writes to inputs, and outputs that are views of
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from terrazzo._torch.graphs import TracingContext, aot_module, default_partition, fake_mode_of, make_boxed, tracing

GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]


def compile_joint(program: nn.Module, inputs: list[torch.Tensor], forward: GraphCompiler, **options: Any) -> Any:
    """Trace `program` with inputs without data, and compile its forward and backward."""
    with tracing(TracingContext(fake_mode_of(inputs))):
        return aot_module(program, inputs, forward, **options)


def given(compiler: GraphCompiler) -> Callable[[nn.Module, list[torch.Tensor]], Any]:
    """A backend that passes each graph, forward and backward, with its example inputs to `compiler`."""

    def compile_graph(graph: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> Any:
        run = compiler(graph, examples)
        return run if getattr(run, "_boxed_call", False) else make_boxed(run)

    def backend(program: nn.Module, inputs: list[torch.Tensor]) -> Any:
        return compile_joint(program, inputs, compile_graph, bw_compiler=compile_graph, partition_fn=default_partition)

    return backend


backend = given(lambda graph, examples: graph.forward)
"""No compiler: the graphs run operation by operation."""
