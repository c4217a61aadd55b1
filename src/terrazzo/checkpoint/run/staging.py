"""Copies of a state dict, which `async_save` writes in the background while training changes the state.

A stager copies every tensor into host memory. DTensors become `StagedTensor`s, which have their chunks' boxes but no
process group, so that another thread or process can save them. All tensors share one buffer, which is kept for the next
save, so that nothing is allocated again.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import msgspec
import torch

from terrazzo._threads import Worker
from terrazzo.checkpoint.metadata import STATE_DICT_TYPE
from terrazzo.checkpoint.native.containers import of_its_class
from terrazzo.checkpoint.native.objects import Containers, encode
from terrazzo.checkpoint.native.tensors import OPAQUE, OWN_MEMORY, as_bytes, same_memory
from terrazzo.checkpoint.plan.flatten import PerRank, walking
from terrazzo.checkpoint.plan.sharded import Holders, OfChunks, ShardViews, check_storable, is_sharded
from terrazzo.checkpoint.run.device_copies import ThisAccelerator, copy_from_devices
from terrazzo.errors import CheckpointError, UnsupportedValueError
from terrazzo.layout.box import Box
from terrazzo.layout.drawing import ShownAsCall

_ALIGNMENT: Final = 64
_LARGE: Final = 1 << 20  # bytes: for fewer, it does not matter how they are copied
_SLAB: Final = 64 << 20  # bytes of pinned memory that are allocated at once


@runtime_checkable
class AsyncStager(Protocol):
    """How `async_save` copies the state.

    `async_save` calls `stage`. If `should_synchronize_after_execute`, it calls `synchronize_staging` before it returns,
    and the state may then be changed. A stager that copies asynchronously sets that to False: the background thread
    then calls `synchronize_staging` before it reads the copy, and the user must call it before changing the state.
    `stage` may also return a future of the copy.

    A stager may keep its memory and be used for several groups or writers: `async_save` does not call `stage` again
    before the save of the last copy is done.

    A stager must raise for values that `save` cannot store (sparse tensors, wrappers of other tensors), because a copy
    in plain memory would be another tensor.
    """

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether `async_save` waits for the copy before it returns."""
        return True

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE | Future[STATE_DICT_TYPE]:
        """A copy of the state, or a future of it."""
        ...

    def synchronize_staging(self) -> None:
        """Wait until the copy is complete."""
        ...

    def close(self) -> None:
        """Release what the stager holds."""


class Staging:
    """One copy, from its start until it is saved."""

    def __init__(self, stager: AsyncStager | None, state_dict: STATE_DICT_TYPE) -> None:
        self._stager = stager
        self._complete = stager is None
        self._staged: Any = state_dict
        self._use: _Use | None = None
        if stager is not None:
            self._use = _Use.of(stager)
            try:
                self._staged = stager.stage(state_dict)
            except BaseException:
                self._use.end()
                raise

    @property
    def waits(self) -> bool:
        """Whether `async_save` returns when the copy is complete."""
        return self._stager is None or (self.future is None and self._stager.should_synchronize_after_execute)

    @property
    def future(self) -> Future[STATE_DICT_TYPE] | None:
        """The stager's future of the copy, if it returned one."""
        return self._staged if isinstance(self._staged, Future) else None

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._stager is not None and not self._complete:
            self._stager.synchronize_staging()
            self._complete = True

    def result(self) -> STATE_DICT_TYPE:
        """The copy, complete."""
        if self.future is not None:
            return self.future.result()
        self.wait()
        return self._staged

    def in_use_until(self, saved: Future[Any]) -> None:
        """Keep the stager from using its memory again until the save is done."""
        if self._use is not None:
            self._use.thread = None
            use = self._use
            saved.add_done_callback(lambda _: use.end())

    def abandon(self) -> None:
        """The copy will not be saved: the stager may use its memory again."""
        if self._use is not None:
            self._use.end()


class _Use:
    """A stager's memory is in use, from the start of a copy until the copy is saved."""

    def __init__(self, stager: AsyncStager) -> None:
        self.thread: int | None = threading.get_ident()  # the thread that copies; None: it has returned from that
        self._stager = stager  # kept, so that no other object gets its id
        self._ended = threading.Event()

    @classmethod
    def of(cls, stager: AsyncStager) -> _Use:
        """A use of the stager, when no other one is left."""
        own = cls(stager)
        while True:
            use = _in_use.setdefault(id(stager), own)
            if use is own:
                return own
            if use.thread == threading.get_ident():
                raise CheckpointError(
                    f"async_save was called while the same {type(stager).__name__} copies the state for another save, "
                    f"on the same thread (in a signal handler, for instance); pass another async_stager"
                )
            use._ended.wait()

    def end(self) -> None:
        """Let the stager be used again."""
        if _in_use.get(id(self._stager)) is self:
            del _in_use[id(self._stager)]
        self._ended.set()


