"""The collectives of a unit, and the memory that they use."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from terrazzo.comm import wire
from terrazzo.comm.axis import Axis
from terrazzo.comm.flat import FlatPlan
from terrazzo.comm.pending import Pending
from terrazzo.comm.sections import FIRST_TAG, place, report_collective, start_gather, start_reduce
from terrazzo.fsdp.group import Group
from terrazzo.fsdp.run.division import Ways
from terrazzo.fsdp.run.staging import DoubleBuffers, GroupMemory
from terrazzo.fsdp.settings import Options


class Comm:
    """Starts the collectives of a unit: the user's own, or terrazzo's, in special memory if there is some. For the
    user's own and for special memory sections have equal length. All ranks must call them in the same order with the
    same plans."""

    def __init__(self, group: Group) -> None:
        """`group` is the unit's first one."""
        self._group = group

    def tag(self, bucket: int) -> int:
        """The tag of a bucket's gather; the next one is that of its reduction."""
        return FIRST_TAG + self._group.number % (1 << 25) * 16 + bucket % 8 * 2

    def gather(self, part: Tensor, plan: FlatPlan, axis: Axis, tag: int, like: Tensor | None = None) -> Pending[Tensor]:
        """Start to gather the sections of all ranks; `part` is this rank's. The result has the dtype and device of
        `like`, or of `part`."""
        options, wanted = self._group.options, part if like is None else like
        own, staging = options.all_gather, staging_for(options, axis, wanted.device)
        if axis.group is None or (own is None and staging is None and buffers_for(options, axis) is None):
            # Until ranks have compared what they run, they may be about to call different collectives: messages with
            # tags cannot be mixed up.
            return start_gather(part, axis, plan, tag, not self._group.root.watch.has_agreed, like)
        report_collective("all_gather", axis, plan, wanted, None)
        gathered = empty_for("gathered", options, plan.total, wanted.dtype, wanted.device, axis)
        if staging is not None:
            staging.announce(gathered, axis)
        sent = place(part, gathered, plan)  # what is sent must lie in special memory, too
        if own is not None:
            work = own(output_tensor=gathered, input_tensor=sent, group=axis.group, async_op=True)
        else:
            work = wire.all_gather(axis, gathered, sent)
        return Pending("all_gather", axis, work, gathered)

    def end(self, gather: Pending[Tensor]) -> None:
        """Wait for a gather whose result is not needed any more, so that its buffer may be used again."""
        gathered = gather.wait()
        if self._group.options.buffers is not None:
            self._group.options.buffers.give_back(gathered)

    def reduce(
        self, sections: Tensor, plan: FlatPlan, axis: Axis, op: str | wire.ScaledSum, tag: int
    ) -> Pending[Tensor]:
        """Start to reduce `sections`, each to its rank; `op` is from the `Division`."""
        options = self._group.options
        own, staging = options.reduce_scatter, staging_for(options, axis, sections.device, reduces=True)
        if axis.group is None or (own is None and staging is None):
            return start_reduce(sections, axis, plan, op, tag)
        report_collective("reduce_scatter", axis, plan, sections, op if isinstance(op, str) else "sum")
        reduced = empty_for("reduced", options, plan.own_size, sections.dtype, sections.device, axis)
        if own is not None:
            native = wire.reduce_op(op)
            work = own(output_tensor=reduced, input_tensor=sections, group=axis.group, op=native, async_op=True)
        else:
            assert staging is not None
            staging.announce(sections, axis)
            staging.announce(reduced, axis)
            work = wire.reduce_scatter(axis, reduced, sections, op)
        return Pending("reduce_scatter", axis, work, reduced)


def ways_to_reduce(options: Options, axis: Axis, like: Tensor) -> Ways:
    """How tensors like this can be reduced along the axis."""
    if options.force_sum:
        return Ways.SUMS
    if options.reduce_scatter is not None:  # a custom one is called with the ops with which PyTorch calls it
        return Ways.SUMS if like.is_cpu else Ways.NATIVE
    if wire.averages(axis, like):
        return Ways.NATIVE
    return Ways.EXACT if like.is_cpu and staging_for(options, axis, like.device, reduces=True) is None else Ways.SUMS


def staging_for(options: Options, axis: Axis, device: torch.device, *, reduces: bool = False) -> GroupMemory | None:
    """The special memory for gathers or reductions along the axis; None: ordinary memory."""
    staging = options.staging
    if staging is None or not staging.serves(axis, device):
        return None
    return None if reduces and staging.only_sums and not options.force_sum else staging


def buffers_for(options: Options, axis: Axis) -> DoubleBuffers | None:
    """The double buffers for this axis; none for a rank alone, whose packed gradients are their reduction's result."""
    return None if axis.size == 1 else options.buffers


def empty_for(
    what: Literal["gathered", "packed", "reduced"],
    options: Options,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    axis: Axis,
) -> Tensor:
    """A buffer for the result of a gather, for packed gradients, or for the result of their reduction."""

    def make() -> Tensor:
        own = options.all_gather if what == "gathered" else options.reduce_scatter
        staging = staging_for(options, axis, device, reduces=what != "gathered")
        if own is not None and axis.group is not None:
            return own.allocate((numel,), dtype=dtype, device=device)
        if staging is not None:
            return staging.empty(numel, dtype, device, axis)
        return torch.empty(numel, dtype=dtype, device=device)

    buffers = None if what == "reduced" else buffers_for(options, axis)  # results may become gradients, which stay
    return make() if buffers is None else buffers.take((what, numel, dtype, device, axis), make)
