"""A unit: groups that are gathered and reduced in one message for each dtype, and the operations on them.

The planner keeps its state and decides when operations run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terrazzo._torch.autograd import in_backward
from terrazzo.comm.pending import Pending
from terrazzo.comm.watch import Written
from terrazzo.errors import FSDPError
from terrazzo.fsdp.group import Group
from terrazzo.fsdp.meshes import DataMesh, InnerMesh
from terrazzo.fsdp.misuse import remark_on_writes
from terrazzo.fsdp.offload import has_gradient, park_state_of
from terrazzo.fsdp.parameter import ShardedParameter, are_alike, check_alike
from terrazzo.fsdp.plan.state import Where
from terrazzo.fsdp.plan.units import Sizes
from terrazzo.fsdp.run.bucket import Bucket
from terrazzo.fsdp.run.comm import Comm
from terrazzo.fsdp.run.encoded import ExtendedBucket, bucket_of, is_extended
from terrazzo.fsdp.run.gradients import Gradients
from terrazzo.fsdp.run.kept import Kept
from terrazzo.fsdp.run.registration import Registration
from terrazzo.fsdp.settings import Settings
from terrazzo.tensor.dtensor import WRITTEN, local_of


def _on_all(stage: Callable[[Gradients], None]) -> Callable[[Unit], None]:
    """A method that has all gradients of a unit go through a stage of their reduction."""

    def run(unit: Unit) -> None:
        for gradients in unit.gradients:
            stage(gradients)

    return run


class _Epochs(NamedTuple):
    """The shards' epochs at the last gather, and after writes to the unsharded parameters were last copied to them."""

    gathered: int = -1
    saved: int = -1


class _Parts(NamedTuple):
    """The memory of a unit's parameters, a bucket for each mesh and dtype, and what belongs to each."""

    buckets: Sequence[Bucket]
    gradients: Sequence[Gradients]
    kept: Sequence[Kept | None] = ()  # the parts over the smaller mesh; none before the first is kept
    prepared: bool = False  # whether everything is computed that is the same in every step


