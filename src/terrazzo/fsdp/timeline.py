"""A step of `fully_shard` as data for viewers: the operations of `explain` or `trace`, and what a viewer needs besides.

In a step that ran (`trace`), times are seconds on this rank's host. In a planned step (`timeline`), whose ranks need
not exist, they are the numbers of the operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import torch.distributed as dist
from torch import nn

from terrazzo.comm.axis import Axis
from terrazzo.fsdp.explain import explain, sharded
from terrazzo.fsdp.plan.memory import Memory
from terrazzo.fsdp.plan.operations import Kind, Operation
from terrazzo.fsdp.report import report
from terrazzo.fsdp.run.root import Root
from terrazzo.layout.drawing import Shown


class Collective(msgspec.Struct, frozen=True):
    """A collective of the program itself, not of `fully_shard`: a redistribution of a DTensor, for instance.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, exchange, broadcast or scatter.
        axis: the mesh dims along which the ranks communicate.
        nbytes: the bytes that a rank sends, on average.
        begin: when the host started it.
        end: when the host had waited for its result.
        backward: whether backward was running.
        async_op: whether the host did other work between `begin` and `end`.
    """

    kind: str
    axis: str
    nbytes: int
    begin: float
    end: float
    backward: bool
    async_op: bool = False


class Timeline(Shown, msgspec.Struct, frozen=True):
    """The operations of one rank in a step.

    Attributes:
        rank: the rank.
        world: the number of ranks.
        began: seconds since 1970 at time 0; 0 if the step is planned.
        planned: whether times are numbers of operations.
        groups: the names of the groups.
        units: by the number of a unit, which operations have, the numbers of its groups.
        shards: for each group the mesh dims over which it is sharded.
        replicas: for each group the mesh dims along which it is replicated, or "".
        held: bytes of shards and their gradients.
        bound: the peak of `report`, in bytes.
        operations: the operations, in the order in which the host started them.
        collectives: collectives of the program itself, in the order in which the host started them; none in a plan.
    """

    rank: int
    world: int
    began: float
    planned: bool
    groups: list[str]
    units: list[tuple[int, ...]]
    shards: list[str]
    replicas: list[str]
    held: int
    bound: int
    operations: list[Operation] = []
    collectives: list[Collective] = []

    def __str__(self) -> str:
        what = f"{len(self.operations)} operations of {len(self.groups)} groups, {len(self.collectives)} collectives"
        return f"Timeline of rank {self.rank} of {self.world}{', planned' if self.planned else ''}: {what}"

    def groups_of(self, operation: Operation) -> tuple[int, ...]:
        """The numbers of the groups that an operation is about; none if it is about all."""
        return () if operation.unit < 0 else self.units[operation.unit]

    def names_of(self, operation: Operation) -> str:
        """The names of these groups."""
        return ", ".join([self.groups[group] for group in self.groups_of(operation)])


def frame_of(root: Root) -> Timeline:
    """The timeline of a model without operations."""
    # A group's parameters may be on several meshes.
    units = [group.unit for group in root.groups]
    meshes = [[unit.settings.mesh, *(bucket.settings.mesh for bucket in unit.buckets)] for unit in units]
    said = report(root.groups[0].modules[0])
    spec = root.spec()
    initialized = dist.is_initialized()
    return Timeline(
        rank=dist.get_rank() if initialized else 0,
        world=dist.get_world_size() if initialized else 1,
        began=0.0,
        planned=True,
        groups=[group.name for group in root.groups],
        units=[unit.groups or (number,) for number, unit in enumerate(spec.units)],
        shards=[_distinct(mesh.shard for mesh in each) for each in meshes],
        replicas=[_distinct(mesh.replicate for mesh in each) for each in meshes],
        held=said.held,
        bound=said.peak,
    )


def _distinct(axes: Iterable[Axis | None]) -> str:
    """The names of axes, each once."""
    return ", ".join(dict.fromkeys(axis.name for axis in axes if axis is not None))


def timeline(model: nn.Module) -> Timeline:
    """The planned next step, as data for the viewer.

    Args:
        model: The root module.
    """
    _, root = sharded(model, "timeline")
    plan = explain(model)
    backward, memory, found = False, Memory(plan.spec), []
    for number, each in enumerate(plan.operations):
        # Only backward packs gradients, or makes them.
        begins = each.kind is Kind.PACK or any(buffer.kind == "gradients" for buffer in each.takes)
        backward = (backward or begins) and each.kind is not Kind.WRITE
        found.append(memory.during(replace(each, begin=float(number), end=float(number + 1), backward=backward)))
    return msgspec.structs.replace(frame_of(root), operations=found)
