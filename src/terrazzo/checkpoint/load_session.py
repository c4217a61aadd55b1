"""One load on one rank.

The usual load talks to nobody: the rank reads the table of contents, plans what it needs and reads it.  Only a
planner with a global step, or somebody else's storage, brings the ranks together; then an error of one rank is the
same `CheckpointException` on all of them, and `load` returns on none before it has been carried out on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from terrazzo.checkpoint import messages
from terrazzo.checkpoint.collector import paused_collector
from terrazzo.checkpoint.coordination import Place, StepFailed
from terrazzo.checkpoint.events import operation
from terrazzo.checkpoint.failures import exception_of, failure_of
from terrazzo.checkpoint.load_planner import DefaultLoadPlanner
from terrazzo.checkpoint.metadata import STATE_DICT_TYPE
from terrazzo.checkpoint.planner import LoadPlan, LoadPlanner
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.errors import CheckpointIOError, TerrazzoError


@dataclass(slots=True)
class LoadSession:
    """The state of one load on one rank."""

    planner: LoadPlanner
    reader: StorageReader
    place: Place
    checkpoint_id: Any

    @property
    def together(self) -> bool:
        """Whether ranks wait for each other."""
        return not (getattr(self.planner, "plans_alone", False) and getattr(self.reader, "plans_alone", False))

    def run(
        self, state_dict: Callable[[], STATE_DICT_TYPE], give_back: Callable[[STATE_DICT_TYPE], None] = lambda _: None
    ) -> None:
        """Load into what `state_dict()` returns, in place, and hand it to `give_back`."""
        with operation("load", self.checkpoint_id, self.place.global_rank) as event:
            try:
                self._run(state_dict, give_back)
            finally:
                if isinstance(self.planner, DefaultLoadPlanner):
                    self.planner.forget()
            event.bytes = getattr(self.reader, "bytes_read", 0)

    def _run(self, state_dict: Callable[[], STATE_DICT_TYPE], give_back: Callable[[STATE_DICT_TYPE], None]) -> None:
        if not self.together:
            with self._explained():
                values = state_dict()
                self._read(self._local_plan(values))
            self._finish(values, give_back)
            return
        try:
            with self.place.guarded():
                self._load_together(state_dict, give_back)
        except StepFailed as failed:
            raise failed.error from failed.error.__cause__

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors as the exception that ranks raise together, which says on which rank and of which checkpoint."""
        try:
            yield
        except Exception as error:
            raised = error
            if isinstance(error, OSError | EOFError) and not isinstance(error, TerrazzoError):
                raised = CheckpointIOError(str(error)).with_traceback(error.__traceback__)
            failure = failure_of(raised, self.place.global_rank)
            raise exception_of([failure], self.place.doing, error) from error

    def _local_plan(self, state_dict: STATE_DICT_TYPE) -> LoadPlan:
        metadata = self.reader.read_metadata()
        if isinstance(self.planner, DefaultLoadPlanner):
            self.planner.set_up_ranks(self.place.rank, self.place.ranks)
        self.planner.set_up_planner(state_dict, metadata, self.place.is_coordinator)
        self.reader.set_up_storage_reader(metadata, self.place.is_coordinator)
        with paused_collector():
            return self.reader.prepare_local_plan(self.planner.create_local_plan())

    def _read(self, plan: LoadPlan) -> None:
        self.reader.read_data(self.planner.finish_plan(plan), self.planner).wait()

    def _finish(self, values: STATE_DICT_TYPE, give_back: Callable[[STATE_DICT_TYPE], None]) -> None:
        if isinstance(self.planner, DefaultLoadPlanner):
            self.planner.write_back()
        give_back(values)

    def _load_together(
        self, state_dict: Callable[[], STATE_DICT_TYPE], give_back: Callable[[STATE_DICT_TYPE], None]
    ) -> None:
        values: STATE_DICT_TYPE = {}

        def plan() -> bytes:
            nonlocal values
            values = state_dict()
            return messages.encode(self._local_plan(values))

        def combine(parts: list[bytes]) -> list[bytes]:
            plans = self.planner.create_global_plan([messages.decode(part, LoadPlan) for part in parts])
            return [messages.encode(part) for part in self.reader.prepare_global_plan(plans)]

        central = messages.decode(self.place.reduce_scatter(plan, combine), LoadPlan)
        # Nothing is handed to objects of the caller before every rank has read.
        self.place.together(lambda: self._read(central))
        self.place.together(lambda: self._finish(values, give_back))
