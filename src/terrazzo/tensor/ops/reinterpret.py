"""`view(dtype)`: the same bytes as another dtype.

The number of elements depends on the old dtype, and plans do not depend on dtypes, so this is decided at each call.
"""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.layout import Layout
from terrazzo.tensor.copied_view import CopiedView, mark_alias
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.ops.table import decomposition
from terrazzo.tensor.strides import is_thin, note_strides, strides_in_memory


@decomposition("view")
def view_as_dtype(x: Any, dtype: Any) -> Any:
    """`view(dtype)` only; `view` to another shape has a rule."""
    if not isinstance(dtype, torch.dtype) or not isinstance(x, DTensor):
        return NotImplemented
    layout = x._layout
    before, after = x._local.element_size(), dtype.itemsize
    if layout.coord is None or any(p.is_partial() for p in layout.placements):
        return NotImplemented  # the bytes of partial terms have no meaning
    if before == after:
        return _same_memory(x, x._local.view(dtype), layout)
    last = layout.ndim - 1
    if last < 0 or layout.packed or any(p.is_shard(last) for p in layout.placements):
        return NotImplemented
    length = layout.shape[last] * before
    if length % after:
        return NotImplemented  # the function itself raises the error
    seen = Layout.of(layout.mesh, layout.placements, (*layout.shape[:last], length // after), layout.order)
    return _same_memory(x, x._local.view(dtype), seen)


def _same_memory(x: DTensor, local: torch.Tensor, layout: Layout) -> DTensor:
    if is_thin(layout.local_shape, layout.shape):
        before = strides_in_memory(x._local, x.shape)
        whole = torch.empty_strided(tuple(x.shape), before, dtype=x.dtype, device="meta")
        local = note_strides(local, layout.shape, whole.view(local.dtype).stride())
    result = wrap(local, layout)
    if type(x) is CopiedView:
        mark_alias(result, x)
    return result
