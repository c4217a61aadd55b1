"""One object for equal meshes, so that caches per mesh can look it up by identity.

Slicing a mesh, or calling `init_device_mesh` twice, gives equal meshes that are different objects; tensors on them may
be combined. Destroying a process group leaves meshes with dead groups: these meshes, and what is cached for them, are
dropped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.groups import default_group, is_alive, seen_from, when_destroyed
from terrazzo.comm.simulated import real_values
from terrazzo.errors import CommError, DTensorTypeError
from terrazzo.layout.transition import plan_transition

MeshAsData: TypeAlias = tuple[str, Any, tuple[str, ...] | None]
"""A mesh as plain data: device type, nested lists of ranks, names of the dims."""

_Groups: TypeAlias = list["weakref.ref[ProcessGroup]"]
_known: dict[DeviceMesh, tuple[DeviceMesh, _Groups]] = {}
_without_group: dict[tuple[int | None, str], DeviceMesh] = {}
_default_group: Any = None
_making = threading.Lock()
_caches: list[Callable[[], None]] = []


def when_groups_end(forget: Callable[[], None]) -> Callable[[], None]:
    """Register `forget` to be called after a process group was destroyed, so that a cache drops its dead meshes.

    A cache whose entries can be made again may drop all of them: groups are rarely destroyed.
    """
    _caches.append(forget)
    return forget


@when_destroyed
def _forget_everywhere() -> None:
    for forget in _caches:
        forget()


@when_groups_end
def _forget_meshes() -> None:
    # Only meshes with dead groups: tensors on a live mesh must keep finding the same object.
    for mesh, (_, groups) in list(_known.items()):
        if not distributed_c10d.is_initialized() or not all(is_alive(group()) for group in groups):
            _known.pop(mesh, None)


when_groups_end(plan_transition.cache_clear)  # layouts hold meshes


def canonical_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The first known mesh that equals `mesh` and whose process groups are alive."""
    if not isinstance(mesh, DeviceMesh):
        raise DTensorTypeError(f"a mesh is a DeviceMesh, not {mesh!r}: make one with init_device_mesh")
    _forget_dead()
    if any(mesh is seen for seen in _without_group.values()):
        return mesh
    found = _known.get(mesh)
    if found is None:
        found = _known.setdefault(mesh, (mesh, _groups_of(mesh)))
    return found[0]


def _groups_of(mesh: DeviceMesh) -> _Groups:
    try:
        return [weakref.ref(group) for group in mesh.get_all_groups()]
    except (RuntimeError, IndexError):  # no groups: made without them, or this rank is outside the mesh
        return []


def _forget_dead() -> None:
    global _default_group
    default = default_group() if distributed_c10d.is_initialized() else None
    found = None if _default_group is None else _default_group()
    if default is not found:
        _known.clear()
        _default_group = None if default is None else weakref.ref(default)


def mesh_as_data(mesh: DeviceMesh) -> MeshAsData:
    """What identifies `mesh` in any process. A pickled mesh would not do: its hash is salted per process."""
    with real_values():
        return mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The global ranks of a mesh, in row-major order."""
    with real_values():
        ranks: list[int] = mesh.mesh.flatten().tolist()
        return ranks


def mesh_from_data(data: MeshAsData, written_by: int | None = None) -> DeviceMesh:
    """The known mesh that `data` describes, or a new one, which all its ranks then make together.

    Without a process group the mesh only describes which rank holds what, as seen from the rank `written_by`; nothing
    can be sent on it.
    """
    initialized = distributed_c10d.is_initialized()
    if not initialized and written_by is None:
        raise CommError("a device mesh needs a process group: call torch.distributed.init_process_group first")
    _forget_dead()
    device_type, ranks, names = data
    if not initialized:
        # Seen from another rank, an equal mesh has another coordinate, so the rank is a part of the key.
        seen = _without_group.get((written_by, repr(data)))
        if seen is None:
            seen = seen_from(written_by, device_type, ranks, names)
            _without_group[written_by, repr(data)] = seen
        return seen
    with _making:  # threads that load the same file get the same mesh
        for mesh in list(_known):
            if mesh_as_data(mesh) == (device_type, ranks, names):
                return mesh
        return canonical_mesh(DeviceMesh(device_type, ranks, mesh_dim_names=names))
