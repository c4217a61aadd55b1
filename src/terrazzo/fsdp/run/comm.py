"""What a unit's collectives are done with: an interface, and its usual implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.distributed import ReduceOp

from terrazzo.comm import observe
from terrazzo.comm.axis import Axis
from terrazzo.comm.collectives import all_reduce_start
from terrazzo.comm.pending import Pending
from terrazzo.fsdp.run.direct import start_gather, start_reduce
from terrazzo.fsdp.run.flat import FlatPlan
from terrazzo.fsdp.settings import Options


class Comm(Protocol):
    """Begins collectives. Ranks call them in the same order with the same plans."""

    def gather(self, part: Tensor, plan: FlatPlan, axis: Axis, tag: int) -> Pending[Tensor]:
        """Begin to collect the sections of all ranks, one after the other; `part` is this rank's."""

    def reduce(self, sections: Tensor, plan: FlatPlan, axis: Axis, op: str, tag: int) -> Pending[Tensor]:
        """Begin to reduce `sections`, each to the rank that it is for; `op` is sum or avg."""

    def all_reduce(self, section: Tensor, axis: Axis, op: str) -> Pending[Tensor]:
        """Begin to reduce over the replicas."""


class OwnComm:
    """Collectives of the user's, where there are some; sections are equally long."""

    def __init__(self, usual: Comm, options: Options) -> None:
        self._usual, self._options = usual, options

    def gather(self, part: Tensor, plan: FlatPlan, axis: Axis, tag: int) -> Pending[Tensor]:
        own = self._options.all_gather
        if own is None or axis.group is None:
            return self._usual.gather(part, plan, axis, tag)
        if observe.observers:
            nbytes = plan.total * part.element_size()
            observe.report("all_gather", axis, (axis.size - 1) * nbytes // axis.size, None, True)
        gathered = own.allocate((plan.total,), dtype=part.dtype, device=part.device)
        work = own(output_tensor=gathered, input_tensor=part, group=axis.group, async_op=True)
        return Pending("all_gather", axis, work, gathered)

    def reduce(self, sections: Tensor, plan: FlatPlan, axis: Axis, op: str, tag: int) -> Pending[Tensor]:
        own = self._options.reduce_scatter
        if own is None or axis.group is None:
            return self._usual.reduce(sections, plan, axis, op, tag)
        if observe.observers:
            observe.report("reduce_scatter", axis, (axis.size - 1) * sections.nbytes // axis.size, op, True)
        averages = op == "avg" and not self._options.force_sum and not sections.is_cpu
        reduced = own.allocate((plan.own_size,), dtype=sections.dtype, device=sections.device)
        native = ReduceOp.AVG if averages else ReduceOp.SUM
        work = own(output_tensor=reduced, input_tensor=sections, group=axis.group, op=native, async_op=True)
        divides = op == "avg" and not averages
        finish = (lambda: reduced.div_(axis.size)) if divides else None
        return Pending("reduce_scatter", axis, work, reduced, finish)

    def all_reduce(self, section: Tensor, axis: Axis, op: str) -> Pending[Tensor]:
        return self._usual.all_reduce(section, axis, op)


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
