"""The axis: the ranks along one mesh dim, or along several taken together, that communicate with each other."""

import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._meant import named
from terrazzo._torch.dispatching import unseen
from terrazzo._torch.groups import backend_of, default_group, device_types, has_groups, is_alive, make_group
from terrazzo._torch.groups import time_limit as time_limit_of
from terrazzo.comm.mesh import when_groups_end
from terrazzo.comm.numbering import next_number
from terrazzo.comm.simulated import real_values
from terrazzo.comm.waits import Waiting
from terrazzo.errors import CommError


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Axis:
    """Ranks that communicate with each other, in an order, seen from one of them.

    A rank's position in `ranks` is also its rank in `group`.
    """

    group: ProcessGroup | None  # None exactly if the axis has one rank
    size: int
    index: int  # the position of this rank
    ranks: tuple[int, ...]  # global ranks in the order of their positions
    name: str
    device_type: str

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, ranks {list(self.ranks)}, here {self.index})"


# Looked up without a lock and created under one, so that threads that ask at the same time get the same object.
_lock = threading.Lock()

# Keyed by mesh object, as equal meshes need not share process groups; weak, so that a dead mesh does not keep its axes.
_axes_by_mesh: dict[int, tuple["weakref.ref[DeviceMesh]", dict[tuple[int, ...], Axis]]] = {}


def axis_of(mesh: DeviceMesh, dims: int | tuple[int, ...]) -> Axis:
    """The axis of this rank along one mesh dim, or along several taken together (the first is outermost).

    Several dims may need a process group that does not exist yet; then all ranks of the axis must call this at the
    same point of the program, as with every collective.
    """
    entry = _axes_by_mesh.get(id(mesh))
    if entry is None or entry[0]() is not mesh:
        with _lock:
            entry = _axes_by_mesh.get(id(mesh))
            if entry is None or entry[0]() is not mesh:
                entry = _axes_by_mesh[id(mesh)] = (weakref.ref(mesh, _forget(id(mesh))), {})
    axes = entry[1]
    key = (dims,) if isinstance(dims, int) else dims
    axis = axes.get(key)
    if axis is None:
        axis = axes.setdefault(key, _build_axis(mesh, key))
    return axis


def _forget(mesh_id: int) -> "Callable[[weakref.ref[DeviceMesh]], None]":
    def forget(reference: "weakref.ref[DeviceMesh]") -> None:
        entry = _axes_by_mesh.get(mesh_id)
        if entry is not None and entry[0] is reference:
            del _axes_by_mesh[mesh_id]

    return forget


# Axes that belong to no mesh, each with the default group at the time when it was made.
_axes_over: dict[tuple[tuple[int, ...], str], tuple["weakref.ref[ProcessGroup]", Axis]] = {}


@when_groups_end
def _forget_axes() -> None:
    for key, (default, axis) in list(_axes_over.items()):
        if not is_alive(default()) or (axis.group is not None and not is_alive(axis.group)):
            _axes_over.pop(key, None)


def axis_over(ranks: tuple[int, ...], device_type: str) -> Axis:
    """The axis of these global ranks, independent of any mesh; the first time, all of them must call this together."""
    default = default_group()
    found = _axes_over.get((ranks, device_type))
    if found is None or found[0]() is not default:
        if dist.get_rank() not in ranks:
            raise CommError(f"rank {dist.get_rank()} asks for an axis of ranks {list(ranks)}, of which it is not one")
        name = f"ranks {','.join(map(str, ranks))}"
        group = _group_of(ranks, device_type, []) if len(ranks) > 1 else None
        made = Axis(group, len(ranks), ranks.index(dist.get_rank()), ranks, name, device_type)
        with _lock:
            found = _axes_over.get((ranks, device_type))
            if found is None or found[0]() is not default:
                found = _axes_over[ranks, device_type] = (weakref.ref(default), made)
    return found[1]


def axis_beside(axis: Axis) -> Axis:
    """An axis of the same ranks with its own process group, so that the collectives of the two axes never mix.

    Axes with different groups get different ones, because threads may use them in an order that ranks do not share. The
    first time, all ranks of the axis must call this together.
    """
    return axis if axis.group is None else replace(axis, group=_own_group(axis.device_type, axis.ranks, axis.group))


