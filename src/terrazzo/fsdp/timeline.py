"""A step of `fully_shard` as data for viewers: operations with their times, groups, bytes and memory.

In a step that ran (`trace`), times are seconds on this rank's host. In a planned step (`timeline`), whose ranks need
not exist, they are the numbers of the operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch.distributed as dist
from torch import nn

from terrazzo.comm.axis import Axis
from terrazzo.fsdp.lookup import sharded
from terrazzo.fsdp.plan.check import sizes_of
from terrazzo.fsdp.plan.operations import Buffer, Kind, Operation
from terrazzo.fsdp.plan.step import plan_steps
from terrazzo.fsdp.plan.units import Spec
from terrazzo.fsdp.report import report
from terrazzo.fsdp.run.root import Root


class Done(msgspec.Struct, frozen=True):
    """One operation of the plan, with its times.

    Attributes:
        kind: the operation, as `explain` names it.
        groups: the indices of its groups.
        stream: the stream on which it runs.
        bytes: the bytes that a rank sends, on average.
        begin: when the host started it.
        end: when the host continued.
        backward: whether backward was running.
        memory: bytes of unsharded parameters and gradients and of buffers during the operation.
        after: the same bytes after it.
        inner: whether it communicates on the smaller mesh of `reshard_after_forward=N`.
    """

    kind: str
    groups: tuple[int, ...]
    stream: str
    bytes: int
    begin: float
    end: float
    backward: bool
    memory: int
    after: int
    inner: bool = False


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


class Timeline(msgspec.Struct, frozen=True):
    """The operations of one rank in a step.

    Attributes:
        rank: the rank.
        world: the number of ranks.
        began: seconds since 1970 at time 0; 0 if the step is planned.
        planned: whether times are numbers of operations.
        groups: the names of the groups.
        shards: for each group the mesh dims over which it is sharded.
        replicas: for each group the mesh dims along which it is replicated, or "".
        held: bytes of shards and their gradients.
        bound: the peak of `report`, in bytes.
        further: bytes on CPU beyond `bound` for small groups that are gathered ahead or still in reduction.
        operations: the operations, in the order in which the host started them.
        collectives: collectives of the program itself, in the order in which the host started them; none in a plan.
    """

    rank: int
    world: int
    began: float
    planned: bool
    groups: list[str]
    shards: list[str]
    replicas: list[str]
    held: int
    bound: int
    further: int = 0
    operations: list[Done] = []
    collectives: list[Collective] = []


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
        shards=[_distinct(mesh.shard for mesh in each) for each in meshes],
        replicas=[_distinct(mesh.replicate for mesh in each) for each in meshes],
        held=said.held,
        bound=said.peak,
        further=0 if spec.streams else 2 * spec.overlapped,
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
    plan = plan_steps(root.spec())
    backward, times = False, []
    for number, each in enumerate(plan.operations):
        backward = (backward or _is_backward(each)) and each.kind is not Kind.WRITE
        times.append((float(number), float(number + 1), backward))
    return msgspec.structs.replace(frame_of(root), operations=done(plan.operations, times, plan.spec))


def _is_backward(operation: Operation) -> bool:
    """Whether the operation occurs only in backward."""
    return operation.kind is Kind.PACK or any(buffer.kind == "gradients" for buffer in operation.takes)


def groups_of(operation: Operation, spec: Spec) -> tuple[int, ...]:
    """The numbers of the groups that an operation is about; none if it is about all."""
    return () if operation.unit < 0 else spec.units[operation.unit].groups or (operation.unit,)


def done(operations: Iterable[Operation], times: Sequence[tuple[float, float, bool]], spec: Spec) -> list[Done]:
    """Operations with their times (begin, end, whether in backward), and the memory in use."""
    sizes = sizes_of(spec)
    live: set[Buffer] = set()
    held, found = 0, []
    for each, (begin, end, backward) in zip(operations, times, strict=True):
        taken = set(each.takes) - live
        live |= taken
        held += sum(sizes.get(buffer, 0) for buffer in taken)
        most = held
        given = live.intersection(each.gives)
        live -= given
        held -= sum(sizes.get(buffer, 0) for buffer in given)
        inner = each.kind is Kind.GATHER and any(buffer.kind == "kept" for buffer in each.reads)
        found.append(
            Done(
                kind=each.kind.value,
                groups=groups_of(each, spec),
                stream=each.stream.value,
                bytes=each.moves,
                begin=begin,
                end=end,
                backward=backward,
                memory=most,
                after=held,
                inner=inner,
            )
        )
    return found