_in_use: dict[int, _Use] = {}  # by the id of a stager
os.register_at_fork(after_in_child=_in_use.clear)  # the saves are the parent's


class StagedTensor(OfChunks, msgspec.Struct, eq=False, gc=False):
    """A rank's part of a distributed tensor, in host memory and without its process group.

    `memory` has the copies of all tensors of the state dict, when they have been made: `chunks` are boxes, each with
    the number of its shard there.
    """

    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[tuple[Box, int], ...]
    holders: Holders | None
    memory: list[torch.Tensor]

    def own_chunks(self) -> list[tuple[Box, torch.Tensor]]:
        """The boxes and their shards."""
        return [(box, self.memory[number]) for box, number in self.chunks]


class BlockingAsyncStager(ShownAsCall):
    """Copies into host memory, and returns when the copy is complete.

    With `cache_staged_state_dict` the memory is kept and used again by the next `stage`, so a staged state dict is
    valid until then. Memory for tensors of accelerators is pinned. With `type_check`, values that cannot be stored are
    an error here, before training goes on.

    >>> stager = BlockingAsyncStager()
    >>> weight = torch.zeros(2)
    >>> staged = stager.stage({"weight": weight})
    >>> weight += 1
    >>> staged
    {'weight': tensor([0., 0.])}
    """

    should_synchronize_after_execute = True

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        self._memory = HostMemory()

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """A copy of the state dict in host memory, complete when this returns."""
        skeleton, sources = take_apart(state_dict, self.type_check)
        memory = self._memory if self.cache_staged_state_dict else HostMemory()
        return put_together(skeleton, memory.copy(sources))

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has waited."""

    def close(self) -> None:
        """Release the memory."""
        self._memory = HostMemory()


@dataclass(slots=True)
class StagingOptions:
    """How a `DefaultStager` copies.

    Attributes:
        use_pinned_memory: Ignored; memory for tensors of accelerators is always pinned.
        use_shared_memory: Copy into memory that other processes can map.
        use_async_staging: Copy on a thread.
        use_non_blocking_copy: Ignored; copies from accelerators never wait for each other.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True


class DefaultStager(ShownAsCall):
    """Copies into host memory that is kept, by default on a separate thread.

    With `use_async_staging`, `stage` returns a future of the copy: the state may be changed when it is done, and
    `async_save` returns an `AsyncSaveResponse` that has it. Values that are not tensors are copied by the caller.

    >>> weight = torch.zeros(2)
    >>> stager = DefaultStager()
    >>> stager.stage({"weight": weight}).result()
    {'weight': tensor([0., 0.])}
    >>> stager.close()
    """

    should_synchronize_after_execute = True

    def __init__(self, config: StagingOptions | None = None) -> None:
        self._config = config or StagingOptions()
        self._memory = HostMemory(shared=self._config.use_shared_memory)
        self._worker = Worker("terrazzo-stage") if self._config.use_async_staging else None
        self._future: Future[STATE_DICT_TYPE] | None = None

    def stage(self, state_dict: STATE_DICT_TYPE, **kwargs: Any) -> STATE_DICT_TYPE | Future[STATE_DICT_TYPE]:
        """A copy of the state dict in host memory, or a future of it. It is valid until the next call.

        `kwargs` are ignored; for compatibility.
        """
        skeleton, sources = take_apart(state_dict)

        def copy() -> STATE_DICT_TYPE:
            return put_together(skeleton, self._memory.copy(sources))

        if self._worker is None:
            return copy()
        self._future = self._worker.submit(copy)
        return self._future

    def synchronize_staging(self) -> None:
        """Wait until the last copy is complete."""
        if self._future is not None:
            self._future.result()

    def close(self) -> None:
        """Wait for the last copy, and release the memory."""
        if self._worker is not None:
            self._worker.wait()
        self._memory = HostMemory(shared=self._config.use_shared_memory)


class TensorSlot(msgspec.Struct, frozen=True, gc=False):
    """Where a plain tensor was, in a state dict that has been taken apart."""

    number: int


