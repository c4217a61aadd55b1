"""DTensors whose communication is under way: a class of their own, so that ordinary ones pay nothing for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from terrazzo._torch.tensors import make_wrapper as _make
from terrazzo.layout import Layout
from terrazzo.tensor.dtensor import DTensor

_STRIDED = torch.strided  # arguments go by position, which is a tenth of an operation's cost cheaper


class PendingDTensor(DTensor):
    """A DTensor whose communication is under way; it becomes a plain `DTensor` when its local tensor is first used."""

    __slots__ = ()

    @property
    def _local(self) -> torch.Tensor:  # type: ignore[override]  # a slot in the base, which is set in the end
        local = self._pending()
        _local_slot.__set__(self, local)
        object.__setattr__(self, "__class__", DTensor)
        return local


_local_slot: Any = DTensor.__dict__["_local"]


def pending(layout: Layout, like: torch.Tensor, resolve: Callable[[], torch.Tensor]) -> DTensor:
    """A DTensor whose local tensor `resolve` gives when it is first needed."""
    result: PendingDTensor = _make(PendingDTensor, layout.shape, None, None, None, like.dtype, _STRIDED, like.device)
    result._layout = layout
    result._memo = None
    result._pending = resolve
    return result
