"""A group: what one `fully_shard` call took, and what the user has set for it. It has no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from terrazzo.fsdp.meshes import DataMesh, InnerMesh
from terrazzo.fsdp.misuse import remark_on_one_rank
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
        self.inner: dict[DataMesh, InnerMesh] = {}  # of the meshes on which something is kept between
        if type(reshard_after_forward) is int:
            found = {mesh: InnerMesh.of(mesh, reshard_after_forward) for mesh in self.meshes}
            self.inner = {mesh: inner for mesh, inner in found.items() if inner is not None}
            if reshard_after_forward == 1:
                remark_on_one_rank()
                self.reshard_after_forward = False
        self.reshard_inner = bool(self.inner)
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
