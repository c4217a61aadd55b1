"""Units whose parameters are gathered, and whose gradients are reduced, in one message for each dtype.

A rank's section is then the units' sections one after the other. Shards and unsharded parameters have the same
positions as without. The units do everything except communication themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from terrazzo.comm.pending import Pending
from terrazzo.fsdp.run.bucket import Bucket
from terrazzo.fsdp.run.flat import FlatPlan
from terrazzo.fsdp.run.gradients import Gradients
from terrazzo.fsdp.run.unit import Unit


class _Gather:
    """The joint gather of buckets of one dtype."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)
        self._axis = buckets[0].settings.mesh.shard
        self._plan = self._joined()
        self._pieces: list[Tensor] = []
        self._filled: list[Tensor | None] = []  # the buffers of which `pieces` are views
        self._pending: Pending[Tensor] | None = None

    def _joined(self) -> FlatPlan:
        first = self.buckets[0]
        plans = [bucket.plan for bucket in self.buckets]
        shapes = [shape for plan in plans for shape in plan.shapes]
        dims = [dim for plan in plans for dim in plan.dims]
        return FlatPlan(shapes, dims, self._axis.size, self._axis.index, first.plan.equal)

    def begin(self, unit: Unit) -> None:
        first = self.buckets[0]
        part = torch.cat([bucket.to_send(bucket.shard) for bucket in self.buckets])
        self._pending = unit.comm.gather(part, self._plan, self._axis, first.tag)
        if unit.waits_at_once:
            self._pending.wait()

    def copy_out(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        gathered = pending.wait()
        buffers = [bucket.take() for bucket in self.buckets]
        if len(self._filled) != len(buffers) or any(a is not b for a, b in zip(buffers, self._filled, strict=True)):
            self._filled = buffers
            self._pieces = self._plan.pieces([t.data for bucket in self.buckets for t in bucket.unsharded_locals()])
        self._plan.unpack(gathered, self._pieces)

    def discard(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


class _Reduction:
    """The joint reduction of gradients of one dtype."""

    def __init__(self, members: Sequence[Gradients]) -> None:
        self._members = tuple(members)
        self._plans: list[FlatPlan] = []
        self._plan: FlatPlan | None = None
        self._packed: Tensor | None = None
        self._pending: Pending[Tensor] | None = None
        self._reduced: Tensor | None = None
        self._held: Tensor | None = None

    def pack(self) -> None:
        plans = [plan for each in self._members if (plan := each.plan()) is not None]
        if not plans:
            self._plan = None
            return
        if plans != self._plans:
            first, self._plans = plans[0], plans
            self._plan = FlatPlan(
                [shape for plan in plans for shape in plan.shapes],
                [dim for plan in plans for dim in plan.dims],
                first.n,
                first.index,
                first.equal,
                sum(plan.extra for plan in plans),
            )
        plan = self._plan
        assert plan is not None
        wholes: list[Tensor] = []
        reached: list[Tensor] = []
        for each in self._members:
            if each.plan() is not None:
                some, counts = each.collect()
                wholes += some
                reached += [] if counts is None else [counts]
        first_of = self._members[0]
        device = first_of.bucket.settings.mesh.device
        self._packed = torch.empty(plan.total, dtype=first_of.dtype, device=device)
        plan.pack(wholes, self._packed, torch.cat(reached) if reached else None)

    def reduce(self, unit: Unit) -> None:
        plan, packed = self._plan, self._packed
        if plan is None or packed is None:
            return
        first = self._members[0]
        for each in self._members:
            division = each.decide(packed, plan)
        if division.before is not None:
            packed.div_(division.before)
        mesh = first.bucket.settings.mesh
        self._pending = unit.comm.reduce(packed, plan, mesh.shard, division.shards, first.bucket.tag + 1)
        self._wait_if_at_once(unit)

    def _wait_if_at_once(self, unit: Unit) -> None:
        if unit.waits_at_once and self._pending is not None:
            self._reduced, self._pending = self._pending.wait(), None

    def _wait(self) -> Tensor | None:
        if self._pending is not None:
            self._reduced, self._pending = self._pending.wait(), None
        return self._reduced

    def all_reduce(self, unit: Unit) -> None:
        reduced = self._wait()
        first = self._members[0]
        replicate = first.bucket.settings.mesh.replicate
        if reduced is None or replicate is None:
            return
        for each, chunks, counts in self._parts(reduced):
            each.add_partial(chunks, counts)
        self._held = reduced
        self._pending = unit.comm.all_reduce(reduced, replicate, first.division.replicas)
        self._wait_if_at_once(unit)

    def _parts(self, reduced: Tensor) -> list[tuple[Gradients, Tensor, Tensor | None]]:
        """For each member its chunks, and the element counts that say which parameters have gradients."""
        plan = self._plan
        assert plan is not None
        found = []
        begin, counted = 0, plan.own_size - plan.extra
        for each in self._members:
            own = each.running_plan
            if own is None:
                continue
            end, until = begin + own.own_size - own.extra, counted + own.extra
            found.append((each, reduced[begin:end], reduced[counted:until] if own.extra else None))
            begin, counted = end, until
        return found

    def release(self) -> None:
        self._packed = None

    def finish(self) -> None:
        reduced = self._wait()
        if reduced is None:
            return
        for each, chunks, counts in self._parts(reduced):
            each.receive(chunks, counts)
        self._reduced = None

    def forget(self) -> None:
        self._packed = self._held = None

    def discard(self) -> None:
        pending, self._pending = self._pending, None
        self._packed = self._reduced = self._held = None
        if pending is not None:
            pending.wait()


class Bundle:
    """Several units of one kin, in order, with the interface of a unit."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        self._known: list[object] = []
        self._gathers: list[_Gather] = []
        self._reductions: list[_Reduction] = []

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.units[0].name} and {len(self.units) - 1} more"

    @property
    def code(self) -> int:
        """As that of a unit."""
        return hash(tuple(unit.code for unit in self.units))

    def _arrange(self) -> None:
        """Group buckets by dtype; again if users have replaced parameters."""
        known: list[object] = [bucket.plan for unit in self.units for bucket in unit.buckets]
        known += [bucket.dtype for unit in self.units for bucket in unit.buckets]
        if known == self._known:
            return
        self._known = known
        buckets: dict[object, list[Bucket]] = {}
        gradients: dict[object, list[Gradients]] = {}
        for unit in self.units:
            for bucket, each in zip(unit.buckets, unit.gradients, strict=True):
                key = (bucket.dtype, bucket.plan.equal)
                buckets.setdefault(key, []).append(bucket)
                gradients.setdefault((*key, each.dtype), []).append(each)
        self._gathers = [_Gather(members) for members in buckets.values()]
        self._reductions = [_Reduction(members) for members in gradients.values()]

    def gather(self) -> None:
        """Start to gather the shards of all ranks."""
        self._arrange()
        for unit in self.units:
            unit.check_ready()
            unit.note_gather()
        for each in self._gathers:
            each.begin(self.units[0])

    def copy_out(self) -> None:
        """Wait for the gather, fill the unsharded parameters of all units, and register them."""
        for each in self._gathers:
            each.copy_out()
        for unit in self.units:
            unit.show_unsharded()

    def pack(self) -> None:
        """Copy unsharded gradients into the buffer that is reduced."""
        self._arrange()
        for each in self._reductions:
            each.pack()

    def reduce(self) -> None:
        """Start the reduce-scatter."""
        for each in self._reductions:
            each.reduce(self.units[0])

    def all_reduce(self) -> None:
        """Start to reduce over the replicas."""
        for each in self._reductions:
            each.all_reduce(self.units[0])

    def release(self) -> None:
        """Free the packed buffer."""
        for each in self._reductions:
            each.release()

    def finish(self) -> None:
        """Give each unit its reduced gradients, and let it finish them."""
        for each in self._reductions:
            each.finish()
        for unit in self.units:
            unit.finish()

    def hand_over(self) -> None:
        """Set `.grad` of the sharded parameters."""
        for each in self._reductions:
            each.forget()
        for unit in self.units:
            unit.hand_over()

    def discard(self) -> None:
        """After a failure: wait for running communication, and drop its results."""
        with ExitStack() as also_if_one_raises:
            for gather in self._gathers:
                also_if_one_raises.callback(gather.discard)
            for reduction in self._reductions:
                also_if_one_raises.callback(reduction.discard)
