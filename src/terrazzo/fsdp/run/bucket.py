"""The parameters of a unit that share a dtype: one flat shard buffer, one flat unsharded buffer.

*Shard buffer*: this rank's chunks, one after the other. The sharded parameters are views of it, and it is the
all-gather's input (converted first, if the policy computes in another dtype). Its *epoch* increases with every write:
by operations (PyTorch's version counters), by optimizers, and when shards are replaced.

*Unsharded buffer*: the parameters as forward uses them, each aligned for vector units. Its memory is freed while the
parameters are sharded, and allocated again when they are gathered; the tensors, which autograd saves, stay the same
objects. If one rank has everything in the right dtype, the unsharded parameters are the shards themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from terrazzo._torch.counting import count_from_now, set_uncounted, uses, was_asked, writes_to
from terrazzo._torch.tensors import version_of
from terrazzo.comm.axis import Axis
from terrazzo.comm.flat import FlatPlan, has_many, worth_padding
from terrazzo.comm.in_place import InPlace
from terrazzo.comm.pending import Pending
from terrazzo.comm.sections import converted
from terrazzo.errors import FSDPError
from terrazzo.fsdp.parameter import ShardedParameter
from terrazzo.fsdp.plan.units import Sizes
from terrazzo.fsdp.run.comm import Comm
from terrazzo.fsdp.run.memory import ReturnableMemory
from terrazzo.fsdp.settings import Settings

_ALIGNMENT = 64  # bytes

_address = Tensor.data_ptr


class _Shards(NamedTuple):
    """The shard buffer, and the addresses of the sharded parameters in it."""

    buffer: Tensor
    pointers: list[int]


class _Whole(NamedTuple):
    """The unsharded parameters' buffer, and where they are in it; or in the shards, if these are the parameters."""

    buffer: Tensor
    places: list[Tensor]
    pieces: list[Tensor]  # the same as the plan fills them
    memory: ReturnableMemory | None  # None if the shards are the parameters


class _Seen(NamedTuple):
    """The unsharded parameters' counters when only this module had written there."""

    counted: list[int]
    versions: list[int]
    uses: int
    filled: list[int]  # the shards' version counters when the unsharded parameters got their values