def _build_axis(mesh: DeviceMesh, dims: tuple[int, ...]) -> Axis:
    if not dist.is_initialized():
        raise CommError(
            f"cannot communicate on {mesh}: there is no process group. Call torch.distributed.init_process_group, and "
            "load again any DTensors that were loaded before it"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise CommError(f"rank {dist.get_rank()} is not part of the mesh {mesh}, so it cannot communicate on it")
    if not dims or len(set(dims)) != len(dims) or not all(0 <= dim < mesh.ndim for dim in dims):
        raise CommError(f"{dims} are not distinct dims of the {mesh.ndim}-dim mesh {mesh}")
    with real_values():
        line = mesh.mesh[tuple(slice(None) if dim in dims else coordinate[dim] for dim in range(mesh.ndim))]
        kept = sorted(dims)
        ranks = tuple(line.permute([kept.index(dim) for dim in dims]).reshape(-1).tolist())
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    candidates = [mesh.get_group(dim) for dim in dims if mesh.size(dim) == len(ranks)] if has_groups(mesh) else []
    return Axis(
        group=_group_of(ranks, mesh.device_type, candidates) if len(ranks) > 1 else None,
        size=len(ranks),
        index=ranks.index(dist.get_rank()),
        ranks=ranks,
        name="+".join(names[dim] for dim in dims),
        device_type=mesh.device_type,
    )


def _group_of(ranks: tuple[int, ...], device_type: str, candidates: list[ProcessGroup]) -> ProcessGroup:
    """A group of exactly `ranks` in this order: one of the candidates, the default group, or a new one."""
    default = default_group()
    if any(device.type == device_type for device in device_types(default)):
        candidates = [*candidates, default]
    for group in candidates:
        if tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    return _own_group(device_type, ranks)


# The groups made below, while they are in use; a lock per group being made.
_Key = tuple[str, tuple[int, ...], str]
_groups: weakref.WeakValueDictionary[_Key, ProcessGroup] = weakref.WeakValueDictionary()
_making: weakref.WeakValueDictionary[_Key, "_Making"] = weakref.WeakValueDictionary()


class _Making:
    """One lock per group: creating a group waits for its other ranks, which may be busy creating another group."""

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()


def _own_group(device_type: str, ranks: tuple[int, ...], beside: ProcessGroup | None = None) -> ProcessGroup:
    """A group of these ranks in this order, created once: meshes that share a line of ranks share the group, unless it
    is to be used `beside` one that they do not share."""
    source = "" if beside is None else f"_beside_{beside.group_name}"  # ranks know their groups by the same names
    key = (device_type, ranks, source)
    with _lock:
        making = _making.get(key)
        if making is None:
            making = _making[key] = _Making()
    with making.lock:
        group = _groups.get(key)
        if group is not None and is_alive(group):
            return group
        # dist.new_group either must be called by every rank of the world, or names the group by the number of groups
        # that this process is in. An axis is made by its own ranks only, and after groups of some ranks that number
        # differs between them: they would wait for each other under different names. So the name is made from what all
        # of them know. It includes a number because a store remembers the names of old groups.
        name = f"terrazzo_{device_type}_{'_'.join(map(str, ranks))}{source}"
        name = f"{name}_{next_number(name)}"
        default = default_group()
        limit = time_limit_of(default, device_types(default)[0])
        with Waiting("making a group", ranks, f"of {named(ranks)}"):
            _meet(ranks, name)
            group = _groups[key] = make_group(ranks, dist.get_rank(), name, limit, "terrazzo_axis")
        return group


_MEETING = 3 << 29  # the first tag of these messages; `sections.FIRST_TAG` and those after it are lower


def _meet(ranks: tuple[int, ...], name: str) -> None:
    """Exchange a message with each of these ranks in the default group, whose connections exist, before a group of them
    is made.

    A rank that has ended is noticed when the others are here, and named. The making of a group waits for it in the
    store until the time limit, and the error names no rank.
    """
    default, cpu, here = default_group(), torch.device("cpu"), dist.get_rank()
    if cpu not in device_types(default) or backend_of(default, cpu).name() != "gloo":
        return  # connections of others are made by the first collective
    tag = _MEETING + zlib.crc32(name.encode()) % (1 << 28)  # threads make groups at the same time
    works = []
    failed: list[CommError] = []  # raised at the end: a rank that comes later waits for the message of this one, too
    with unseen():  # the program has no such messages
        sent = torch.zeros(1, dtype=torch.uint8, device=cpu)
        received = {rank: torch.zeros_like(sent) for rank in ranks if rank != here}
        for rank, into in received.items():
            with _naming(rank, ranks, failed):
                works.append((rank, default.send([sent], rank, tag)))
                works.append((rank, default.recv([into], rank, tag)))
    for rank, work in works:
        with _naming(rank, ranks, failed):
            work.wait()
    if failed:
        raise failed[0]


@contextmanager
def _naming(rank: int, ranks: tuple[int, ...], failed: list[CommError]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        found = CommError(
            f"rank {dist.get_rank()}: rank {rank} has ended, or did not come within the time limit, so a process group "
            f"of the ranks {list(ranks)} cannot be made. Look for the first error among the ranks. Here: {error}"
        )
        found.__cause__ = error
        failed.append(found)


def time_limit(axis: Axis) -> timedelta:
    """The time limit of the axis's collectives."""
    return time_limit_of(axis.group, torch.device(axis.device_type))