@dataclass(slots=True)
class Skeleton:
    """A state dict that has been taken apart.

    `values` have a `TensorSlot` for each plain tensor, a `StagedTensor` for each distributed one, and copies of all
    other values. `memory` is that of the `StagedTensor`s, which is still empty.
    """

    values: STATE_DICT_TYPE
    memory: list[torch.Tensor] = field(default_factory=list)
    has_slots: bool = False


def take_apart(state_dict: STATE_DICT_TYPE, type_check: bool = False) -> tuple[Skeleton, list[torch.Tensor]]:
    """The state dict without its tensors; and the tensors."""
    skeleton = Skeleton({})
    memory = skeleton.memory
    sources: list[torch.Tensor] = []
    at: dict[int, int] = {}  # by address: tied weights are copied once
    viewer = ShardViews()

    def keep(tensor: torch.Tensor) -> int:
        number = len(sources)
        if type(tensor) in OWN_MEMORY:
            known = at.setdefault(tensor.data_ptr(), number)
            if known != number and same_memory(tensor, sources[known]):
                return known
        sources.append(tensor)
        return number

    def leaf(path: tuple[Any, ...], value: Any) -> Any:
        if is_sharded(value):
            view = viewer.view(_name_of(path), value)
            chunks: list[tuple[Box, int]] = []
            for box, shard in view.chunks:
                chunks.append((box, keep(shard)))
            return StagedTensor(view.size, view.dtype, tuple(chunks), view.holders, memory)
        if isinstance(value, torch.Tensor):
            _explained(path, partial(check_storable, value))
            skeleton.has_slots = True
            return TensorSlot(keep(value.detach()))
        if type_check:
            _explained(path, partial(encode, value))
        try:
            return deepcopy(value)
        except Exception as error:  # of whatever class the value is
            raise UnsupportedValueError(f"{_name_of(path)}: the value cannot be copied ({error})") from error

    with torch.no_grad(), walking(state_dict):
        skeleton.values = _walk((), state_dict, leaf, Containers(state_dict))
    return skeleton, sources


def put_together(skeleton: Skeleton, tensors: Sequence[torch.Tensor]) -> STATE_DICT_TYPE:
    """The state dict that was taken apart, with these tensors. The skeleton is used up."""

    def leaf(path: tuple[Any, ...], value: Any) -> Any:
        return tensors[value.number] if isinstance(value, TensorSlot) else value

    skeleton.memory[:] = tensors
    if not skeleton.has_slots:
        return skeleton.values
    return _walk((), skeleton.values, leaf, Containers(skeleton.values))


_LEAVES: Final = (torch.Tensor, TensorSlot, StagedTensor)  # most values are, so these are asked for first


def _walk(path: tuple[Any, ...], value: Any, leaf: Callable[[tuple[Any, ...], Any], Any], entered: Containers) -> Any:
    """The value with `leaf` applied to everything that is not a mapping, list or tuple, or is an empty mapping."""
    if isinstance(value, Mapping | list | tuple):
        entered.enter()
    if isinstance(value, Mapping) and (value or not path):
        items = {
            key: leaf((*path, key), item) if isinstance(item, _LEAVES) else _walk((*path, key), item, leaf, entered)
            for key, item in value.items()
        }
        return items if type(value) is dict else of_its_class(value, items)
    if isinstance(value, list):
        return [_walk((*path, index), item, leaf, entered) for index, item in enumerate(value)]
    if type(value) is tuple:
        return tuple(_walk((*path, index), item, leaf, entered) for index, item in enumerate(value))
    if isinstance(value, PerRank):
        return PerRank(_walk(path, value.value, leaf, entered))
    return leaf(path, value)


def _explained(path: tuple[Any, ...], check: Callable[[], object]) -> None:
    try:
        check()
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{_name_of(path)}: {error}") from error


def _name_of(path: tuple[Any, ...]) -> str:
    return str(path[0]) if len(path) == 1 else ".".join(map(str, path))


