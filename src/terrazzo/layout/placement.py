"""How one mesh dimension holds a tensor: sharded, replicated, or partial (terms that still have to be reduced).

Placements are interned: two equal placements are one object, so that layouts built from them compare by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from terrazzo.errors import LayoutError, PlacementsError
from terrazzo.layout.chunking import chunk_sizes, chunk_span

REDUCE_OPS = ("sum", "avg", "product", "max", "min")

COMMUNICATING: dict[str, Callable[..., torch.Tensor]] = {}
"""What `Shard` does for libraries with other ranks, by `terrazzo.tensor.libraries`: this package knows no ranks."""


class Placement:
    """The base of `Shard`, `Replicate` and `Partial`; not made directly."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a `Shard` (of `dim`, when given)."""
        return False

    def is_replicate(self) -> bool:
        """Whether every rank of the mesh dimension holds the whole tensor."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether this is a `Partial` (with `reduce_op`, when given)."""
        return False

    def __copy__(self) -> Placement:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Placement:
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")


class Shard(Placement):
    """Each rank of the mesh dimension holds one chunk of tensor dimension `dim`, cut as `torch.chunk` cuts.

    Sizes need not divide evenly: trailing ranks then hold a shorter chunk or an empty one.

    >>> Shard(0) is Shard(0), Shard(1).is_shard(1)
    (True, True)
    """

    __slots__ = ("dim",)
    dim: int
    _pool: dict[int, Shard] = {}

    def __new__(cls, dim: int) -> Shard:
        found = cls._pool.get(dim)
        if found is None:
            if not isinstance(dim, int) or isinstance(dim, bool):
                raise LayoutError(f"Shard needs an int dimension, got {dim!r}")
            found = object.__new__(cls)
            object.__setattr__(found, "dim", int(dim))
            found = cls._pool.setdefault(int(dim), found)
        return found

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """The length of chunk number `rank` of a dim of `curr_local_size`, and where in that dim it begins.

        An empty chunk begins at the dim's end.

        >>> [Shard.local_shard_size_and_offset(5, 4, rank) for rank in range(4)]
        [(2, 0), (2, 2), (1, 4), (0, 5)]
        """
        offset, length = chunk_span(curr_local_size, num_chunks, rank)
        return length, offset

    _local_shard_size_and_offset = local_shard_size_and_offset  # libraries call PyTorch's private name for it

    def _split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        """PyTorch's method for libraries: the chunks, padded at their ends to one size, and how much each is padded.

        >>> chunks, padded = Shard(0)._split_tensor(torch.arange(5), 4)
        >>> [chunk.tolist() for chunk in chunks], padded
        ([[0, 1], [2, 3], [4, 0], [0, 0]], [0, 0, 1, 2])
        """
        sizes = chunk_sizes(tensor.shape[self.dim], num_chunks)
        chunks = list(tensor.split(list(sizes), self.dim))
        padded = [max(sizes) - size for size in sizes] if with_padding else []
        for i, count in enumerate(padded):
            if count:
                shape = list(tensor.shape)
                shape[self.dim] = count
                chunks[i] = torch.cat([chunks[i], tensor.new_zeros(shape)], self.dim)
        return [chunk.contiguous() for chunk in chunks] if contiguous else chunks, padded

    def _select_split_tensor(
        self,
        tensor: torch.Tensor,
        num_chunks: int,
        index: int,
        *,
        with_padding: bool = True,
        contiguous: bool = True,
        clone: bool = True,
    ) -> torch.Tensor:
        """PyTorch's method for libraries: one of the chunks.

        >>> Shard(0)._select_split_tensor(torch.arange(5), 4, 2).tolist()
        [4, 0]
        """
        chunk = self._split_tensor(tensor, num_chunks, with_padding=with_padding, contiguous=False)[0][index]
        if clone:
            return chunk.clone()
        return chunk.contiguous() if contiguous else chunk

    def _replicate_to_shard(
        self, local_tensor: torch.Tensor, mesh: Any, mesh_dim: int, shard_index: int
    ) -> torch.Tensor:
        """PyTorch's method for libraries: the chunk of a rank, from the whole."""
        return self._select_split_tensor(local_tensor, mesh.size(mesh_dim), shard_index, with_padding=False)

    def _shard_tensor(
        self, tensor: torch.Tensor, mesh: Any, mesh_dim: int, src_data_rank: int | None = 0
    ) -> torch.Tensor:
        """PyTorch's method for libraries: this rank's chunk of the tensor of a rank, or of its own with None."""
        return COMMUNICATING["shard"](self, tensor, mesh, mesh_dim, src_data_rank)

    def _to_replicate_tensor(
        self, local_tensor: torch.Tensor, mesh: Any, mesh_dim: int, current_logical_shape: Sequence[int]
    ) -> torch.Tensor:
        """PyTorch's method for libraries: the whole, from the chunks of all ranks."""
        return COMMUNICATING["gather"](self, local_tensor, mesh, mesh_dim, current_logical_shape)

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"

    def __str__(self) -> str:
        return f"S({self.dim})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Shard, (self.dim,))


