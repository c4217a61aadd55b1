"""A DTensor as a value of Python: numbers, truth, lists. All of them need the whole tensor, so all ranks take part."""

from __future__ import annotations

from numbers import Number
from typing import Any

import torch

from terrazzo.errors import DTensorError


class OneValue:
    """Conversions of a DTensor with one element to Python's numbers, and the questions that use them."""

    __slots__ = ()
    _local: torch.Tensor
    _layout: Any

    def item(self) -> Any:
        return self._one_value("item").item()

    def tolist(self) -> Any:
        return self._whole().tolist()

    def __bool__(self) -> bool:
        return bool(self._one_value("bool"))

    def __int__(self) -> int:
        return int(self._one_value("int"))

    def __float__(self) -> float:
        return float(self._one_value("float"))

    def __complex__(self) -> complex:
        return complex(self._one_value("complex"))

    def __index__(self) -> int:
        if self._layout.shape.numel() != 1:  # what Python expects of what is no index, as in `[0] * x`
            raise TypeError("only integer tensors of a single element can be converted to an index")
        if self._layout.coord is None:  # sizes and bounds come from it, which would differ from those of other ranks
            raise DTensorError(
                f"this rank is outside the mesh {self._layout.mesh}, so the value of this DTensor, which is used as an "
                "index or a size, is not known; call this on ranks of the mesh only"
            )
        return self._one_value("index").__index__()

    def __contains__(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor | Number | torch.SymInt | torch.SymFloat | torch.SymBool):
            raise RuntimeError(f"a tensor may contain tensors and numbers, and was asked for a {type(value)}")
        where: Any = self == value
        return bool(where.any())

    def _one_value(self, what: str) -> torch.Tensor:
        if self._layout.shape.numel() != 1:
            raise RuntimeError(
                f"{what}() needs a tensor with one element, this DTensor has shape {tuple(self._layout.shape)}"
            )
        return self._local.detach() if self._layout.is_replicated else self._whole()

    def _whole(self) -> torch.Tensor:
        whole: torch.Tensor = self.detach().full_tensor()  # type: ignore[attr-defined]  # a DTensor's
        return whole