@dataclass(slots=True)
class HostMemory:
    """Memory for copies of tensors, which is used again; it grows if they do.

    It is one buffer, which another process can map if it is `shared`. Memory for copies from accelerators is pinned.
    Pinning is slow and may fail for large sizes, so that memory is allocated in slabs of one size, which are kept; a
    `shared` buffer is pinned as a whole.
    """

    shared: bool = False
    buffer: torch.Tensor | None = None
    accelerator: ThisAccelerator = field(default_factory=ThisAccelerator)
    slab_bytes: int = _SLAB
    _process: int = field(default_factory=os.getpid)
    _slabs: list[torch.Tensor] = field(default_factory=list)
    _specs: tuple[list[torch.Size], list[torch.dtype]] = field(default_factory=lambda: ([], []))
    _views: list[torch.Tensor] = field(default_factory=list)
    _opaque: list[int] = field(default_factory=list)  # which torch can copy only as plain bytes
    _large: list[int] = field(default_factory=list)
    _pinned: torch.Tensor | None = None  # the shared buffer, when it has been pinned

    def copy(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the tensors, complete when this returns, and valid until the next call."""
        if self._process != os.getpid():  # forked since: shared memory is the parent's, too, and pinning is lost
            self.buffer, self._slabs, self._views, self._process = None, [], [], os.getpid()
            self._pinned = None
        specs = [tensor.shape for tensor in sources], [tensor.dtype for tensor in sources]
        from_devices = not all(tensor.is_cpu or tensor.is_meta for tensor in sources)
        pinned = from_devices and not self.shared
        if specs != self._specs or (not self._slabs if pinned else self.buffer is None):
            self._views = []
            each = list(zip(*specs, strict=True))
            self._views = self._in_slabs(each) if pinned else self._in_buffer(each)
            self._specs = specs
            self._opaque = [number for number, dtype in enumerate(specs[1]) if dtype in OPAQUE]
            self._large = [number for number, view in enumerate(self._views) if view.nbytes >= _LARGE]
        if from_devices and self.shared and self._pinned is not self.buffer and self.buffer is not None:
            self.accelerator.pin(self.buffer)
            self._pinned = self.buffer
        targets, sources = list(self._views), list(sources)
        with torch.no_grad():
            for number in self._opaque:
                targets[number], sources[number] = as_bytes(targets[number]), as_bytes(sources[number])
            if from_devices:
                copy_from_devices(targets, sources, self.accelerator)
            else:
                _copy_in_host_memory(targets, sources, self._large)
        return list(self._views)

    def _in_buffer(self, specs: Specs) -> list[torch.Tensor]:
        total = room_of(specs)
        if self.buffer is None or self.buffer.numel() < total:
            self.buffer = self._pinned = None  # free the old one before the new one is allocated
            self.buffer = torch.empty(max(total, 1), dtype=torch.uint8, device="cpu")
            if self.shared:
                self.buffer.share_memory_()
        self._slabs = []
        return carve(self.buffer, specs)

    def _in_slabs(self, specs: Specs) -> list[torch.Tensor]:
        """Tensors in slabs; a tensor that is larger than a slab gets one whose size is a multiple."""
        self.buffer = None
        free = sorted(self._slabs, key=torch.Tensor.numel)
        used: list[torch.Tensor] = []
        views: list[torch.Tensor] = []
        end = 0
        for each in specs:
            room = room_of([each])
            if not used or end + room > used[-1].numel():
                wanted = max(-(-room // self.slab_bytes), 1) * self.slab_bytes
                place = next((place for place, slab in enumerate(free) if slab.numel() >= wanted), None)
                used.append(self.accelerator.pinned(wanted) if place is None else free.pop(place))
                end = 0
            views += carve(used[-1], [each], end)
            end += room
        self._slabs = used or free[:1] or [self.accelerator.pinned(self.slab_bytes)]  # free the others
        return views


def _copy_in_host_memory(targets: list[torch.Tensor], sources: list[torch.Tensor], large: Sequence[int]) -> None:
    """Copy each source to its target.

    One thread copies large tensors faster as bytes: from about 32 MB on, the C library writes past the cache, in two
    thirds of the time. With several threads, PyTorch's copy is faster.
    """
    copied: set[int] = set()
    for number in large if torch.get_num_threads() == 1 else ():
        target, source = targets[number], sources[number]
        if _is_its_bytes(source):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
            copied.add(number)
    if copied:
        targets = [target for number, target in enumerate(targets) if number not in copied]
        sources = [source for number, source in enumerate(sources) if number not in copied]
    if targets:
        torch._foreach_copy_(targets, sources)


def _is_its_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are its memory, in row-major order."""
    return (
        type(tensor) in OWN_MEMORY
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.data_ptr() != 0
    )


Specs: TypeAlias = Sequence[tuple[torch.Size, torch.dtype]]


def room_of(specs: Specs) -> int:
    """The bytes of tensors of these shapes and dtypes in a common buffer."""
    return sum([-(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in specs])


def carve(buffer: torch.Tensor, specs: Specs, start: int = 0) -> list[torch.Tensor]:
    """Views of a buffer of bytes, from `start` on, as tensors of these shapes and dtypes."""
    views = []
    for shape, dtype in specs:
        views.append(buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape))
        start += room_of([(shape, dtype)])
    return views
