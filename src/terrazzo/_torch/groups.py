"""Process groups and device meshes."""

from __future__ import annotations

import ctypes
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Backend, ProcessGroup, ReduceOp, Store, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.declared import attribute, private, replace

if TYPE_CHECKING:
    from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
    from torch._C._distributed_c10d import AllreduceOptions as AllreduceOptions
    from torch._C._distributed_c10d import AllToAllOptions as AllToAllOptions
    from torch._C._distributed_c10d import BroadcastOptions as BroadcastOptions
    from torch._C._distributed_c10d import GatherOptions as GatherOptions
    from torch._C._distributed_c10d import ReduceScatterOptions as ReduceScatterOptions
    from torch._C._distributed_c10d import ScatterOptions as ScatterOptions
else:
    _OPTIONS = "process groups are called directly, because the usual way takes as long as a small collective"
    AllgatherOptions = private("torch._C._distributed_c10d.AllgatherOptions", _OPTIONS)
    AllreduceOptions = private("torch._C._distributed_c10d.AllreduceOptions", _OPTIONS)
    AllToAllOptions = private("torch._C._distributed_c10d.AllToAllOptions", _OPTIONS)
    BroadcastOptions = private("torch._C._distributed_c10d.BroadcastOptions", _OPTIONS)
    GatherOptions = private("torch._C._distributed_c10d.GatherOptions", _OPTIONS)
    ReduceScatterOptions = private("torch._C._distributed_c10d.ReduceScatterOptions", _OPTIONS)
    ScatterOptions = private("torch._C._distributed_c10d.ScatterOptions", _OPTIONS)

attribute("torch.distributed.ProcessGroup._allgather_base", "all-gathers of every kind")
attribute("torch.distributed.ProcessGroup._reduce_scatter_base", "reduce-scatters where the backend has one")


def all_gather_flat(group: Any, out: torch.Tensor, part: torch.Tensor, options: Any) -> Any:
    """Start an all-gather of equally long parts."""
    return group._allgather_base(out, part, options)  # called on the group, which may be written in Python


def reduce_scatter_flat(group: Any, out: torch.Tensor, buffer: torch.Tensor, options: Any) -> Any:
    """Start a reduce-scatter of equally long parts."""
    return group._reduce_scatter_base(out, buffer, options)


premultiplied_sum: Callable[[float], ReduceOp] = private(
    "torch._C._distributed_c10d._make_nccl_premul_sum", "NCCL divides gradients by any factor as it adds them"
)

default_group: Callable[[], ProcessGroup] = private(
    "torch.distributed.distributed_c10d._get_default_group", "axes, meshes and caches belong to a default group"
)

default_store: Callable[[], Store] = private(
    "torch.distributed.distributed_c10d._get_default_store", "groups of an axis; ranks that differ are named"
)

group_called: Callable[[Any], ProcessGroup] = private(
    "torch._C._distributed_c10d._resolve_process_group", "debug modes count collectives that name their group"
)

_new_group: Any = private(
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "axes of several mesh dims get a group that only their own ranks make",
)

_SPLIT_SOURCE = "torch.distributed.distributed_c10d._get_split_source"
_split_source: Callable[[ProcessGroup], Any] = private(
    _SPLIT_SOURCE,
    "where the default group is bound to a device, torch makes a new group by a split, which waits for all its ranks; "
    "the ranks of an axis alone make theirs",
    patched=True,
)
_alone = threading.local()


@functools.wraps(_split_source)
def split_source(group: ProcessGroup) -> Any:
    """The backend that a new group is a split of; None if the group is made by its own ranks only."""
    return None if getattr(_alone, "makes", False) else _split_source(group)


replace(_SPLIT_SOURCE, split_source)

attribute("torch.distributed.distributed_c10d._world.pg_map", "destroyed groups must be recognised")
attribute("torch.distributed.distributed_c10d._world.pg_group_ranks", "groups of an axis are known to torch as groups")
attribute(
    "torch.distributed.distributed_c10d._world.pg_backend_config", "a group of an axis has the default's backends"
)

