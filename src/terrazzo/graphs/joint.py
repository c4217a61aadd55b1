"""Forward and backward of a local program as two graphs, by PyTorch's AOTAutograd, for any compiler of graphs.

Besides the backward it takes care of what graphs must not contain: writes to inputs, outputs that are views of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from terrazzo._torch.graphs import TracingContext, aot_module, default_partition, fake_mode_of, make_boxed, tracing

GraphCompiler = Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]


def compile_joint(program: nn.Module, inputs: list[torch.Tensor], forward: GraphCompiler, **options: Any) -> Any:
    """Trace `program` on inputs without data, and compile its forward and backward."""
    with tracing(TracingContext(fake_mode_of(inputs))):
        return aot_module(program, inputs, forward, **options)


def given(compiler: GraphCompiler) -> Callable[[nn.Module, list[torch.Tensor]], Any]:
    """The backend in which `compiler` is handed each graph, forward and backward, with its example inputs."""

    def compile_graph(graph: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> Any:
        run = compiler(graph, examples)
        return run if getattr(run, "_boxed_call", False) else make_boxed(run)

    def backend(program: nn.Module, inputs: list[torch.Tensor]) -> Any:
        return compile_joint(program, inputs, compile_graph, bw_compiler=compile_graph, partition_fn=default_partition)

    return backend


def _run_graph(graph: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    return graph.forward


backend = given(_run_graph)
"""No compiler: the graphs run operation by operation."""
