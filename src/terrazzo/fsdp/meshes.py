"""The meshes of a group: which ranks shard, which replicate, and how they combine with tensor parallelism."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terrazzo._torch.groups import (
    backend_of,
    default_group,
    device_types,
    flattened,
    is_alive,
    joined,
    root_of,
    without_groups,
)
from terrazzo.comm.alone import initialise
from terrazzo.comm.axis import Axis, axis_of, axis_over
from terrazzo.comm.mesh import ranks_of, when_groups_end
from terrazzo.comm.simulated import real_values
from terrazzo.errors import FSDPError, FSDPTypeError, FSDPValueError
from terrazzo.layout import Layout, Placement, Replicate, Shard

_REPLICATE = Replicate()


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The data-parallel dims of a mesh, for a model whose parameters are DTensors on all of the mesh.

    >>> DataParallelMeshDims(shard=("dp_shard", "cp"), replicate="dp_replicate").shard_names
    ('dp_shard', 'cp')

    Args:
        shard: Name of the dim whose ranks shard; several names are taken together.
        replicate: Name of the dim whose ranks replicate; several names are taken together.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise FSDPValueError("DataParallelMeshDims needs a dim: pass shard, replicate or both")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names of the dims whose ranks shard."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names of the dims whose ranks replicate."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True)
class FSDPMeshInfo:
    """A mesh for some parameters of a `fully_shard` call, for `ShardPlacementResult`; its ranks shard."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None = 0
    replicate_mesh_dim: int | None = None


@dataclass(frozen=True)
class HSDPMeshInfo(FSDPMeshInfo):
    """A 2-D mesh for `ShardPlacementResult`: ranks along the first dim replicate, those along the second shard."""

    shard_mesh_dim: int | None = 1
    replicate_mesh_dim: int | None = 0


@dataclass(frozen=True)
class ShardPlacementResult:
    """Returned by a `shard_placement_fn` for a parameter with a mesh of its own, such as an expert's.

    Args:
        placement: The dim along which the parameter is sharded; None: dim 0.
        mesh_info: The mesh over which it is sharded and its gradient is reduced.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo


@dataclass(frozen=True, eq=False)
class DataMesh:
    """The mesh of a `fully_shard` call: 1-D shards; 2-D replicates on its first dim and shards on its second.

    With `whole` it is a part of that mesh, on which the parameters are DTensors; `dims` are its dims there. Without
    `shards` no dim shards: every rank holds whole parameters.
    """

    mesh: DeviceMesh
    shard: Axis
    replicate: Axis | None
    device: torch.device
    whole: DeviceMesh | None = None
    dims: tuple[str, ...] = ()
    shards: bool = True

    @cached_property
    def of_scalars(self) -> DataMesh:
        """The same ranks for scalars, which cannot be sharded: they are replicated on all of them."""
        if not self.shards:
            return self
        ranks = tuple(ranks_of(self.mesh))
        everyone = self.shard if self.replicate is None else axis_over(ranks, self.mesh.device_type)
        alone = axis_over((dist.get_rank(),), self.mesh.device_type)
        return replace(self, shard=alone, replicate=None if len(ranks) == 1 else everyone, shards=False)

    @staticmethod
    def of(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> DataMesh:
        if dims is not None:
            return _named_part(mesh, dims)
        mesh = _default_mesh() if mesh is None else mesh
        if not isinstance(mesh, DeviceMesh):
            raise FSDPTypeError(f"fully_shard's mesh is a DeviceMesh, not {mesh!r}: make one with init_device_mesh")
        if mesh.ndim not in (1, 2):
            raise FSDPValueError(
                f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: one of 1 dim shards, one of 2 dims "
                "replicates on its first and shards on its second. If other dims are for tensor or pipeline "
                "parallelism, pass the submesh of the data-parallel dims, as in mesh['dp']"
            )
        replicate = axis_of(mesh, 0) if mesh.ndim == 2 else None
        return DataMesh(mesh, axis_of(mesh, mesh.ndim - 1), replicate, _device_of(mesh))

    @property
    def size(self) -> int:
        """The number of ranks that have different data."""
        return self.shard.size * (1 if self.replicate is None else self.replicate.size)

    @property
    def sums_already(self) -> bool:
        """Whether every rank's gradient of a parameter is already the sum over all ranks' data."""
        return self.whole is not None

    def layout(self, shape: tuple[int, ...], dim: int, within: Layout | None) -> Layout:
        """The layout of a parameter that this mesh shards along `dim`, after the tensor-parallel layout `within`."""
        own: tuple[Placement, ...] = (_REPLICATE,) * self.mesh.ndim
        if self.shards:
            own = (*own[:-1], Shard(dim))
        if self.whole is not None and within is not None:
            within = self._other_dims(within)
        if within is None:
            return Layout.of(self.mesh, own, shape)
        joint = joint_mesh(self.mesh, within.mesh)
        if self.whole is not None and joint.mesh_dim_names == self.whole.mesh_dim_names:
            joint = self.whole
        dims = len(own)
        order = (*(m + dims for m in within.order), *range(dims))
        return Layout.of(joint, (*own, *within.placements), shape, order)

    def _other_dims(self, within: Layout) -> Layout | None:
        """The layout of a parameter of the whole mesh on the dims that are not data-parallel."""
        assert self.whole is not None
        names = self.whole.mesh_dim_names or ()
        kept = [m for m, name in enumerate(names) if name not in self.dims]
        if not kept:
            return None
        part = self.whole[tuple(names[m] for m in kept)]
        order = [kept.index(m) for m in within.order if m in kept]
        return Layout.of(part, [within.placements[m] for m in kept], within.shape, order)


def _device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank of the mesh computes."""
    if mesh.get_coordinate() is None:
        raise FSDPError(
            f"rank {dist.get_rank()} is not in the mesh {mesh}: call fully_shard on the ranks of the mesh only"
        )
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        module = torch.get_device_module(device.type)
        if not hasattr(module, "Stream"):
            raise FSDPError(
                f"fully_shard needs streams, which PyTorch does not have for the device {device.type!r}: use a mesh of "
                "'cpu'"
            )
        device = torch.device(device.type, module.current_device())
    return device


