"""A group of sharded tensors with an owner for each: one exchange gives owners the whole tensors, another goes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terrazzo.comm.axis import Axis, axis_of
from terrazzo.comm.collectives import exchange
from terrazzo.errors import OptimError
from terrazzo.layout import Layout
from terrazzo.layout.drawing import ShownAsCall
from terrazzo.optim.routes import Piece, Routes, routes_of
from terrazzo.tensor import DTensor
from terrazzo.tensor.dtensor import wrap

Cost = Callable[[torch.Size], float]


class _OnMesh(NamedTuple):
    """The tensors of a group that are on one mesh."""

    mesh: Any
    positions: tuple[int, ...]  # in the group
    routes: Routes


class Owners(ShownAsCall):
    """Assigns each tensor of a group to one rank, which can have it whole; the costs of the ranks are balanced.

    Any placements work: the shards of `fully_shard` on one or two mesh dims, of tensor parallelism, or of both. The
    whole group takes two exchanges: one all-to-all to the owners, and one back. The work is divided among replicas,
    too. A plain tensor is whole already, on every rank.

    The constructor does not communicate. Every rank of the mesh must create it from the same tensors in the same order,
    and call its methods at the same points.

    >>> from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh
    >>> mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    >>> matrices = [distribute_tensor(torch.eye(3) * n, mesh, [Shard(0)]) for n in (1, 2, 4)]
    >>> owners = Owners(matrices)
    >>> inverses = {i: whole.inverse() for i, whole in owners.gather(matrices).items()}      # only of those owned here
    >>> results = owners.scatter(inverses, dtype=torch.float32)                             # placed as the matrices are
    >>> [result.full_tensor()[0, 0].item() for result in results]
    [1.0, 0.5, 0.25]

    Args:
        tensors: The group; only placements and shapes matter.
        cost: The cost of a tensor for its owner, from its shape; by default the number of elements.
    """

    def __init__(self, tensors: Sequence[Tensor], cost: Cost = torch.Size.numel) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._layouts: list[Layout | None] = [_layout_of(i, tensor) for i, tensor in enumerate(tensors)]
        by_mesh: dict[int, list[int]] = {}
        for i, layout in enumerate(self._layouts):
            if layout is not None:
                by_mesh.setdefault(id(layout.mesh), []).append(i)
        self._meshes = [self._on_mesh(positions, cost) for positions in by_mesh.values()]
        owned = [i for each in self._meshes if each is not None for i in _owned(each)]
        plain = [i for i, layout in enumerate(self._layouts) if layout is None]
        self.mine: tuple[int, ...] = tuple(sorted(owned + plain))
        """The positions of the tensors that this rank has whole."""

    def gather(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> dict[int, Tensor]:
        """The whole of each tensor that this rank owns, by its position in the group.

        Args:
            tensors: Tensors placed like those of the group: the tensors themselves, their gradients, updates.
            dtype: The dtype in which pieces are sent, to save bytes; required if the tensors have different dtypes.
        """
        self._check(tensors)
        result = {
            i: tensors[i] if dtype is None else tensors[i].to(dtype) for i in self.mine if self._layouts[i] is None
        }
        for each in self._meshes:
            if each is not None:
                result |= self._gather_on(each, tensors, dtype)
        return result

    def scatter(self, wholes: Mapping[int, Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The reverse of `gather`: from the whole tensors of their owners, the sharded tensors of the group.

        Args:
            wholes: For each position that this rank owns (`mine`), a tensor of that global shape.
            dtype: The dtype of the results; it must be the same on all ranks, also on those that own nothing.

        Returns:
            DTensors placed like those of the group; for a plain tensor of the group, the tensor that was passed.
        """
        missing = [i for i in self.mine if i not in wholes]
        wrong = [i for i in self.mine if i in wholes and wholes[i].shape != self._shapes[i]]
        if missing or wrong or len(wholes) != len(self.mine):
            raise OptimError(
                f"scatter needs a whole tensor for each position in {list(self.mine)}, got {sorted(wholes)}"
                + (f"; these have another shape than in the group: {wrong}" if wrong else "")
            )
        result: list[Any] = [
            wholes[i].to(dtype) if self._layouts[i] is None else None for i in range(len(self._layouts))
        ]
        for each in self._meshes:
            if each is not None:
                for i, local in self._scatter_on(each, wholes, dtype).items():
                    result[i] = wrap(local, self._layout(i))
        return [r if r is not None else self._outside(i, dtype) for i, r in enumerate(result)]

    # ------------------------------------------------------------------ one mesh

    def _on_mesh(self, positions: list[int], cost: Cost) -> _OnMesh | None:
        layouts = [self._layout(i) for i in positions]
        here = layouts[0].coord
        if here is None:  # a rank outside the mesh takes no part
            return None
        costs = [cost(self._shapes[i]) for i in positions]
        return _OnMesh(layouts[0].mesh, tuple(positions), routes_of(layouts, costs, here))

    def _gather_on(self, each: _OnMesh, tensors: Sequence[Tensor], dtype: torch.dtype | None) -> dict[int, Tensor]:
        axis = _axis(each)
        locals_ = [_local(tensors[i]) for i in each.positions]
        common = dtype or locals_[0].dtype
        if any(local.dtype is not common for local in locals_) and dtype is None:
            raise OptimError(
                f"tensors of {sorted({str(x.dtype) for x in locals_})} cannot be sent together: pass dtype"
            )
        routes = each.routes
        like = torch.empty(0, dtype=common, device=each.mesh.device_type)
        sent = [_joined([locals_[p.tensor] for p in message], like) for message in routes.to_owners]
        received = exchange(sent, axis, [_shape(message) for message in routes.from_holders], like)
        wholes: dict[int, Tensor] = {}
        for message, buffer in zip(routes.from_holders, received, strict=True):
            for piece, values in zip(message, _pieces(buffer, message), strict=True):
                whole = wholes.get(piece.tensor)
                if whole is None:
                    whole = wholes[piece.tensor] = like.new_empty(self._shapes[each.positions[piece.tensor]])
                whole[piece.box.slices()].copy_(values)
        for n in (n for n, owner in enumerate(routes.owners) if owner == axis.index):  # including empty tensors
            wholes.setdefault(n, like.new_empty(self._shapes[each.positions[n]]))
        return {each.positions[n]: whole for n, whole in wholes.items()}

    def _scatter_on(self, each: _OnMesh, wholes: Mapping[int, Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
        axis, routes = _axis(each), each.routes
        like = torch.empty(0, dtype=dtype, device=each.mesh.device_type)
        sent = [
            _joined([wholes[each.positions[p.tensor]].detach()[p.box.slices()] for p in message], like)
            for message in routes.to_holders
        ]
        received = exchange(sent, axis, [_shape(message) for message in routes.from_owners], like)
        result: dict[int, Tensor] = {}
        for message, buffer in zip(routes.from_owners, received, strict=True):
            for piece, values in zip(message, _pieces(buffer, message), strict=True):
                result[each.positions[piece.tensor]] = values
        for i in each.positions:  # including those of which this rank has no elements
            result.setdefault(i, like.new_empty(self._layout(i).local_shape))
        return result

    # ------------------------------------------------------------------ checks

    def _layout(self, i: int) -> Layout:
        layout = self._layouts[i]
        assert layout is not None
        return layout

    def _outside(self, i: int, dtype: torch.dtype) -> Tensor:
        layout = self._layout(i)
        return wrap(torch.empty(layout.local_shape, dtype=dtype, device=layout.mesh.device_type), layout)

    def _check(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != len(self._layouts):
            raise OptimError(f"the group has {len(self._layouts)} tensors, but {len(tensors)} were passed")
        for i, (tensor, layout) in enumerate(zip(tensors, self._layouts, strict=True)):
            found = tensor._layout if isinstance(tensor, DTensor) else None
            if found is not layout or tensor.shape != self._shapes[i]:
                raise OptimError(
                    f"tensor {i} is {_described(tensor)}, but the tensor of the group is "
                    f"{self._shapes[i]} {layout or '(plain)'}. Redistribute it first"
                )


def _layout_of(i: int, tensor: Tensor) -> Layout | None:
    if not isinstance(tensor, DTensor):
        return None
    if any(placement.is_partial() for placement in tensor.placements):
        raise OptimError(f"tensor {i} is placed {list(tensor.placements)}: redistribute it to Shard or Replicate first")
    return tensor._layout


def _owned(each: _OnMesh) -> list[int]:
    index = _axis_index(each)
    return [i for i, owner in zip(each.positions, each.routes.owners, strict=True) if owner == index]


def _axis_index(each: _OnMesh) -> int:
    index = 0
    for at, n in zip(each.mesh.get_coordinate(), each.mesh.shape, strict=True):
        index = index * n + at
    return index


def _axis(each: _OnMesh) -> Axis:
    dims = tuple(range(len(each.mesh.shape)))
    return axis_of(each.mesh, dims[0] if len(dims) == 1 else dims)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local()


def _joined(pieces: Sequence[Tensor], like: Tensor) -> Tensor | None:
    if not pieces:
        return None
    return torch.cat([piece.to(like.device, like.dtype).reshape(-1) for piece in pieces])


def _shape(message: Sequence[Piece]) -> tuple[int] | None:
    return (sum(piece.box.numel for piece in message),) if message else None


def _pieces(buffer: Tensor, message: Sequence[Piece]) -> list[Tensor]:
    if not message:
        return []
    parts = buffer.split_with_sizes([piece.box.numel for piece in message])
    return [part.view(piece.box.lengths) for part, piece in zip(parts, message, strict=True)]


def _described(tensor: Tensor) -> str:
    return repr(tensor._layout) if isinstance(tensor, DTensor) else f"a plain tensor of {tuple(tensor.shape)}"


__all__ = ["Owners"]