class _StridedShard(Placement):
    """What a `Shard` is shown as if later mesh dims cut its tensor dim first, into `split_factor` parts in all.

    The name is PyTorch's. As there, it is no `Shard`, and `is_shard()` is false.

    >>> _StridedShard(0, split_factor=2) is _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2)
    (True, _StridedShard(dim=0, sf=2))
    """

    __slots__ = ("dim", "split_factor")
    dim: int
    split_factor: int
    _pool: dict[tuple[int, int], _StridedShard] = {}

    def __new__(cls, dim: int, *, split_factor: int = 1, sf: int | None = None) -> _StridedShard:
        split_factor = split_factor if sf is None else sf
        found = cls._pool.get((dim, split_factor))
        if found is None:
            if not all(isinstance(n, int) and not isinstance(n, bool) for n in (dim, split_factor)) or split_factor < 1:
                raise LayoutError(f"_StridedShard needs an int dimension and factor, got {dim!r} and {split_factor!r}")
            found = object.__new__(cls)
            object.__setattr__(found, "dim", int(dim))
            object.__setattr__(found, "split_factor", int(split_factor))
            found = cls._pool.setdefault((int(dim), int(split_factor)), found)
        return found

    def __repr__(self) -> str:
        return f"_StridedShard(dim={self.dim}, sf={self.split_factor})"

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_strided_shard, (self.dim, self.split_factor))


def _strided_shard(dim: int, split_factor: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=split_factor)


CUTS = (Shard, _StridedShard)
"""The placements that cut a dim."""


class Replicate(Placement):
    """Each rank of the mesh dimension holds the whole tensor.

    >>> Replicate() is Replicate(), Replicate().is_replicate()
    (True, True)
    """

    __slots__ = ()
    _only: Replicate | None = None

    def __new__(cls) -> Replicate:
        if cls._only is None:
            cls._only = object.__new__(cls)
        return cls._only

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Replicate, ())


class Partial(Placement):
    """Each rank of the mesh dimension holds a term; the tensor is their elementwise reduction by `reduce_op`.

    >>> Partial().reduce_op, Partial("max").is_partial("sum")
    ('sum', False)
    """

    __slots__ = ("reduce_op",)
    LINEAR_REDUCE_OPS: ClassVar[tuple[str, ...]] = ("sum", "avg")
    ALL_REDUCE_OPS: ClassVar[tuple[str, ...]] = ("sum", "avg", "min", "max", "product")
    reduce_op: str
    _pool: dict[str, Partial] = {}

    def __new__(cls, reduce_op: str = "sum") -> Partial:
        found = cls._pool.get(reduce_op)
        if found is None:
            if reduce_op not in REDUCE_OPS:
                raise LayoutError(f"Partial's reduction must be one of {', '.join(REDUCE_OPS)}, not {reduce_op!r}")
            found = object.__new__(cls)
            object.__setattr__(found, "reduce_op", reduce_op)
            found = cls._pool.setdefault(reduce_op, found)
        return found

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Partial, (self.reduce_op,))


def check_placement(value: Any) -> None:
    """Raise if `value` is not a placement; for PyTorch's own, the message says what to import."""
    if isinstance(value, (Shard, Replicate, Partial, _StridedShard)):
        return
    name = type(value).__name__
    if type(value).__module__.startswith("torch."):
        ours = next((n for n in ("Shard", "Replicate", "Partial") if name.endswith(n)), None)
        raise PlacementsError(
            f"{value!r} is PyTorch's own {name}, which terrazzo's tensors do not accept: "
            + (f"import {ours} from terrazzo.tensor instead, or " if ours else "")
            + "convert placements with terrazzo.tensor.interop.from_torch_placements"
        )
    raise PlacementsError(f"{value!r} is not a placement; use Shard(dim), Replicate() or Partial(reduce_op)")