def _named_part(mesh: DeviceMesh | None, dims: DataParallelMeshDims) -> DataMesh:
    """The data-parallel dims of a mesh on which the parameters are DTensors."""
    if mesh is None or mesh.mesh_dim_names is None:
        raise FSDPValueError("dp_mesh_dims names dims of the mesh: pass fully_shard a mesh with named dims, too")
    names = (*dims.replicate_names, *dims.shard_names)
    unknown = [name for name in names if name not in mesh.mesh_dim_names]
    if unknown:
        raise FSDPValueError(
            f"dp_mesh_dims names the dim {unknown[0]!r}, but the dims of fully_shard's mesh are "
            f"{', '.join(map(repr, mesh.mesh_dim_names))}"
        )
    device = _device_of(mesh)
    parts = [_together(mesh, some) for some in (dims.replicate_names, dims.shard_names) if some]
    if not dims.shard_names:
        alone = axis_over((dist.get_rank(),), mesh.device_type)
        return DataMesh(parts[0], alone, axis_of(parts[0], 0), device, mesh, names, shards=False)
    if len(parts) == 1:
        return DataMesh(parts[0], axis_of(parts[0], 0), None, device, mesh, names)
    both = joined(parts)
    return DataMesh(both, axis_of(both, 1), axis_of(both, 0), device, mesh, names)


