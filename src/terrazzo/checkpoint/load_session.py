"""One load on one rank.

The usual load talks to nobody: the rank reads the table of contents, plans what it needs and reads it.  Only a
planner with a global step, or somebody else's storage, brings the ranks together.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from terrazzo.checkpoint.collector import paused_collector
from terrazzo.checkpoint.coordination import Place, StepFailed
from terrazzo.checkpoint.events import operation
from terrazzo.checkpoint.load_planner import DefaultLoadPlanner
from terrazzo.checkpoint.metadata import STATE_DICT_TYPE
from terrazzo.checkpoint.planner import LoadPlan, LoadPlanner
from terrazzo.checkpoint.storage import StorageReader


@dataclass(slots=True)
class LoadSession:
    """The state of one load on one rank."""

    planner: LoadPlanner
    reader: StorageReader
    place: Place
    checkpoint_id: Any

    def run(self, state_dict: STATE_DICT_TYPE) -> None:
        """Load into the state dict, in place."""
        with operation("load", self.checkpoint_id, self.place.rank) as event:
            if getattr(self.planner, "plans_alone", False) and getattr(self.reader, "plans_alone", False):
                self._read(self._local_plan(state_dict))
            else:
                try:
                    self._load_together(state_dict)
                except StepFailed as failed:
                    raise failed.error from failed.error.__cause__
            event.bytes = getattr(self.reader, "bytes_read", 0)
            if isinstance(self.planner, DefaultLoadPlanner):
                self.planner.write_back()

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

    def _load_together(self, state_dict: STATE_DICT_TYPE) -> None:
        def plan() -> bytes:
            return pickle.dumps(self._local_plan(state_dict))

        def combine(parts: list[bytes]) -> list[bytes]:
            plans = self.planner.create_global_plan([pickle.loads(part) for part in parts])
            return [pickle.dumps(part) for part in self.reader.prepare_global_plan(plans)]

        central = pickle.loads(self.place.reduce_scatter(plan, combine))

        def read() -> bytes:
            self._read(central)
            return b""

        self.place.all_gather(read)
