"""For libraries: the names by which code outside looks into PyTorch's DTensors, with the same meaning for terrazzo's.

PyTorch has them in `torch.distributed.tensor._dtensor_spec`, `._utils` and `._redistribute`, where `terrazzo.install()`
puts these. Programs need none of them: a DTensor's `device_mesh`, `placements`, `shape` and `stride()` say the same.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.comm.axis import axis_of
from terrazzo.comm.collectives import all_gather, scatter
from terrazzo.comm.mesh import canonical_mesh
from terrazzo.errors import DTensorArgumentError, DTensorError
from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.layout.chunking import chunk_sizes
from terrazzo.layout.placement import COMMUNICATING, CUTS, check_placement
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.links import links
from terrazzo.tensor.redistribute import redistribute_local


class TensorMeta(NamedTuple):
    """The global shape, the global strides and the dtype of a DTensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class DTensorSpec:
    """What a DTensor is, without its elements: `tensor._spec`. Unlike PyTorch's it does not change.

    >>> from terrazzo.tensor import Shard, init_device_mesh, ones
    >>> x = ones(4, 6, device_mesh=init_device_mesh("cpu", (1,)), placements=[Shard(0)])
    >>> x._spec.placements, x._spec.tensor_meta.stride, x._spec.dim_map
    ((Shard(dim=0),), (6, 1), [0, -1])
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta | None = None

    def __post_init__(self) -> None:
        placements = tuple(self.placements)
        for placement in placements:
            check_placement(placement)
        object.__setattr__(self, "placements", placements)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self.mesh

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return self._meta().shape

    @property
    def stride(self) -> tuple[int, ...]:
        """The global strides."""
        return self._meta().stride

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self._meta().shape)

    @property
    def num_shards(self) -> int:
        """The number of shards, as the product of the sizes of the mesh dims that shard."""
        return prod(n for n, p in zip(self.mesh.shape, self.placements, strict=True) if isinstance(p, CUTS))

    @property
    def dim_map(self) -> list[int]:
        """For each dim the mesh dim that shards it, -1 for none; raises if several do."""
        found = [-1] * self.ndim
        for m, p in enumerate(self.placements):
            if isinstance(p, CUTS):
                if found[p.dim] >= 0:
                    raise ValueError(f"mesh dims {found[p.dim]} and {m} both shard dim {p.dim}: dim_map has one each")
                found[p.dim] = m
        return found

    @property
    def num_shards_map(self) -> list[int]:
        """For each dim the number of its shards."""
        counts = [1] * self.ndim
        for n, p in zip(self.mesh.shape, self.placements, strict=True):
            if isinstance(p, CUTS):
                counts[p.dim] *= n
        return counts

    @property
    def shard_order(self) -> None:
        """None: an order other than that of the mesh dims is in the placements, as `_StridedShard`."""
        return None

    @staticmethod
    def format_shard_order_str(placements: Sequence[Placement], shard_order: None = None) -> str:
        """The placements in short, as PyTorch's printed graphs have them.

        >>> from terrazzo.tensor import Partial, Replicate, Shard
        >>> DTensorSpec.format_shard_order_str((Shard(0), Replicate(), Partial()))
        'S(0)RP(sum)'
        """
        return "".join(map(str, placements))

    @property
    def sums(self) -> list[int]:
        """The mesh dims that hold partial terms."""
        return [m for m, p in enumerate(self.placements) if p.is_partial()]

    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(p.is_replicate() for p in self.placements)

    def is_sharded(self) -> bool:
        """Whether some mesh dim shards the tensor."""
        return any(isinstance(p, CUTS) for p in self.placements)

    def shallow_copy_with_tensor_meta(self, tensor_meta: TensorMeta | None) -> DTensorSpec:
        """The same with this `tensor_meta`."""
        return replace(self, tensor_meta=tensor_meta)

    @classmethod
    def from_dim_map(
        cls, mesh: DeviceMesh, dim_map: Sequence[int], sums: Sequence[int], tensor_meta: TensorMeta | None = None
    ) -> DTensorSpec:
        """The inverse of `dim_map` and `sums`."""
        placements: list[Placement] = [Partial() if m in sums else Replicate() for m in range(mesh.ndim)]
        for dim, m in enumerate(dim_map):
            if m >= 0:
                if not placements[m].is_replicate():
                    raise RuntimeError(f"mesh dim {m} cannot be {placements[m]} and shard dim {dim}")
                placements[m] = Shard(dim)
        return cls(mesh, tuple(placements), tensor_meta)

    def _meta(self) -> TensorMeta:
        if self.tensor_meta is None:
            raise ValueError("this DTensorSpec has no tensor_meta: pass DTensorSpec(mesh, placements, tensor_meta)")
        return self.tensor_meta

    def _layout(self) -> Layout:
        return Layout.of(canonical_mesh(self.mesh), self.placements, tuple(self._meta().shape))


def spec_of(tensor: DTensor) -> DTensorSpec:
    layout = tensor._layout
    return DTensorSpec(layout.mesh, layout.shown, TensorMeta(layout.shape, tuple(tensor.stride()), tensor.dtype))


def from_spec(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> DTensor:
    if not isinstance(local, torch.Tensor) or not isinstance(spec, DTensorSpec):
        raise DTensorArgumentError(
            f"DTensor(local_tensor, spec, requires_grad=...) takes a terrazzo.tensor.libraries.DTensorSpec, got "
            f"{type(spec).__name__}. Use distribute_tensor(tensor, mesh, placements) for a global tensor or "
            "DTensor.from_local(local, mesh, placements) for each rank's part"
        )
    layout = spec._layout()
    if tuple(local.shape) != tuple(layout.local_shape) and layout.coord is not None:
        raise DTensorArgumentError(
            f"DTensor: a local tensor of shape {tuple(local.shape)} is not this rank's part of a tensor of shape "
            f"{tuple(layout.shape)} placed {list(layout.shown)}, which has shape {tuple(layout.local_shape)}"
        )
    if local.dtype != spec._meta().dtype:
        raise DTensorArgumentError(f"DTensor: the local tensor has {local.dtype}, but the spec {spec._meta().dtype}")
    if local.requires_grad and not requires_grad:
        warnings.warn(
            "To construct a DTensor from a tensor that requires a gradient, which the DTensor will not pass on, pass "
            "local_tensor.detach(). DTensor.from_local passes it on",
            stacklevel=3,
        )
    return wrap(local.detach(), layout).requires_grad_(requires_grad)


links.spec_of, links.from_spec = spec_of, from_spec


def _shard_tensor(
    placement: Shard, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, src_data_rank: int | None
) -> torch.Tensor:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tensor.new_empty(0, requires_grad=tensor.requires_grad)
    ranks, index = mesh.size(mesh_dim), coordinate[mesh_dim]
    if src_data_rank is None:
        return placement._select_split_tensor(tensor, ranks, index, with_padding=False)
    parts, _ = placement._split_tensor(tensor, ranks, with_padding=False)
    sent = parts if index == src_data_rank else None
    return scatter(sent, axis_of(canonical_mesh(mesh), mesh_dim), src_data_rank, parts[index].shape, tensor)


def _to_replicate_tensor(
    placement: Shard, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[int]
) -> torch.Tensor:
    sizes = chunk_sizes(current_logical_shape[placement.dim], mesh.size(mesh_dim))
    return all_gather(local_tensor, axis_of(canonical_mesh(mesh), mesh_dim), placement.dim, sizes)


def _write_items(name: str, value: Any) -> list[Any]:
    planner = importlib.import_module("terrazzo.checkpoint.default_planner")  # only here tensors know checkpoints
    items = planner.create_default_local_save_plan({name: value}, True).items
    return [replace(item, type=planner.WriteItemType.SHARD) for item in items]


links.write_items = _write_items
COMMUNICATING.update(shard=_shard_tensor, gather=_to_replicate_tensor)


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part, and where in the global tensor it begins; `((0,), ())` outside of the mesh.

    A part that is not one box (a `_StridedShard` that cuts pieces of a dim) begins where its first piece does, and one
    without elements along a dim at the end of the dim.

    >>> from terrazzo.tensor import Shard, init_device_mesh
    >>> compute_local_shape_and_global_offset((5, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    ((5, 3), (0, 0))
    """
    layout = Layout.of(canonical_mesh(mesh), placements, tuple(global_shape))
    if layout.coord is None:
        return (0,), ()
    lengths = layout.lengths()
    if skip_offset:
        return lengths, ()
    starts = zip(layout.pieces()[0].offsets, lengths, layout.shape, strict=True)
    return lengths, tuple(start if length else whole for start, length, whole in starts)


