"""DTensors inside composites that PyTorch's C++ decomposes: they come back here as single aten operations.

A DTensor's autograd graph is that of its local tensor. C++ autograd has run before this point, but has recorded
nothing for the DTensor. The thread state from before is restored, so that operations on the local tensors are recorded
as usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from terrazzo._torch.autograd import innermost_transform
from terrazzo._torch.dispatching import is_composite, thread_state_before_dispatch, without_autocast
from terrazzo.tensor.dispatch.names import canonical_name
from terrazzo.tensor.dispatch.overrides import OVERRIDES
from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.links import links
from terrazzo.tensor.ops.table import TABLE


def dispatch_aten(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one aten operation on DTensors, called from C++."""
    name, _ = canonical_name(op)
    if (
        is_composite(op)
        and (name not in TABLE or TABLE[name].how == "body")
        and op not in OVERRIDES
        and op is not torch.ops.aten.detach.default
    ):
        return op.decompose(*args, **kwargs)
    if innermost_transform() is not None:
        return DTensor.__torch_function__(op, (DTensor,), args, dict(kwargs))
    # Autocast has cast the composite's inputs already; the parts must not be cast again.
    with thread_state_before_dispatch(), without_autocast():
        return DTensor.__torch_function__(op, (DTensor,), args, dict(kwargs))


links.aten = dispatch_aten
