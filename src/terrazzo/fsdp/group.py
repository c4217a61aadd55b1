"""A group: the modules and parameters of one `fully_shard` call, and their settings. It does not change in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from terrazzo.comm.numbering import next_number
from terrazzo.fsdp.meshes import DataMesh, InnerMesh
from terrazzo.fsdp.misuse import remark_on_one_rank
from terrazzo.fsdp.parameter import ShardedParameter
from terrazzo.fsdp.plan.units import Switches
from terrazzo.fsdp.settings import Options, Settings

ATTRIBUTE = "_terrazzo_fsdp_group"

# The most bytes of parameters of consecutive small groups that share messages, unless users set another limit.
COALESCE_BYTES = 4 << 20

_USUAL = Switches()

# Equal switches are one object: programs turn the same ones for every micro-batch.
with_switches = lru_cache(maxsize=256)(replace)


class Place(NamedTuple):
    """Where a group is in a model."""

    root: Any = None  # the `Root`, once the outermost module is known
    position: int = 0  # the group's number there
    name: str = ""  # that of its first module


class Group:
    """The modules and parameters of one `fully_shard` call."""

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
        self.place = Place()
        self.number = 0  # among the groups of one process group, which its ranks make in the same order
        shared = settings.mesh.shard.group
        if shared is not None:
            self.number = next_number("fully_shard", shared)
        self.unit: Any = None  # the `Unit` that gathers and reduces it
        self.inner: dict[DataMesh, InnerMesh] = {}  # smaller meshes of `reshard_after_forward=N`
        if type(reshard_after_forward) is int:
            found = {mesh: InnerMesh.of(mesh, reshard_after_forward) for mesh in self.meshes}
            self.inner = {mesh: inner for mesh, inner in found.items() if inner is not None}
            if reshard_after_forward == 1:
                remark_on_one_rank()
                reshard_after_forward = False
        automatic = reshard_after_forward is None
        self.switches = with_switches(
            _USUAL, reshard_after_forward=automatic or bool(reshard_after_forward), reshard_inner=bool(self.inner)
        )
        # gloo takes the processor's time for a reduction, so on CPU the next backward had better not wait for it.
        on_cpu = settings.mesh.device.type == "cpu"
        self.options = Options(2 if on_cpu else 1, COALESCE_BYTES, auto_reshard=automatic)

    @property
    def root(self) -> Any:
        return self.place.root

    def __repr__(self) -> str:
        return f"<group {self.name}>"

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def meshes(self) -> list[DataMesh]:
        """The meshes on which its parameters are sharded."""
        return list(dict.fromkeys([self.settings.mesh, *(param.mesh for param in self.params)]))


def group_of(module: nn.Module) -> Group | None:
    """The group of a module that `fully_shard` was called on."""
    found: Group | None = module.__dict__.get(ATTRIBUTE)
    return found