def _together(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The 1-D mesh of several dims, flattened."""
    return mesh[names[0]] if len(names) == 1 else flattened(mesh[names], "_".join(names))


@dataclass(frozen=True, eq=False)
class InnerMesh:
    """A part of the shard axis, over which parameters stay sharded between forward and backward."""

    axis: Axis
    own: int  # how many dims of a sharded parameter's mesh are the data-parallel ones, which come first
    _meshes: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict)

    @staticmethod
    def of(data: DataMesh, size: int) -> InnerMesh | None:
        """Groups of `size` consecutive ranks of the shard axis; None if `size` is 1 or the axis's size."""
        if not data.shards:
            return None
        n = data.shard.size
        if size < 1 or n % size:
            raise FSDPValueError(
                f"reshard_after_forward={size} must divide the number of ranks that shard, {n}: parameters stay "
                "sharded over that many neighbouring ranks. True frees everything after forward, False nothing"
            )
        if size in (1, n):
            return None
        start = data.shard.index // size * size
        # Only the process group of this rank's part is needed, and only its ranks create it.
        return InnerMesh(axis_over(data.shard.ranks[start : start + size], data.mesh.device_type), data.mesh.ndim)

    def layout(self, whole: Layout, dim: int) -> Layout:
        """The layout on this mesh of a parameter that is sharded along `dim`; `whole` is its layout between steps."""
        mesh = self._meshes.get(whole.mesh)
        if mesh is None:
            rest = whole.mesh.mesh.shape[self.own :]
            with real_values():
                grid = torch.tensor(ranks_of(whole.mesh), device="cpu").view(-1, self.axis.size, *rest)
            mesh = self._meshes[whole.mesh] = without_groups(whole.mesh.device_type, grid)
        placements = (_REPLICATE, Shard(dim), *whole.placements[self.own :])
        # The tensor-parallel placements stay.
        order = (*(m - self.own + 2 for m in whole.order if m >= self.own), 0, 1)
        return Layout.of(mesh, placements, whole.shape, order)


def joint_mesh(data: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh with the dims of both, which must be submeshes of one mesh."""
    root = root_of(data)
    names, inner_names = data.mesh_dim_names, inner.mesh_dim_names
    named = names is not None and inner_names is not None and not set(names) & set(inner_names)
    part = _same_part(data, inner) if named else None
    if part is None or names is None or inner_names is None:
        raise FSDPError(
            f"a parameter is a DTensor on {inner}, and fully_shard got the mesh {data}: to shard it further, both must "
            "be different dims of one mesh with named dims, as in mesh = init_device_mesh('cpu', (2, 2), "
            "mesh_dim_names=('dp', 'tp')); parallelize_module(model, mesh['tp'], ...); fully_shard(model, "
            "mesh=mesh['dp'])"
        )
    known = list(root.mesh_dim_names or ())
    both = (*names, *inner_names)
    # Dims were made by splitting or flattening some of the root mesh's, or come before the data-parallel ones.
    if not set(both) <= set(known) or sorted(both, key=known.index) != list(both):
        return joined([data, part])
    return root[both]


def _same_part(data: DeviceMesh, inner: DeviceMesh) -> DeviceMesh | None:
    """`inner` as a part of the mesh that `data` is a part of; None if it is none.

    It may be that of another mesh: layouts take equal meshes for one, also if they were split off different ones.
    """
    root, names = root_of(data), inner.mesh_dim_names or ()
    if root_of(inner) == root:
        return inner
    if set(names) <= set(root.mesh_dim_names or ()):
        part = root[names]
        return part if part == inner else None
    try:
        joined([data, inner])
    except RuntimeError:  # other ranks, or ranks that both have along their dims
        return None
    return inner


def _is_accelerated(group: Any, device: torch.device) -> bool:
    """Whether the group has a backend for the device. gloo lists devices, but copies their tensors to the CPU."""
    module = getattr(torch, device.type, None)  # None if this PyTorch has no such device type
    if device.type == "cpu" or module is None or not module.is_available():
        return False
    return backend_of(group, device).name() != "gloo"


_default: tuple[Any, DeviceMesh] | None = None


@when_groups_end
def _forget_default() -> None:
    global _default
    if _default is not None and not is_alive(_default[0]()):
        _default = None


def _default_mesh() -> DeviceMesh:
    """The mesh of all ranks, on the accelerator if the process group has a backend for it. Groups share one object."""
    global _default
    initialise()
    group = default_group()
    if _default is None or _default[0]() is not group:
        kind = next((device.type for device in device_types(group) if _is_accelerated(group, device)), "cpu")
        _default = (weakref.ref(group), init_device_mesh(kind, (dist.get_world_size(),)))
    return _default[1]
