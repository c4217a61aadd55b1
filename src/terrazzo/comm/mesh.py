"""One object for equal meshes, so that what is kept per mesh is found by identity.

Slicing a mesh, or calling `init_device_mesh` twice, gives equal meshes that are different objects. Tensors on them
belong together. When a process group is destroyed, meshes have dead groups: they, and what is kept because of them, are
forgotten.
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
from terrazzo.errors import CommError
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
    """Have `forget` called when a process group was destroyed, so that a cache does not keep meshes that are of no
    use. What can be made anew may forget everything: groups are rarely destroyed."""
    _caches.append(forget)
    return forget


@when_destroyed
def _forget_everywhere() -> None:
    for forget in _caches:
        forget()


@when_groups_end
def _forget_meshes() -> None:
    # Only these: a mesh that lives has to stay the one that its tensors are on.
    for mesh, (_, groups) in list(_known.items()):
        if not distributed_c10d.is_initialized() or not all(is_alive(group()) for group in groups):
            _known.pop(mesh, None)


when_groups_end(plan_transition.cache_clear)  # layouts hold meshes


def canonical_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The first mesh seen that equals `mesh` and whose process groups live."""
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
    except (RuntimeError, IndexError):  # it has none: made without, or this rank is outside of it
        return []


def _forget_dead() -> None:
    global _default_group
    default = default_group() if distributed_c10d.is_initialized() else None
    found = None if _default_group is None else _default_group()
    if default is not found:
        _known.clear()
        _default_group = None if default is None else weakref.ref(default)


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
            seen = seen_from(written_by, device_type, ranks, names)
            _without_group[written_by, repr(data)] = seen
        return seen
    with _making:  # threads that read one file make one mesh
        for mesh in list(_known):
            if mesh_as_data(mesh) == (device_type, ranks, names):
                return mesh
        return canonical_mesh(DeviceMesh(device_type, ranks, mesh_dim_names=names))
