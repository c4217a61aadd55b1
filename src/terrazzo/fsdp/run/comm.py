"""What a unit's collectives are done with: an interface, and its usual implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from terrazzo.comm import observe, wire
from terrazzo.comm.axis import Axis
from terrazzo.comm.collectives import all_reduce_start
from terrazzo.comm.pending import Pending
from terrazzo.fsdp.run.direct import start_gather, start_reduce
from terrazzo.fsdp.run.flat import FlatPlan
from terrazzo.fsdp.settings import Options, Staging


class Comm(Protocol):
    """Begins collectives. Ranks call them in the same order with the same plans."""

    def gather(self, part: Tensor, plan: FlatPlan, axis: Axis, tag: int) -> Pending[Tensor]:
        """Begin to collect the sections of all ranks, one after the other; `part` is this rank's."""

    def reduce(self, sections: Tensor, plan: FlatPlan, axis: Axis, op: str, tag: int) -> Pending[Tensor]:
        """Begin to reduce `sections`, each to the rank that it is for; `op` is sum or avg."""

    def all_reduce(self, section: Tensor, axis: Axis, op: str) -> Pending[Tensor]:
        """Begin to reduce over the replicas."""


class OwnComm:
    """Collectives of the user's, or in memory that the user asked for, where there are some; sections are equally
    long."""

    def __init__(self, usual: Comm, options: Options) -> None:
        self._usual, self._options = usual, options

    def gather(self, part: Tensor, plan: FlatPlan, axis: Axis, tag: int) -> Pending[Tensor]:
        own, staging = self._options.all_gather, staging_for(self._options, axis, part.device)
        if axis.group is None or (own is None and staging is None):
            return self._usual.gather(part, plan, axis, tag)
        if observe.observers:
            nbytes = plan.total * part.element_size()
            observe.report("all_gather", axis, (axis.size - 1) * nbytes // axis.size, None, True)
        if own is not None:
            gathered = own.allocate((plan.total,), dtype=part.dtype, device=part.device)
            work = own(output_tensor=gathered, input_tensor=part, group=axis.group, async_op=True)
        else:
            assert staging is not None
            gathered = staging.empty(plan.total, part.dtype, part.device, axis)
            staging.announce(gathered, axis)
            work = wire.all_gather(axis, gathered, part)
        return Pending("all_gather", axis, work, gathered)

    def reduce(self, sections: Tensor, plan: FlatPlan, axis: Axis, op: str, tag: int) -> Pending[Tensor]:
        options = self._options
        own, staging = options.reduce_scatter, staging_for(options, axis, sections.device, reduces=True)
        if axis.group is None or (own is None and staging is None):
            if not self._sums(op, axis):
                return self._usual.reduce(sections, plan, axis, op, tag)
            return _mean(self._usual.reduce(sections, plan, axis, "sum", tag), axis)
        if observe.observers:
            observe.report("reduce_scatter", axis, (axis.size - 1) * sections.nbytes // axis.size, op, True)
        averages = op == "avg" and not options.force_sum and not sections.is_cpu
        if own is not None:
            reduced = own.allocate((plan.own_size,), dtype=sections.dtype, device=sections.device)
            native = ReduceOp.AVG if averages else ReduceOp.SUM
            work = own(output_tensor=reduced, input_tensor=sections, group=axis.group, op=native, async_op=True)
        else:
            assert staging is not None
            averages = averages and wire.averages(axis, sections)
            reduced = staging.empty(plan.own_size, sections.dtype, sections.device, axis)
            staging.announce(sections, axis)
            staging.announce(reduced, axis)
            work = wire.reduce_scatter(axis, reduced, sections, "avg" if averages else "sum")
        pending = Pending("reduce_scatter", axis, work, reduced)
        return _mean(pending, axis) if op == "avg" and not averages else pending

    def all_reduce(self, section: Tensor, axis: Axis, op: str) -> Pending[Tensor]:
        if not self._sums(op, axis):
            return self._usual.all_reduce(section, axis, op)
        return _mean(self._usual.all_reduce(section, axis, "sum"), axis)

    def _sums(self, op: str, axis: Axis) -> bool:
        """Whether a mean has to be a sum, divided afterwards, for those who ask for sums alone."""
        return op == "avg" and self._options.force_sum and axis.size > 1


def _mean(total: Pending[Tensor], axis: Axis) -> Pending[Tensor]:
    """The mean of what is summed."""

    def divided() -> Tensor:
        reduced: Tensor = total.wait()
        return reduced.div_(axis.size)

    return Pending(total.kind, axis, None, torch.empty(0), divided)


def staging_for(options: Options, axis: Axis, device: torch.device, *, reduces: bool = False) -> Staging | None:
    """The memory for what is gathered or reduced along the axis; None: ordinary memory."""
    staging = options.staging
    if staging is None or not staging.serves(axis, device):
        return None
    return staging if not reduces or staging.reduces_from(options) else None


def empty_to_reduce(options: Options, numel: int, dtype: torch.dtype, device: torch.device, axis: Axis) -> Tensor:
    """Memory for gradients that are packed to be reduced along the axis."""
    staging = staging_for(options, axis, device, reduces=True)
    if staging is not None:
        return staging.empty(numel, dtype, device, axis)
    if options.reduce_scatter is not None and axis.group is not None:
        return options.reduce_scatter.allocate((numel,), dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


class Collectives:
    """Those of `terrazzo.comm` and, for large messages on CPU, messages between pairs of ranks."""

    def __init__(self, careful: Callable[[], bool] = lambda: False) -> None:
        """`careful()` tells whether ranks may want different things now: then they wait for each other."""
        self._careful = careful

    def gather(self, part: Tensor, plan: FlatPlan, axis: Axis, tag: int) -> Pending[Tensor]:
        return start_gather(part, axis, plan, tag, self._careful())

    def reduce(self, sections: Tensor, plan: FlatPlan, axis: Axis, op: str, tag: int) -> Pending[Tensor]:
        return start_reduce(sections, axis, plan, op, tag)

    def all_reduce(self, section: Tensor, axis: Axis, op: str) -> Pending[Tensor]:
        return all_reduce_start(section, axis, op)