attribute("torch.distributed.ProcessGroup._device_types", "the devices that a group communicates for")
attribute("torch.distributed.ProcessGroup._get_backend", "a group's time limit, and whether it serves an accelerator")
attribute(
    "torch._C._distributed_c10d.Backend.Options._timeout", "collectives and control messages keep a group's time limit"
)


def device_types(group: ProcessGroup) -> list[torch.device]:
    """The devices whose tensors a group accepts."""
    return group._device_types


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """The backend for a device in a group."""
    return group._get_backend(device)


attribute(
    "torch._C._distributed_c10d.Backend.supports_tensor_alloc", "what fully_shard communicates may lie in its memory"
)


def allocates(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the group's backend can allocate memory from which it sends without copies."""
    found: bool = group._get_backend(device).supports_tensor_alloc(device)
    return found


def empty_from(group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor in memory of the group's backend."""
    tensor: torch.Tensor = group._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)
    return tensor


def time_limit(group: ProcessGroup | None, device: torch.device) -> timedelta:
    """The time limit of a group's collectives; torch's default without a group, or with a backend that has no options,
    as those of other makers."""
    options = None
    if group is not None:
        with suppress(AttributeError, RuntimeError):
            options = group._get_backend(device).options
    limit: timedelta = distributed_c10d.default_pg_timeout if options is None else options._timeout
    return limit


def is_alive(group: ProcessGroup | None) -> bool:
    """Whether the group has not been destroyed."""
    return group is not None and group in distributed_c10d._world.pg_map


attribute("torch.distributed.distributed_c10d._world", "ranks that are threads have process groups of their own")
attribute("torch.distributed.distributed_c10d._world.pg_names", "a group of ranks that are threads has a name")
_by_thread: Callable[[bool], None] = private(
    "torch._C._distributed_c10d._set_thread_isolation_mode", "groups of ranks that are threads may have equal names"
)
attribute("torch.distributed.Backend._plugins", "the backend of ranks that are threads has the name of one of torch's")
_PER_PROCESS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")


class OwnGroups:
    """The process groups of a rank that is a thread: in its `with` block they are those of this process."""

    def __init__(self) -> None:
        self._world: Any = SimpleNamespace(default_pg=None, group_count=0, comms=[], pg_coalesce_state={})
        for name in _PER_PROCESS:
            setattr(self._world, name, {})

    def __enter__(self) -> None:
        self._before = distributed_c10d._world
        distributed_c10d._world = self._world

    def __exit__(self, *_: object) -> None:
        distributed_c10d._world = self._before


@contextmanager
def groups_by_thread(backend: str, make: Callable[..., ProcessGroup]) -> Iterator[None]:
    """A block in which each thread knows its own groups only, and `make` makes groups of this backend."""
    plugins = Backend._plugins
    before = plugins.get(backend.upper())
    Backend.register_backend(backend, make, devices=["cpu", "cuda", "xpu"])
    _by_thread(True)
    try:
        yield
    finally:
        _by_thread(False)
        if before is not None:
            plugins[backend.upper()] = before


def group_name(group: ProcessGroup) -> str:
    """The name of a group."""
    return distributed_c10d._world.pg_names[group]


def autograd_in_this_thread() -> AbstractContextManager[None]:
    """A block in which backward runs in the thread that called it, on any device."""
    return torch.autograd.set_multithreading_enabled(False)


def raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an error in another thread, at its next line."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))


def make_group(ranks: Sequence[int], rank: int, name: str, timeout: timedelta, description: str) -> ProcessGroup:
    """Create a group of these ranks, in this order, called by these ranks only; `name` must be new to the store."""
    default, world = default_group(), distributed_c10d._world  # looked up each time: tests of torch replace the world
    store: Any = default_store()
    if threading.current_thread() is not threading.main_thread():
        # A store has one connection, on which a thread waits for the other ranks while theirs may wait for this thread.
        store = store.clone()
    _alone.makes = True
    try:
        group, _ = _new_group(
            len(ranks),
            ranks.index(rank),
            list(ranks),
            world.pg_backend_config[default],
            store,
            distributed_c10d.GroupName(name),
            timeout=timeout,
            group_desc=description,
        )
    finally:
        _alone.makes = False
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def group_of_jobs(store: Store, rank: int, size: int, backends: str, name: str, timeout: timedelta) -> ProcessGroup:
    """Create a group of processes of several jobs, each with a default group of its own; they meet in `store`."""
    _alone.makes = True
    try:  # torch takes a group without global ranks for a default one, and leaves the default one as it is
        group, _ = _new_group(
            size, rank, [], backends, store, distributed_c10d.GroupName(name), timeout=timeout, group_desc=name
        )
    finally:
        _alone.makes = False
    distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(size)}
    return group


