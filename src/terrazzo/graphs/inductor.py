"""Compiles the graphs of a local program with Inductor. Importing it takes a second or two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from terrazzo._torch.graphs import (
    TracingContext,
    fake_mode_of,
    inductor_compile,
    inductor_config,
    inductor_decomposition,
    inductor_virtualized,
)
from terrazzo.graphs.joint import compile_joint

_compile = inductor_compile()


def backend(program: nn.Module, inputs: list[torch.Tensor]) -> Any:
    """Compile `program` and its backward."""
    # Random operations on plain tensors stay PyTorch's own, so that they draw the same numbers as in eager mode.
    with inductor_config().patch(fallback_random=True), inductor_virtualized().V.set_fake_mode(fake_mode_of(inputs)):
        return compile_joint(
            program,
            inputs,
            _forward,
            bw_compiler=partial(_compiled, is_backward=True),
            inference_compiler=partial(_compiled, is_inference=True),
            partition_fn=_compile.partition_fn,
            decompositions=inductor_decomposition().select_decomp_table(),
            keep_inference_input_mutations=True,
        )


def _forward(graph: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> Any:
    # The strides of the program's results must be as in eager mode; those of tensors saved for backward are free.
    meta = TracingContext.get().fw_metadata
    assert meta is not None
    first = meta.num_mutated_inp_runtime_indices
    _mark_visible(graph, range(first, first + meta.num_outputs))
    return _compile.compile_fx_inner(graph, examples)


def _compiled(graph: torch.fx.GraphModule, examples: Sequence[torch.Tensor], **kind: bool) -> Any:
    _mark_visible(graph, range(len(_outputs(graph))))
    return _compile.compile_fx_inner(graph, examples, **kind)


def _outputs(graph: torch.fx.GraphModule) -> Sequence[Any]:
    found: Sequence[Any] = graph.graph.output_node().args[0]  # type: ignore[assignment]  # graphs return tuples
    return found


def _mark_visible(graph: torch.fx.GraphModule, indices: range) -> None:
    outputs = _outputs(graph)
    graph.graph.output_node().meta["user_visible_output_idxs"] = [
        i for i in indices if i < len(outputs) and isinstance(outputs[i], torch.fx.Node)
    ]
