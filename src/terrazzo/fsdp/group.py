"""A group: what one `fully_shard` call took, and what the user has set for it. It has no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from terrazzo.errors import FSDPValueError
from terrazzo.fsdp.meshes import DataMesh, InnerMesh
from terrazzo.fsdp.parameter import ShardedParameter
from terrazzo.fsdp.settings import Options, Settings

ATTRIBUTE = "_terrazzo_fsdp_group"


class Group:
    """Modules and their parameters."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[ShardedParameter],
        settings: Settings,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.modules = tuple(modules)
        self.params = tuple(params)
        self.settings = settings
        self.options = Options()
        self.name = ""
        self.unit: Any = None  # what runs it
        self.root: Any = None  # what runs all units of the model, once its outermost module is known
        # What the user decides.
        self.auto_reshard = reshard_after_forward is None  # then the root is not resharded
        self.reshard_after_forward = reshard_after_forward is None or bool(reshard_after_forward)
        self.inner: InnerMesh | None = None
        self.reshard_inner = False
        if params and type(reshard_after_forward) is int:
            if any(param.mesh is not settings.mesh for param in params) or settings.mesh.whole is not None:
                raise FSDPValueError(
                    f"reshard_after_forward={reshard_after_forward} is for parameters that are all sharded on the mesh "
                    "given to fully_shard; with dp_mesh_dims, or with meshes of a shard_placement_fn, use True or False"
                )
            self.inner = InnerMesh.of(settings.mesh, reshard_after_forward)
            self.reshard_inner = True
        self.reshard_after_backward = True
        self.gradient_sync = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[Group] | None = None
        self.backward_prefetch: list[Group] | None = None
        for module in modules:
            module.__dict__[ATTRIBUTE] = self

    @property
    def meshes(self) -> list[DataMesh]:
        """Those on which its parameters are sharded."""
        return list(dict.fromkeys([self.settings.mesh, *(param.mesh for param in self.params)]))

    def holders(self) -> list[nn.Module]:
        """Modules that hold parameters of the group."""
        return list(dict.fromkeys(slot.module for param in self.params for slot in param.slots))


def group_of(module: nn.Module) -> Group | None:
    """The group of a module that `fully_shard` was called on."""
    found: Group | None = module.__dict__.get(ATTRIBUTE)
    return found