# ------------------------------------------------------------------ groups that are destroyed

_ENDS = "caches of plans, axes and meshes are emptied when a process group is destroyed"
_LATER = "caches keep meshes whose groups are destroyed"


def _replaced(path: str) -> Any:
    return private(path, _ENDS, instead=None, without=_LATER, patched=True)


_endings = {
    path: _replaced(path)
    for path in (
        "torch.distributed.distributed_c10d._unregister_process_group",
        "torch.distributed.distributed_c10d._unregister_all_process_groups",
    )
}


def when_destroyed(run: Callable[[], None]) -> Callable[[], None]:
    """Call `run` whenever a process group has been destroyed; the public function stays the same object."""
    for path, plain in _endings.items():
        if plain is not None:
            replace(path, _followed_by(plain, run))
    return run


def _followed_by(plain: Callable[..., Any], run: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def unregister(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        finally:
            run()

    return unregister


# ------------------------------------------------------------------ meshes

_meshes: Any = private("torch.distributed.device_mesh._mesh_resources", "the mesh of `with mesh:` is the default")

attribute(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh", "fully_shard of a tensor-parallel model joins two dims"
)
attribute("torch.distributed.device_mesh.DeviceMesh._concatenate", "fully_shard joins dims that were made by splitting")
attribute("torch.distributed.device_mesh.DeviceMesh._unflatten", "the engine splits a dim into replicas and shards")
attribute("torch.distributed.device_mesh.DeviceMesh._flatten", "fully_shard takes several data-parallel dims as one")
attribute(
    "torch.distributed.device_mesh.DeviceMesh.__init__._init_backend",
    "fully_shard's inner mesh needs no groups of all ranks",
    there=lambda: "_init_backend" in inspect.signature(DeviceMesh.__init__).parameters,
)
attribute(
    "torch.distributed.device_mesh.DeviceMesh.__init__._rank",
    "files of DTensors are read without a process group",
    there=lambda: "_rank" in inspect.signature(DeviceMesh.__init__).parameters,
)


def current_mesh() -> DeviceMesh:
    """The mesh of the enclosing `with mesh:`; raises a RuntimeError if there is none."""
    mesh: DeviceMesh = _meshes.get_current_mesh()
    return mesh


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced from, or itself."""
    return mesh._get_root_mesh()


def joined(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh of the dims of several meshes that were sliced from the same root."""
    return DeviceMesh._concatenate(meshes)


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The 1-D mesh of all ranks of a mesh; it belongs to the same root."""
    return mesh._flatten(name)


def split(mesh: DeviceMesh, dim: int, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The mesh with one dim split into several; it belongs to the same root."""
    return mesh._unflatten(dim, sizes, names)


def seen_from(rank: int | None, device_type: str, ranks: Any, names: tuple[str, ...] | None) -> DeviceMesh:
    """A mesh without process groups, with the coordinate that `rank` has in it."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def without_groups(device_type: str, ranks: torch.Tensor) -> DeviceMesh:
    """A mesh that creates no process groups."""
    return DeviceMesh(device_type, ranks, _init_backend=False)


attribute(
    "torch.distributed.device_mesh.DeviceMesh._dim_group_names",
    "whether a mesh was made without process groups",
    there=lambda: True,  # instances have it once they have groups
)


def has_groups(mesh: DeviceMesh) -> bool:
    """Whether a mesh has created its process groups."""
    return hasattr(mesh, "_dim_group_names")