class Bucket:
    """Some parameters of one dtype on one device, sharded on one mesh."""

    _shards: _Shards
    _whole: _Whole | None = None  # once the shards have values
    _epochs_before: int = 0  # writes to former buffers, and writes that no version counter counts
    _seen: _Seen = _Seen([], [], -1, [])

    def __init__(self, params: Sequence[ShardedParameter], settings: Settings, equal: bool) -> None:
        """Takes the values of parameters that are not sharded yet from their `unsharded_local`, and creates the sharded
        parameters; or takes those that there are into a buffer of its own. `equal` is whether sections are padded to
        the same length on CPU too."""
        self.params = tuple(params)
        self.settings = settings
        self._equal = equal
        self.plan = self.plan_over(settings.mesh.shard, self.params)
        values = [p.values.detach() for p in params]
        if params[0].sharded is None:
            values = self.plan.own_chunks(values)
        self._place(values)

    def plan_over(self, axis: Axis, params: Sequence[ShardedParameter], extra: int = 0) -> FlatPlan:
        """The flat plan of `params` over `axis`."""
        shapes, dims = [p.shape for p in params], [p.dim for p in params]
        equal = self._equal
        if not equal:
            on_cpu = self.settings.mesh.device.type == "cpu"
            equal = worth_padding(shapes, dims, axis.size) if has_many(axis.size) else not on_cpu
        return FlatPlan(shapes, dims, axis.size, axis.index, equal, extra)

    @property
    def shard(self) -> Tensor:
        """The buffer of the shards."""
        return self._shards.buffer

    @property
    def shard_bytes(self) -> int:
        """The bytes of the shards."""
        return self.shard.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the shards."""
        return self.shard.dtype

    @property
    def aliased(self) -> bool:
        """Whether the unsharded parameters, which exist, are the shards themselves."""
        return self._whole is not None and self._whole.memory is None

    @property
    def is_meta(self) -> bool:
        return self.shard.device.type == "meta"

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.settings.compute_dtype(self.dtype)

    @property
    def will_alias(self) -> bool:
        """Whether the shards can be used as unsharded parameters."""
        alone = self.plan.n == 1 and self.compute_dtype is self.dtype
        return alone and self.settings.rest_device == self.settings.mesh.device

    def sizes(self, in_place: bool, inner: Axis | None) -> Sizes:
        """The bytes of the shards, of the unsharded parameters, and of a gather; `inner` is the axis over which a part
        is kept."""
        if self.will_alias:
            return Sizes(shard=self.shard_bytes)
        itemsize, how = self.compute_dtype.itemsize, self.in_place if in_place else None
        sent, gathered, moves = self._gather_sizes()
        kept = None if inner is None else self.plan_over(inner, self.params)
        return Sizes(
            shard=self.shard_bytes,
            sent=sent,
            gathered=gathered if how is None else how.buffered * itemsize,
            unsharded=self._layout()[1] * itemsize,
            kept=0 if kept is None else kept.own_size * itemsize,
            gather_moves=moves,
            kept_moves=moves if kept is None else kept.moved(itemsize),
        )

    def _gather_sizes(self) -> tuple[int, int, int]:
        """The bytes of the copies of the shards that a gather makes to send them, those of its buffer, and those that a
        rank sends, on average."""
        plan, itemsize, device = self.plan, self.compute_dtype.itemsize, self.settings.mesh.device
        cast = self.compute_dtype is not self.dtype
        moved = self.dtype.itemsize * (self.settings.rest_device != device)
        # The last copy is what a rank alone has gathered; and on accelerators it is made in its place.
        last_too = plan.n > 1 and (device.type == "cpu" or not plan.alike)
        sent = plan.own_size * (moved + itemsize * cast if last_too else moved * cast)
        return sent, plan.total * itemsize, plan.moved(itemsize)

    @cached_property
    def in_place(self) -> InPlace | None:
        """The plan for gathering directly into the unsharded parameters, if that is possible."""
        itemsize = self.compute_dtype.itemsize
        suits = InPlace.suits(self.plan, self.settings.mesh.shard, itemsize)
        return InPlace(self.plan, itemsize) if suits else None

    def gather(self, comm: Comm, tag: int, in_place: bool) -> Pending[Tensor] | Pending[None]:
        """Start to gather the sections of all ranks, with `in_place` into the unsharded parameters."""
        axis, whole, how = self.settings.mesh.shard, self._whole, self.in_place if in_place else None
        assert whole is not None
        if how is None:
            return comm.gather(self.shard, self.plan, axis, tag, whole.buffer)
        self.take()
        return how.gather(converted(self.shard, whole.buffer), whole.pieces, axis, tag)

    # ------------------------------------------------------------------ epochs

    @property
    def epoch(self) -> int:
        """A number that increases with every write to the shard buffer."""
        # A parameter whose `.data` was replaced has a version counter of its own.
        return self._epochs_before + sum([version_of(p.sharded._local) for p in self.params])

    def move_epoch(self) -> None:
        """Count a write to the shards that PyTorch's version counters do not count."""
        self._epochs_before += 1

    def count_new_values(self) -> None:
        """Have autograd count a write to each unsharded parameter whose shard was written since the last call.

        The unsharded parameters are about to get new values, of which their own version counters know nothing. A graph
        that needs the former ones then raises, as on one device, instead of using the new ones.
        """
        before, now = self._seen.filled, [version_of(p.sharded._local) for p in self.params]
        self._seen = self._seen._replace(filled=now)
        if now == before or not before or not self._seen.counted:  # there are none yet
            return
        written = [i for i, version in enumerate(now) if version != before[i]]
        increment_version([self.params[i].unsharded_local for i in written])
        for i in written:
            self._seen.counted[i] += 1
            self._seen.versions[i] += 1

    # ------------------------------------------------------------------ unsharded parameters

    def _layout(self) -> tuple[list[int], int]:
        """The offset of each parameter in the unsharded buffer, and the buffer's length."""
        step = max(1, _ALIGNMENT // self.compute_dtype.itemsize)
        starts, end = [], 0
        for param in self.params:
            starts.append(end)
            end += -(-prod(param.shape) // step) * step
        return starts, end

    def prepare(self) -> None:
        """Create the unsharded parameters, when the shards have values."""
        if self._whole is not None or self.is_meta:
            return
        aliased = self.will_alias
        with torch.inference_mode(False), torch.no_grad():
            if aliased:
                buffer, locals_ = self.shard, self.plan.own_views(self.shard)
                # A write to the one is a write to the other, also for autograd.
                counting = [p.sharded._local.detach() for p in self.params]
            else:
                starts, end = self._layout()
                buffer = torch.empty(end, dtype=self.compute_dtype, device=self.settings.mesh.device)
                locals_ = [
                    buffer[start : start + prod(p.shape)].view(p.shape)
                    for start, p in zip(starts, self.params, strict=True)
                ]
                counting = [local.data for local in locals_]  # for autograd gathering again must not count as a write
            for param, local in zip(self.params, counting, strict=True):
                param.make_unsharded(local)
            self._remember_writes()
            pieces = [] if aliased else self.plan.pieces(locals_)
            memory = None if aliased else ReturnableMemory(buffer, self._warning())
            self._whole = _Whole(buffer, locals_, pieces, memory)
            self.free()

    def _warning(self) -> str:
        return (
            f"{self.params[0].name!r}, a parameter of the same group, or a view of one was used after the module's "
            "forward or backward, when fully_shard had freed it: use it in forward, or clone it there, or keep the "
            "parameters with reshard_after_forward=False or unshard()"
        )

    def free(self) -> None:
        """Free the memory of the unsharded parameters."""
        for memory in self._memories:
            memory.give_back()

    @property
    def _memories(self) -> Sequence[ReturnableMemory]:
        """The memory of the unsharded parameters, as far as it can be freed."""
        return () if self._whole is None or self._whole.memory is None else (self._whole.memory,)

    @property
    def _pieces(self) -> list[Tensor]:
        """The unsharded parameters' memory, as the plan fills it."""
        assert self._whole is not None
        return self._whole.pieces

    @property
    def _places(self) -> list[Tensor]:
        return [] if self._whole is None else self._whole.places

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is in memory that `free` frees."""
        return any(memory.owns(tensor) for memory in self._memories)

    def is_touched(self) -> bool:
        """Whether users may have written to the unsharded parameters since the last `save_writes`, or exchanged them.
        This is quick, and may say no to a write that `save_writes` would find."""
        if uses.count != self._seen.uses:
            return True
        locals_ = [p.unsharded_local for p in self.params]
        places = self._shards.pointers if self.aliased else [*map(_address, self._places)]
        if [*map(_address, locals_)] != places:
            return True
        return not self.aliased and [*map(version_of, locals_)] != self._seen.versions

    def _remember_writes(self) -> None:
        locals_ = [p.unsharded_local for p in self.params]
        counted, versions = [writes_to(local) for local in locals_], [version_of(local) for local in locals_]
        self._seen = _Seen(counted, versions, -1 if was_asked(locals_) else uses.count, self._seen.filled)

    def save_writes(self, current: bool) -> list[str]:
        """Copy to the shards what users have written to the unsharded parameters, where PyTorch has counted that, or
        where they have set `.data`; returns these parameters' names.

        If the unsharded parameters are not `current`, their values are dropped.
        """
        if self._whole is None:
            return []
        moved = self._bring_back()
        before = self._seen.counted
        self._remember_writes()
        written = [i for i, count in enumerate(self._seen.counted) if count != before[i] or i in moved]
        if self.aliased:
            self._epochs_before += bool(moved)
            return []
        if not written or not current:
            return []
        chunks, filled = self.plan.own_chunks(self.unsharded_locals()), self._seen.filled
        with torch.no_grad():
            for i in written:
                local = self.params[i].sharded._local
                was_filled = bool(filled) and filled[i] == version_of(local)
                self._write(i, chunks[i])
                if was_filled:  # the unsharded parameter has this value already
                    filled[i] = version_of(local)
        return [self.params[i].name for i in written]

    def note_write(self, i: int) -> None:
        """Note that users have written to a parameter where it was kept meanwhile."""
        self._seen.counted[i] = -1
        self._seen = self._seen._replace(uses=-1)

    def _bring_back(self) -> list[int]:
        """Copy what users have set `.data` of unsharded parameters to into the memory that gathers fill; returns which
        parameters these are."""
        moved = []
        for i, (param, place) in enumerate(zip(self.params, self._places, strict=True)):
            local = param.unsharded_local
            if local.data_ptr() == place.data_ptr():
                continue
            values = local.detach()
            count_from_now(local)
            set_uncounted(local, place)
            if values.shape != place.shape or not values.data_ptr():  # a DTensor has no memory of its own
                what = "a DTensor" if values.shape == place.shape else f"a tensor of shape {tuple(values.shape)}"
                raise FSDPError(
                    f".data of parameter {param.name!r} was set to {what} while the parameter was unsharded, as those "
                    f"of the root are after a forward without backward; set it to a tensor of shape "
                    f"{tuple(place.shape)}, or call reshard() on the model first and get the parameter again"
                )
            with torch.no_grad():
                place.copy_(values)
            moved.append(i)
        return moved

    def has_gathered(self) -> bool:
        """Whether the unsharded parameters, which have values, have those of the shards. The host waits for that."""
        shards = [param.sharded._local.detach() for param in self.params]
        if self.aliased or not self.shards_intact():
            return False
        chunks = self.plan.own_chunks(self.unsharded_locals())
        with torch.no_grad():
            return all(torch.equal(self.rounded(i, shards[i]), chunk) for i, chunk in enumerate(chunks))

    def put_back(self) -> None:
        """Let unsharded parameters whose `.data` users have set use the memory again that gathers fill."""
        for param, place in zip(self.params, self._places, strict=True):
            if param.unsharded_local.data_ptr() != place.data_ptr():
                set_uncounted(param.unsharded_local, place)

    def take(self) -> None:
        """Allocate memory for the unsharded parameters."""
        for memory in self._memories:
            memory.take_back()

    def receive(self, pending: Pending[Any]) -> None:
        """Wait for a gather, and fill the unsharded parameters, unless it does that itself."""
        gathered = pending.wait()
        if gathered is not None:
            self.fill(gathered, self.plan, self._pieces)

    def fill(self, gathered: Tensor, plan: FlatPlan, pieces: list[Tensor]) -> None:
        """Fill the unsharded parameters from the gathered sections."""
        self.take()
        plan.unpack(gathered, pieces)

    def unsharded_locals(self) -> list[Tensor]:
        """The unsharded parameters, detached, for reading while they have memory."""
        return [p.unsharded_local.detach() for p in self.params]

    # ------------------------------------------------------------------ shards that users replaced

    def _place(self, chunks: Sequence[Tensor]) -> None:
        """Copy this rank's chunks into a new shard buffer, and have the sharded parameters be views of it."""
        adjacent = None if self.params[0].sharded is None else self._adjacent(chunks)
        buffer = self._empty_shard(chunks[0]) if adjacent is None else adjacent
        with torch.no_grad():
            views = self.plan.own_views(buffer)
            if adjacent is None and buffer.device.type != "meta":
                torch._foreach_copy_(views, list(chunks))
            for param, view in zip(self.params, views, strict=True):
                local = None if param.sharded is None else param.sharded._local
                if local is not None and local.device == view.device and local.dtype == view.dtype:
                    local.data = view  # the tensor, which an optimizer may refer to, stays the same object
                    continue
                param.make_sharded(view)
                if local is None:
                    param.unsharded_local = view  # releases the original
        # Of two parameters that users have tied since, one does not lie in its place: both are collected each time.
        self._shards = _Shards(buffer, [view.data_ptr() for view in views])

    def _adjacent(self, chunks: Sequence[Tensor]) -> Tensor | None:
        """The memory of chunks that are where they must be already, as in the buffer of a unit that is parted."""
        first = next((chunk for chunk in chunks if chunk.numel()), chunks[0])
        storage, start = first.untyped_storage(), first.storage_offset()
        if (
            first.device.type == "meta"
            or not first.numel()
            or (start + self.plan.own_size) * first.itemsize > storage.nbytes()
        ):
            return None
        found = first.new_empty(0).set_(storage, start, (self.plan.own_size,), (1,))
        own = zip(chunks, self.plan.own_views(found), strict=True)
        return found if all(chunk.data_ptr() == view.data_ptr() for chunk, view in own if chunk.numel()) else None

    def _empty_shard(self, like: Tensor) -> Tensor:
        settings, size = self.settings, self.plan.own_size
        if like.device.type == "meta":
            return like.new_empty(size)
        shard = torch.empty(size, dtype=like.dtype, device=settings.rest_device, pin_memory=settings.pinned_shards)
        return shard.zero_() if self.plan.padded else shard

    def shards_intact(self) -> bool:
        """Whether the sharded parameters still are the original views of the shard buffer."""
        pointers = self._shards.pointers
        if [*map(_address, [p.sharded._local for p in self.params])] != pointers:
            return False
        # Where this rank has no rows there is no address: a change of dtype or device does not show in it.
        return all(pointers) or self.suits_shards()

    def suits_shards(self) -> bool:
        """Whether the sharded parameters have its dtype and device: it keeps both, and all that follows from them."""
        locals_ = [p.sharded._local for p in self.params]
        return all(each.dtype is self.dtype and each.device == self.shard.device for each in locals_)

    def rebuild(self) -> None:
        """Take shards that have left the buffer, as those that are loaded by assignment have, into a new one."""
        epoch = self.epoch
        self._take_shards()
        self._epochs_before += max(0, epoch + 1 - self.epoch)

    def _take_shards(self) -> None:
        self._place([p.sharded._local.detach() for p in self.params])
        if self.aliased:
            self._whole = None
            self.prepare()

    def _write(self, i: int, values: Tensor) -> None:
        """Write values to a shard; where they are what was gathered of it, rounded, it keeps its own."""
        shard = self.params[i].sharded._local
        if self.is_rounded:
            rounded = self.rounded(i, shard)
            values = torch.where(values == rounded, shard.to(values.device), values.to(shard.dtype))
        shard.copy_(values)

    @property
    def is_rounded(self) -> bool:
        """Whether the unsharded parameters have other values than the shards."""
        return self.compute_dtype is not self.dtype

    def rounded(self, i: int, shard: Tensor) -> Tensor:
        """A parameter's shard as the unsharded parameters have it."""
        return shard.to(self.settings.mesh.device, self.compute_dtype)
