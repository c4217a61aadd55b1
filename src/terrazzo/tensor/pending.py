"""DTensors whose communication is running: a class of their own, so that ordinary DTensors do not pay for the check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from terrazzo._torch.tensors import make_wrapper as _make
from terrazzo.layout import Layout
from terrazzo.tensor.dtensor import DTensor

_STRIDED = torch.strided  # passed by position, which saves a tenth of an operation's cost


class PendingDTensor(DTensor):
    """A DTensor whose communication is running; it becomes a plain `DTensor` when its local tensor is first used."""

    __slots__ = ()

    @property
    def _local(self) -> torch.Tensor:  # type: ignore[override]  # a slot in the base class, which is set at the end
        local = self._pending()
        _local_slot.__set__(self, local)
        object.__setattr__(self, "__class__", DTensor)
        return local

    def _shown(self) -> str:
        """Not the local tensor: what is still to be sent needs all ranks, and one alone may print."""
        return "<in communication>"


_local_slot: Any = DTensor.__dict__["_local"]


def pending(layout: Layout, like: torch.Tensor, resolve: Callable[[], torch.Tensor]) -> DTensor:
    """A DTensor whose local tensor `resolve` returns when it is first used."""
    result: PendingDTensor = _make(PendingDTensor, layout.shape, None, None, None, like.dtype, _STRIDED, like.device)
    result._layout = layout
    result._memo = None
    result._pending = resolve
    return result
