"""What most readers have in common: they carry out a plan as it is, and have done so when `read_data` returns."""

from __future__ import annotations

import abc

from torch.futures import Future

from terrazzo.checkpoint.planner import LoadPlan, LoadPlanner
from terrazzo.checkpoint.storage import StorageReader


class PlainReader(StorageReader):
    """A reader that does not change plans. Subclasses have `_carry_out`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._carry_out(plan, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @abc.abstractmethod
    def _carry_out(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read every item of the plan into the planner's tensors."""