class Unit:
    """Parameters, their buffers, and their registration in modules."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        first = groups[0]
        self.settings, self.inner = first.settings, first.inner
        self.modules = tuple(module for group in groups for module in group.modules)
        self.params = tuple(param for group in groups for param in group.params)
        self._comm = Comm(first)
        former = {group.unit: None for group in groups if group.unit is not None}
        self._arrange([gradients for unit in former for gradients in unit.gradients])
        self._pending: list[tuple[Bucket | Kept, Pending[Any]]] = []
        self._epochs = _Epochs()
        self._stepped = False  # whether an optimizer has, on all ranks, since the last gather
        self._remarked: set[str] = set()  # parameters that were written to in a step, of which users know
        self._flags_changed = False  # of requires_grad, since the last look
        self.registration = Registration(self.params)
        self.replaced = self.registration.replaced
        for group in groups:
            group.unit = self

    def _arrange(self, former: Sequence[Gradients]) -> None:
        """Put the parameters of each mesh and dtype into a bucket, with what `former` have accumulated for them."""
        alike: dict[tuple[bool, DataMesh, torch.dtype, str], list[ShardedParameter]] = {}
        # The groups' meshes are equal, though not the same objects; some parameters may have another one.
        equal = not all(group.options.usual for group in self.groups)  # custom communication expects that
        meshes = {group.settings.mesh: self.settings.mesh for group in self.groups}
        if any(not param.shape for param in self.params):
            meshes |= {former.of_scalars: mesh.of_scalars for former, mesh in meshes.items()}
        for param in self.params:
            mesh, values = meshes.get(param.mesh, param.mesh), param.values
            key = is_extended(values), mesh, values.dtype, values.device.type
            alike.setdefault(key, []).append(param)
        buckets = [bucket_of(alike[key], self._settings_on(key[1]), equal) for key in sorted(alike, key=itemgetter(0))]
        for (extended, mesh, *_), members in alike.items():
            if extended and mesh in self.inner:
                raise FSDPError(
                    f"parameter {members[0].name!r} is a {type(members[0].sharded._local).__name__}, which cannot be "
                    "kept over some of the ranks: use reshard_after_forward=True or False"
                )
        self._parts = _Parts(buckets, [Gradients(bucket, self.groups[0]) for bucket in buckets])
        for gradients in self.gradients:
            gradients.take_over(former)

    @property
    def index(self) -> int:
        """The number of its first group among those of the root."""
        return self.groups[0].place.position

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._parts.buckets

    @property
    def gradients(self) -> Sequence[Gradients]:
        return self._parts.gradients

    @property
    def _kept(self) -> Sequence[Kept | None]:
        return self._parts.kept

    @property
    def gathered_epoch(self) -> int:
        """The shards' epoch at the last gather."""
        return self._epochs.gathered

    @property
    def name(self) -> str:
        """For messages, when it has a root."""
        more = len(self.groups) - 1
        return f"{self.groups[0].name} and {more} more" if more else self.groups[0].name

    def _settings_on(self, mesh: DataMesh) -> Settings:
        """The unit's settings with another mesh, for parameters that have one of their own."""
        return self.settings if mesh is self.settings.mesh else replace(self.settings, mesh=mesh)

    @property
    def code(self) -> int:
        """A number that tells it from other units, of this model and of others; the same on all ranks."""
        return self.groups[0].number << 16 | self.index

    # ------------------------------------------------------------------ sizes

    @property
    def in_place(self) -> bool:
        """Whether it is gathered directly into the unsharded parameters."""
        gathered = [bucket for bucket in self.buckets if bucket.plan.n > 1]  # scalars are not
        usual = bool(gathered) and self.groups[0].options.usual
        return usual and all(bucket.in_place is not None for bucket in gathered)

    @property
    def has_replicas(self) -> bool:
        """Whether there are replicas of any parameter, besides scalars, which all ranks hold."""
        meshes = [self.settings.mesh, *(param.mesh for param in self.params if param.shape)]
        return any(mesh.replicate is not None for mesh in meshes)

    def sizes(self) -> Sizes:
        """The sizes for the planner and for reports."""
        in_place, inner = self.in_place, self._inner_of_buckets()
        parts = [bucket.sizes(in_place, None if mesh is None else mesh.axis) for bucket, mesh in inner]
        return Sizes.of([*parts, *(gradients.sizes() for gradients in self.gradients)], in_place)

    def _inner_of_buckets(self) -> list[tuple[Bucket, InnerMesh | None]]:
        return [(bucket, self.inner.get(bucket.settings.mesh)) for bucket in self.buckets]

    # ------------------------------------------------------------------ parameters that users have replaced

    @property
    def epoch(self) -> int:
        """A number that increases with every write to the shards."""
        return sum(bucket.epoch for bucket in self.buckets)

    def note_step(self, ids: Set[int]) -> None:
        """Count the writes of an optimizer to the shards with these ids."""
        for bucket in self.buckets:
            if any(id(param.sharded) in ids for param in bucket.params):
                bucket.move_epoch()
                self._stepped = True

    def written(self, replaced: bool, where: Where) -> Written:
        """Whether shards have been written since they were gathered; or `replaced`, as some were."""
        if self._stepped:
            return Written.EVERYWHERE
        if replaced:
            return Written.HERE
        if not self.was_written():
            return Written.NO
        epochs, on_device = self._epochs, self.settings.mesh.device.type != "cpu"
        if not on_device or not where.is_whole or epochs.saved > epochs.gathered:
            return Written.HERE
        if not all(bucket.has_gathered() for bucket in self.buckets):
            return Written.HERE
        self._epochs = epochs._replace(gathered=self.epoch)  # only read, perhaps on this rank alone
        return Written.NO

    def was_written(self) -> bool:
        """Whether shards have been written to since they were gathered."""
        return self.epoch != self._epochs.gathered or not all(bucket.shards_intact() for bucket in self.buckets)

    def adopt(self, replaced: dict[int, Any], *, partly: bool = False) -> bool:
        """Take over replaced parameters, which are sharded now; returns whether sizes may have changed.

        It runs before every forward of a root, and is fast if nothing was replaced. With `partly`, not all parameters
        may have been replaced yet: then parameters that do not fit together are not copied.
        """
        if replaced:
            for i, one in replaced.items():
                self.params[i].adopt(one)
            self.registration.show_replaced()
        found = [bucket for bucket in self.buckets if replaced or not bucket.shards_intact()]
        if found:
            self._parts = self._parts._replace(prepared=False)
            found = [bucket for bucket in found if not partly or are_alike(bucket.params)]
            for bucket in found:
                for param in bucket.params:
                    param.place_again()
                for group in self.groups:
                    check_alike([p for p in bucket.params if p in group.params], bucket.settings.rest_device)
            if all(bucket.suits_shards() for bucket in found):
                for bucket in found:
                    bucket.rebuild()
            elif not partly or all(are_alike(bucket.params) for bucket in self.buckets):
                self._arrange(self.gradients)  # one of the groups has another dtype or device now
        changed = bool(found)
        changed |= self.follow_flags()
        if not self._parts.prepared and not partly:
            self._prepare()
            changed = True
        return changed

    def follow_flags(self) -> bool:
        """Have both faces of each parameter require gradients as the one does on which users have set that last.

        Returns whether that has changed since the last call.
        """
        changed, self._flags_changed = self._flags_changed, False
        kept = [each for each in self._kept if each is not None]
        for each in kept:
            each.copy_flags()
        changed |= self._follow_faces(False)
        for each in kept if changed else ():
            each.set_flags()
        return changed

    def _follow_faces(self, in_backward: bool) -> bool:
        changed = False
        for param in self.params:
            flag = param.requires_grad
            if param.sharded._local.requires_grad is flag and param.unsharded_local.requires_grad is flag:
                continue  # nearly always: this runs for every parameter in each forward and backward
            if param.follow_flag():
                changed = True
                # One that is frozen now may have some, of earlier backwards or of this one.
                for gradients in self.gradients if flag else ():
                    gradients.note_frozen(param, in_backward)
        return changed

    def save_writes(self) -> list[str]:
        """Copy to the shards what users have written to unsharded parameters, which have values; returns these
        parameters' names.

        Shards that were written after they were gathered are newer, and stay as they are.
        """
        touched = [bucket for bucket in self.buckets if bucket.is_touched()]
        if not touched:  # nearly always
            return []
        current = self.epoch in self._epochs
        saved = [name for bucket in touched for name in bucket.save_writes(current)]
        if saved:
            self._epochs = self._epochs._replace(saved=self.epoch)
        return saved

    def _save_writes_in_step(self) -> list[str]:
        if any(kept is not None and kept.is_there for kept in self._kept):
            return []  # the unsharded parameters have no values
        saved = self.save_writes()
        if saved:
            self._remarked.update(remark_on_writes(saved, self._remarked))
        return saved

    def _prepare(self) -> None:
        """Compute everything that is the same in every step."""
        self.registration.show_replaced()
        if any(bucket.is_meta for bucket in self.buckets):
            return
        for bucket in self.buckets:
            bucket.prepare()
        for param in self.params:
            param.set_requires_grad(param.requires_grad)
        if self.settings.parks_state:
            for param in self.params:
                park_state_of(param.sharded, self.settings)
        for bucket in self.buckets:
            for param in bucket.params:
                param.sharded.__dict__[WRITTEN] = bucket.move_epoch
        self._parts = self._parts._replace(kept=(), prepared=True)

    def check_ready(self) -> None:
        """Raise if parameters are on the meta device."""
        if self._parts.prepared or not self.params:
            return
        names = [p.name for b in self.buckets if b.is_meta for p in b.params]
        raise FSDPError(
            "FSDP parameters should be materialized from meta device before training, but the following were still on "
            f"meta device: {names}; call module.to_empty(device=...) and give them values (reset_parameters() of each "
            "module, or load a state dict) before the first forward"
        )

    def lends(self, tensor: Tensor) -> bool:
        """Whether the tensor is in memory of unsharded parameters, which will be freed."""
        local = local_of(tensor)
        return any(bucket.owns(local) for bucket in self.buckets)

    def arrange_again(self) -> None:
        """Put the parameters into new buckets, because communication has changed. Called while they are sharded."""
        self._arrange(self.gradients)

    # ------------------------------------------------------------------ gathers

    def gather(self) -> None:
        """Start to gather the shards of all ranks."""
        self.check_ready()
        self._stepped = False
        before, now = self._epochs.gathered, self.epoch
        if before != now:
            self._epochs = self._epochs._replace(gathered=now)
            for bucket in self.buckets:
                if not bucket.aliased:
                    bucket.count_new_values()
        self._gather_from(self.buckets, self.in_place)

    def gather_kept(self) -> None:
        """Start to gather the kept parts over smaller meshes, and the shards of parameters without one."""
        both = zip(self.buckets, self._kept, strict=True)
        self._gather_from([bucket if kept is None else kept for bucket, kept in both])

    def _gather_from(self, sources: Sequence[Bucket | Kept], in_place: bool = False) -> None:
        comm, numbered = self._comm, enumerate(sources)
        self._pending.extend([(x, x.gather(comm, comm.tag(i), in_place)) for i, x in numbered if not x.aliased])

    def copy_out(self) -> None:
        """Wait for the gather, fill the unsharded parameters, and register them."""
        self.check_ready()  # here, because shards that are used directly are not gathered
        # Whether the sizes of what is gathered become known now.
        for bucket in self.buckets:
            if isinstance(bucket, ExtendedBucket) and not bucket.knows_sizes:
                self._flags_changed = True
        for source, pending in self._pending:
            source.receive(pending)
            self._comm.end(pending)
        self._pending.clear()
        self._drop_kept()
        self.show()

    def show(self) -> None:
        """Register the unsharded parameters, which have values."""
        self.registration.show([param.unsharded for param in self.params])

    def rest(self) -> bool:
        """Register the sharded parameters until the next use, and keep the memory of the others: of the unsharded ones,
        or of the kept parts. Returns whether shards were written to."""
        saved = self._save_writes_in_step()
        for kept in self._kept:
            if kept is not None:
                kept.copy_flags()
        self._show_sharded()
        return bool(saved)

    def with_own_gradients(self) -> list[ShardedParameter]:
        """Parameters whose unsharded form has a gradient, though no backward is under way that would reduce it."""
        return [p for p in self.params if p.unsharded_local.grad is not None]

    def with_gradients_of_kept_parts(self) -> list[str]:
        """The names of parameters whose kept part got a gradient in this backward."""
        return [name for kept in self._kept if kept is not None for name in kept.with_gradients()]

    def has_sharded_gradients(self) -> bool:
        """Whether a sharded parameter has a gradient."""
        return any(has_gradient(param.sharded) for param in self.params)

    def free(self) -> bool:
        """Free the memory of the unsharded parameters, or of the kept parts, and register the sharded ones; returns
        whether shards may have been written to."""
        saved = self._save_writes_in_step()
        self._free()
        return bool(saved or self._kept)  # perhaps it was written to before a part was kept

    def _free(self) -> None:
        for bucket in self.buckets:
            bucket.free()
        self._drop_kept()
        self._show_sharded()

    def _show_sharded(self) -> None:
        if self.registration.shows_sharded:
            return
        self._flags_changed |= self._follow_faces(in_backward())  # users have had the others in their hands
        self.registration.show_sharded()

    def keep(self) -> None:
        """Keep this rank's parts over smaller meshes, and free the rest."""
        self._save_writes_in_step()
        if not self._kept:
            found = self._inner_of_buckets()
            kept_parts = [None if inner is None else Kept(bucket, inner) for bucket, inner in found]
            self._parts = self._parts._replace(kept=kept_parts)
        faces: dict[int, Any] = {}
        for bucket, kept in zip(self.buckets, self._kept, strict=True):
            if kept is not None:
                faces.update(kept.take())
            bucket.free()
        self.registration.show([faces.get(id(p), p.sharded) for p in self.params])

    def was_written_since_forward(self) -> bool:
        """Whether shards were written, or what is kept of them over a smaller mesh."""
        return self.epoch != self._epochs.gathered or any(kept is not None and kept.is_written for kept in self._kept)

    def _drop_kept(self) -> None:
        for kept in self._kept:
            if kept is not None:
                kept.drop()

    def discard(self) -> None:
        """Drop a gather that is not needed any more."""
        pending = list(self._pending)
        self._pending.clear()
        if not pending:
            return
        with ExitStack() as also_if_one_raises:
            for bucket in self.buckets:  # they have memory if the gather was in place
                also_if_one_raises.callback(bucket.free)
            for _, one in pending:
                also_if_one_raises.callback(self._comm.end, one)

    # ------------------------------------------------------------------ gradients

    def has_gradients(self) -> bool:
        """Whether there are unsharded gradients, or ranks may have some of earlier backwards."""
        return self._parts.prepared and any(gradients.any() for gradients in self.gradients)

    @property
    def waiting(self) -> bool:
        """Whether ranks may have gradients of earlier backwards that are not reduced yet."""
        return any(gradients.waiting for gradients in self.gradients)

    def keep_gradients(self) -> None:
        """Note that a backward has ended of which ranks may have gradients, and which did not reduce them."""
        for gradients in self.gradients:
            gradients.waiting = gradients.plan() is not None

    def has_partial(self) -> bool:
        """Whether there are gradients that are reduced over the shards, and not yet over the replicas."""
        return any(gradients.partial is not None for gradients in self.gradients)

    def accumulated(self, param: ShardedParameter) -> Tensor | None:
        """The gradient of a parameter that backwards have added up without reducing it."""
        return next((g.accumulated(param) for g in self.gradients if param in g.bucket.params), None)

    def abandon(self, group: Group) -> None:
        """Drop the gradients of a group that are not reduced yet."""
        for gradients in self.gradients:
            gradients.abandon(set(group.params))

    def reduce(self) -> None:
        """Start the reduce-scatter."""
        for i, gradients in enumerate(self.gradients):
            gradients.reduce(self._comm, self._comm.tag(i) + 1)

    accumulate, pack, all_reduce = map(_on_all, (Gradients.accumulate, Gradients.pack, Gradients.all_reduce))
    store, release, finish = map(_on_all, (Gradients.store, Gradients.release, Gradients.finish))
    settle = _on_all(Gradients.settle)

    def hand_over(self) -> None:
        """Set `.grad` of the sharded parameters."""
        for gradients in self.gradients:
            self._flags_changed |= gradients.hand_over()

    # ------------------------------------------------------------------ after a failure

    def reset(self, where: Where, *, gradients: bool) -> None:
        """Register sharded parameters after a failure; with `gradients`, also drop unsharded gradients."""
        with ExitStack() as also_if_one_raises:  # the last callback runs first
            also_if_one_raises.callback(self._free)
            if where.is_whole:
                for bucket in self.buckets:
                    also_if_one_raises.callback(bucket.put_back)
            for each in self.gradients:
                if gradients:
                    also_if_one_raises.callback(each.abandon, set(self.params))
                also_if_one_raises.callback(each.discard)
            also_if_one_raises.callback(self.discard)
