"""The placements, under the module name that they have in PyTorch."""

from typing import Any, NoReturn

from terrazzo.errors import PlacementsError
from terrazzo.layout import Partial, Placement, Replicate, Shard
from terrazzo.layout.placement import _StridedShard as _StridedShard


class _MaskPartial(Partial):
    """PyTorch's placement of a lookup in rows that are sharded, by name: libraries ask whether a placement is one.

    None is. A lookup in sharded rows leaves a plain `Partial`, whose terms are zeros where another rank has the row.
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise PlacementsError(
            "_MaskPartial is a placement of PyTorch's embeddings, which terrazzo's tensors do not have: lookups in "
            "sharded rows leave Partial(), so use that"
        )


__all__ = ["Partial", "Placement", "Replicate", "Shard"]
