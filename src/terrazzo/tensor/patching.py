"""What terrazzo.tensor replaces in PyTorch so that its Python functions accept DTensors; `terrazzo._torch` says why.

Under `torch.compile`, operations on DTensors run eagerly and the plain code around and inside them is compiled. Dynamo
cannot guard the caches and layouts that the hot path uses, so the entry points of this package are marked as not to be
traced. To compile a whole program, capture a function of local tensors (see `make_fx`): the DTensor operations inside
become local operations and collectives.
"""

from __future__ import annotations

import torch
from torch import nn

from terrazzo._torch import clipping, exporting, function_apply, masked, optimizers, replicating, transforms
from terrazzo._torch.compiling import stay_eager
from terrazzo._torch.declared import when_imported
from terrazzo.comm import captured
from terrazzo.errors import CaptureError, DTensorArgumentError, UnsupportedCallError
from terrazzo.tensor.api import distribute_module, distribute_tensor
from terrazzo.tensor.attributes import refuse_export
from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.ops import recurrent
from terrazzo.tensor.ops.autograd import apply_function, forward_mode, grad_and_value, with_graph_of_wrapper
from terrazzo.tensor.ops.foreach import clipping_norm, locals_to_step


def install() -> None:
    """Called once, when the package is imported."""
    clipping.install(DTensor, clipping_norm)
    masked.install(DTensor, lambda input: torch.ones_like(input, dtype=torch.bool))
    optimizers.install(DTensor, locals_to_step)
    function_apply.install(DTensor, apply_function, with_graph_of_wrapper)
    transforms.install(DTensor, grad_and_value, lambda: forward_mode(None, (), {}))
    exporting.install(DTensor, refuse_export)
    replicating.install(DTensor, _refuse_replication)
    recurrent.install()
    when_imported("torch.nn.attention.flex_attention", _check_flex)
    for name in ("__torch_function__", "__torch_dispatch__", "to_local", "full_tensor", "redistribute", "backward"):
        stay_eager(getattr(DTensor, name))
    for function in (DTensor.from_local, distribute_tensor, distribute_module):
        stay_eager(function)


def _refuse_replication(module: nn.Module, name: str) -> None:
    raise DTensorArgumentError(
        f"DistributedDataParallel cannot replicate {name!r} of this {type(module).__name__}, because it is a DTensor. "
        "A model of fully_shard needs no DistributedDataParallel: to replicate it, give fully_shard a 2-D mesh, whose "
        "first dim replicates; this works for tensor-parallel models, too"
    )


def _check_flex() -> None:
    from terrazzo._torch import flex

    flex.checks.append(_refuse_flex)


def _refuse_flex(query: torch.Tensor) -> None:
    if isinstance(query, DTensor):
        raise UnsupportedCallError(
            "flex_attention takes plain tensors, because its score and mask functions get positions, and a rank's part "
            "begins at 0. Of DTensors that are sharded on the batch or on heads call it with to_local(), as "
            "terrazzo.tensor.experimental.local_map does, if these functions use no batch and no head; for a sequence "
            "that is sharded there is terrazzo.tensor.experimental.context_parallel"
        )
    if captured.recording is not None and captured.recorder() is not None:
        raise CaptureError(
            "it calls flex_attention, whose kernel only torch.compile makes: compile the modules around it",
            operation="flex_attention",
        )
