"""One object for equal meshes, so that what is kept per mesh is found by identity.

Slicing a mesh, or calling `init_device_mesh` twice, gives equal meshes that are different objects. Tensors on them
belong together. When the default process group is replaced, meshes of the old one have dead groups and are forgotten.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.comm.simulated import real_values
from terrazzo.errors import CommError

MeshAsData: TypeAlias = tuple[str, Any, tuple[str, ...] | None]
"""A mesh as plain data: device type, nested lists of ranks, names of the dims."""

_known: dict[DeviceMesh, DeviceMesh] = {}
_without_group: dict[tuple[int | None, str], DeviceMesh] = {}
_default_group: Any = None


def canonical_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The first mesh seen that equals `mesh` and whose process groups live."""
    _forget_dead()
    if any(mesh is seen for seen in _without_group.values()):
        return mesh
    return _known.setdefault(mesh, mesh)


def _forget_dead() -> None:
    global _default_group
    default = distributed_c10d._get_default_group() if distributed_c10d.is_initialized() else None
    if default is not _default_group:
        _known.clear()
        _default_group = default


def mesh_as_data(mesh: DeviceMesh) -> MeshAsData:
    """What identifies `mesh` in any process; a pickled mesh would not equal a live one, for its hash is salted."""
    with real_values():
        return mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The global ranks of a mesh, in row-major order."""
    with real_values():
        ranks: list[int] = mesh.mesh.flatten().tolist()
        return ranks


def mesh_from_data(data: MeshAsData, written_by: int | None = None) -> DeviceMesh:
    """The mesh known here that `data` describes, or a new one, which all its ranks make together.

    Without a process group the mesh only says who held what, seen from the rank `written_by`; nothing can be sent on
    it.
    """
    initialized = distributed_c10d.is_initialized()
    if not initialized and written_by is None:
        raise CommError("a device mesh needs a process group: call torch.distributed.init_process_group first")
    _forget_dead()
    device_type, ranks, names = data
    if not initialized:
        # Seen from another rank, an equal mesh has another coordinate.
        seen = _without_group.get((written_by, repr(data)))
        if seen is None:
            seen = DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=written_by)
            _without_group[written_by, repr(data)] = seen
        return seen
    for mesh in _known:
        if mesh_as_data(mesh) == (device_type, ranks, names):
            return mesh
    return canonical_mesh(DeviceMesh(device_type, ranks, mesh_dim_names=names))
