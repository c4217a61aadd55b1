"""One object for equal meshes, so that what is kept per mesh is found by identity.

Slicing a mesh, or calling `init_device_mesh` twice, gives equal meshes that are different objects. Tensors on them belong
together. When the default process group is replaced, meshes of the old one have dead groups and are forgotten.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

_known: dict[DeviceMesh, DeviceMesh] = {}
_default_group: Any = None


def canonical_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The first mesh seen that equals `mesh` and whose process groups live."""
    global _default_group
    default = distributed_c10d._get_default_group() if distributed_c10d.is_initialized() else None
    if default is not _default_group:
        _known.clear()
        _default_group = default
    return _known.setdefault(mesh, mesh)
