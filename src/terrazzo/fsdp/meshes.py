"""The meshes that a group shards on: which ranks cut, which replicate, and how tensor-parallel meshes join in."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terrazzo._torch.groups import backend_of, default_group, device_types, is_alive, joined, root_of, without_groups
from terrazzo.comm.axis import Axis, axis_of, axis_over
from terrazzo.comm.mesh import when_groups_end
from terrazzo.errors import FSDPError, FSDPValueError
from terrazzo.layout import Layout, Placement, Replicate, Shard

_REPLICATE = Replicate()


@dataclass(frozen=True, eq=False)
class DataMesh:
    """The mesh of a `fully_shard` call: 1-D shards, 2-D replicates on its first dim and shards on its second."""

    mesh: DeviceMesh
    shard: Axis
    replicate: Axis | None
    device: torch.device

    @staticmethod
    def of(mesh: DeviceMesh | None) -> DataMesh:
        mesh = _default_mesh() if mesh is None else mesh
        if mesh.ndim not in (1, 2):
            raise FSDPValueError(
                f"fully_shard takes a 1-D mesh, which shards, or a 2-D mesh, which replicates on its first dim and "
                f"shards on its second; this one has {mesh.ndim} dims: {mesh}. For other parallelisms pass the "
                "submesh of the data-parallel dims, as in mesh['dp']"
            )
        if mesh.get_coordinate() is None:
            raise FSDPError(f"rank {dist.get_rank()} is not part of the mesh {mesh} that fully_shard was given")
        device = torch.device(mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.get_device_module(device.type).current_device())
        replicate = axis_of(mesh, 0) if mesh.ndim == 2 else None
        return DataMesh(mesh, axis_of(mesh, mesh.ndim - 1), replicate, device)

    @property
    def size(self) -> int:
        """How many ranks work on different data."""
        return self.shard.size * (1 if self.replicate is None else self.replicate.size)

    def layout(self, shape: tuple[int, ...], dim: int, within: Layout | None) -> Layout:
        """Of a parameter that this mesh cuts along `dim`, after the tensor-parallel layout `within` has cut it."""
        own: tuple[Placement, ...] = (Shard(dim),) if self.replicate is None else (_REPLICATE, Shard(dim))
        if within is None:
            return Layout.of(self.mesh, own, shape)
        joint = joint_mesh(self.mesh, within.mesh)
        dims = len(own)
        order = (*(m + dims for m in within.order), *range(dims))
        return Layout.of(joint, (*own, *within.placements), shape, order)


@dataclass(frozen=True, eq=False)
class InnerMesh:
    """Part of the shard axis, on which parameters stay sharded between forward and backward."""

    mesh: DeviceMesh
    axis: Axis

    @staticmethod
    def of(data: DataMesh, size: int) -> InnerMesh:
        """Consecutive ranks of the shard axis, `size` at a time."""
        n = data.shard.size
        if not 1 < size < n or n % size:
            raise FSDPError(
                f"reshard_after_forward={size} has to divide the {n} ranks that shard, and be neither 1 nor {n}; "
                "use False or True for those"
            )
        start = data.shard.index // size * size
        ranks = data.shard.ranks[start : start + size]
        grid = torch.tensor(data.shard.ranks).view(-1, size)
        # Its own process group is all that is needed of it, and only these ranks make that.
        mesh = without_groups(data.mesh.device_type, grid)
        return InnerMesh(mesh, axis_over(ranks, data.mesh.device_type))

    def layout(self, shape: tuple[int, ...], dim: int) -> Layout:
        return Layout.of(self.mesh, (_REPLICATE, Shard(dim)), shape)


def joint_mesh(data: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh of the dims of both, which have to be parts of one mesh."""
    root = root_of(data)
    names, inner_names = data.mesh_dim_names, inner.mesh_dim_names
    part = _same_part(root, inner)
    if part is None or names is None or inner_names is None or set(names) & set(inner_names):
        raise FSDPError(
            f"a parameter is a DTensor on {inner}, and fully_shard was given {data}: to shard it further, both have "
            "to be different dims of one mesh with named dims, as in mesh = init_device_mesh('cpu', (2, 2), "
            "mesh_dim_names=('dp', 'tp')); parallelize_module(model, mesh['tp'], ...); fully_shard(model, "
            "mesh=mesh['dp'])"
        )
    if not set(names) <= set(root.mesh_dim_names or ()):  # dims made of one of the root's, by splitting it
        return joined([data, part])
    return root[(*names, *inner_names)]


def _same_part(root: DeviceMesh, inner: DeviceMesh) -> DeviceMesh | None:
    """The part of `root` that `inner` is; it may come from another mesh of the same ranks and names."""
    if root_of(inner) == root:
        return inner
    names = inner.mesh_dim_names
    if names is None or not set(names) <= set(root.mesh_dim_names or ()):
        return None
    part = root[names]
    return part if part == inner else None


def _is_accelerated(group: Any, device: torch.device) -> bool:
    """Whether the group has a backend of the device's own; gloo claims devices that it serves through the CPU."""
    module = getattr(torch, device.type, None)  # a backend may name devices that this PyTorch does not know
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
    """All ranks, on the accelerator if there is one and its backend is there. One object, so that groups share it."""
    global _default
    if not dist.is_initialized():
        raise FSDPError(
            "fully_shard needs a mesh or an initialised process group: call torch.distributed.init_process_group"
        )
    group = default_group()
    if _default is None or _default[0]() is not group:
        kind = next((device.type for device in device_types(group) if _is_accelerated(group, device)), "cpu")
        _default = (weakref.ref(group), init_device_mesh(kind, (dist.get_world_size(),)))
    return _default[1]