def compute_global_tensor_info(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """The global shape and strides of the DTensor of which each rank has a part like `tensor`.

    >>> from terrazzo.tensor import Shard, init_device_mesh
    >>> compute_global_tensor_info(torch.ones(2, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    ([2, 3], [3, 1])
    """
    whole = DTensor.from_local(tensor.detach(), mesh, placements)
    return list(whole.shape), list(whole.stride())


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> torch.Tensor:
    """This rank's part under `target_spec`, from that under `current_spec`; differentiable.

    The other arguments are ignored; for compatibility: terrazzo plans the transition itself.

    >>> from terrazzo.tensor import Replicate, Shard, init_device_mesh
    >>> mesh, meta = init_device_mesh("cpu", (1,)), TensorMeta(torch.Size([2, 3]), (3, 1), torch.float32)
    >>> rows, whole = DTensorSpec(mesh, (Shard(0),), meta), DTensorSpec(mesh, (Replicate(),), meta)
    >>> redistribute_local_tensor(torch.ones(2, 3), rows, whole).shape
    torch.Size([2, 3])
    """
    src, dst = current_spec._layout(), target_spec._layout()
    if src.mesh is not dst.mesh:
        raise DTensorError("redistribute_local_tensor stays on one mesh: use DTensor.redistribute for another")
    return redistribute_local(local_tensor, src, dst)


__all__ = [
    "DTensorSpec",
    "TensorMeta",
    "compute_global_tensor_info",
    "compute_local_shape_and_global_offset",
    "redistribute_local_tensor",
]
