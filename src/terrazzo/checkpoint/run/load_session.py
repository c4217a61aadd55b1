"""One load on one rank.

Usually a load does not communicate: the rank reads the metadata, plans what it needs and reads it. If the caller asks
for it, or if the planner has a global step or the storage is not terrazzo's, the load is collective: an error of one
rank is raised as the same `CheckpointException` on all ranks, and `load` returns when all ranks are done. With
terrazzo's format the coordinator then reads the root for all ranks, so that all load the same checkpoint, even if it is
replaced meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE
from terrazzo.checkpoint.native.rows import ReadPlan
from terrazzo.checkpoint.native.storage import NativeReader
from terrazzo.checkpoint.plan.load_planner import DefaultLoadPlanner
from terrazzo.checkpoint.planner import LoadPlan, LoadPlanner
from terrazzo.checkpoint.run import messages
from terrazzo.checkpoint.run.coordination import Team, exception_of, failure_of
from terrazzo.checkpoint.run.events import operation
from terrazzo.checkpoint.run.once_per_node import Node, Passed
from terrazzo.checkpoint.storage import StorageReader
from terrazzo.checkpoint.torch_api.items import check_planner
from terrazzo.checkpoint.torch_api.storages import TargetReader
from terrazzo.comm.processes import host_identity


@dataclass(slots=True)
class LoadSession:
    """The state of one load on one rank.

    A rank may fail to find its reader, which is then an error of the load like any other: in a collective one the
    reader is found within the first step.

    Attributes:
        planner: the planner.
        given_reader: the caller's reader, before it is reset; None if the format of the checkpoint decides.
        find: finds the reader, and resets it.
        team: this rank's team, without connections.
        connect: returns the team with connections, for a collective load.
        checkpoint_id: where the checkpoint is, for messages.
        wanted_together: whether the caller asked for a collective load.
        once_per_node: whether ranks read for the others of their node.
    """

    planner: LoadPlanner
    given_reader: StorageReader | None
    find: Callable[[], StorageReader]
    team: Team
    connect: Callable[[], Team]
    checkpoint_id: Any
    wanted_together: bool = False
    once_per_node: bool = False
    _reader: StorageReader | None = None

    @property
    def reader(self) -> StorageReader:
        """The reader, found at the first access."""
        if self._reader is None:
            self._reader = self.find()
        return self._reader

    @property
    def _is_collective(self) -> bool:
        """Whether the load is collective as far as is known without a look at the checkpoint."""
        alone = _plans_alone(self.planner) and (self.given_reader is None or _plans_alone(self.given_reader))
        return self.wanted_together or self.once_per_node or not alone

    @property
    def _own(self) -> DefaultLoadPlanner | None:
        """The planner, if it is the library's or built on it."""
        return self.planner if isinstance(self.planner, DefaultLoadPlanner) else None

    def run(
        self, state_dict: Callable[[], STATE_DICT_TYPE], give_back: Callable[[STATE_DICT_TYPE], None] = lambda _: None
    ) -> None:
        """Load into the result of `state_dict()`, in place, and pass it to `give_back`."""
        with operation("load", self.checkpoint_id, self.team.global_rank) as event:
            try:
                self._run(state_dict, give_back)
            finally:
                if self._own is not None:
                    self._own.forget()
            event.bytes = getattr(self.reader, "bytes_read", 0)

    def _run(self, state_dict: Callable[[], STATE_DICT_TYPE], give_back: Callable[[STATE_DICT_TYPE], None]) -> None:
        collective = self._is_collective
        if not collective:
            with self._explained():
                collective = not _plans_alone(self.reader)
        if not collective:
            with self._explained():
                values = state_dict()
                self._read_alone(values)
            self._finish(values, give_back)
            return
        self.team = self.connect()
        with self.team.guarded():
            self._load_together(state_dict, give_back)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors into a `CheckpointException`, which names the rank and the checkpoint."""
        try:
            yield
        except Exception as error:
            failure = failure_of(error, self.team.global_rank)
            raise exception_of([failure], self.team.doing, error) from error

    def _set_up(self, state_dict: STATE_DICT_TYPE, root: bytes | None) -> None:
        check_planner(self.planner)
        reader = self.reader
        if root is not None and isinstance(reader, NativeReader):
            metadata = reader.use_root(root)
        else:
            metadata = reader.read_metadata()
        if self._own is not None:
            self._own.set_up_ranks(self.team.rank, self.team.ranks)
        self.planner.set_up_planner(state_dict, metadata, self.team.is_coordinator)
        self.reader.set_up_storage_reader(metadata, self.team.is_coordinator)

    def _items(self) -> LoadPlan:
        """This rank's plan as PyTorch's items."""
        return self.reader.prepare_local_plan(self.planner.create_local_plan())

    def _own_plan(self) -> ReadPlan | None:
        """This rank's plan in the library's own form; None if planner or reader need PyTorch's items."""
        takes = isinstance(self.reader, TargetReader) and self.reader.takes_read_plans
        return self._own.read_plan() if takes and self._own is not None else None

    def _read_alone(self, state_dict: STATE_DICT_TYPE, root: bytes | None = None) -> None:
        """Plan and read, without communication."""
        self._set_up(state_dict, root)
        self._read(self._own_plan())

    def _read(self, own: ReadPlan | None) -> None:
        if own is None:
            self._read_items(self._items())
            return
        reader, planner = self.reader, self._own
        assert isinstance(reader, TargetReader) and planner is not None
        reader.read(own, planner)

    def _read_items(self, plan: LoadPlan) -> None:
        self.reader.read_data(self.planner.finish_plan(plan), self.planner).wait()

    def _finish(self, values: STATE_DICT_TYPE, give_back: Callable[[STATE_DICT_TYPE], None]) -> None:
        if self._own is not None:
            self._own.write_back()
        give_back(values)

    def _load_together(
        self, state_dict: Callable[[], STATE_DICT_TYPE], give_back: Callable[[STATE_DICT_TYPE], None]
    ) -> None:
        values: STATE_DICT_TYPE = {}
        alone, root, nodes, name = self._agree()

        def plan() -> bytes:
            nonlocal values
            values = state_dict()
            self._set_up(values, root)
            return messages.encode(self._items())

        def read_alone() -> None:
            nonlocal values
            values = state_dict()
            self._read_alone(values, root)

        def combine(parts: list[bytes]) -> list[bytes]:
            plans = self.planner.create_global_plan([messages.decode(part, LoadPlan) for part in parts])
            return [messages.encode(part) for part in self.reader.prepare_global_plan(plans)]

        # The caller's objects get their states only when every rank has read.
        if alone and all(nodes) and self.team.plane is not None:
            values = self._read_once_per_node(nodes, name, state_dict, root, self.team.plane.timeout)
        elif alone:
            self.team.together(read_alone)
        else:
            central = messages.decode(self.team.reduce_scatter(plan, combine), LoadPlan)
            self.team.together(lambda: self._read_items(central))
        self.team.together(lambda: self._finish(values, give_back))

    def _read_once_per_node(
        self,
        nodes: list[str],
        name: str,
        state_dict: Callable[[], STATE_DICT_TYPE],
        root: bytes | None,
        timeout: timedelta,
    ) -> STATE_DICT_TYPE:
        """Read what several ranks of a node need once, and send it to them; errors are exchanged after each step."""
        values: STATE_DICT_TYPE = {}
        own: ReadPlan | None = None
        node: Node | None = None
        passed: list[Passed] = []
        here = [rank for rank, where in zip(self.team.ranks, nodes, strict=True) if where == nodes[self.team.rank]]

        def make_plan() -> None:
            nonlocal values, own
            values = state_dict()
            self._set_up(values, root)
            own = self._own_plan()

        def agree() -> None:
            nonlocal node
            node = Node(here, name, timeout)
            passed.extend(node.agree(own.targets if own is not None else ()))

        def read() -> None:
            assert node is not None
            # A custom planner's tensors need not be those of the state dict.
            self._read(None if own is None else node.own_part(own, passed))

        def pass_on() -> None:
            assert node is not None
            if own is not None:
                node.pass_on(own.targets, passed)

        try:
            for step in (make_plan, agree, read, pass_on):
                self.team.together(step)
        finally:
            if node is not None:
                node.close()
        return values

    def _agree(self) -> tuple[bool, bytes | None, list[str], str]:
        """Whether each rank can plan for itself; the root, read by the coordinator, if all readers take one; the name
        of each rank's node, for `once_per_node`; and a name that is unique to this load."""

        def step() -> bytes:
            node = host_identity() if self.once_per_node else ""
            alone = _plans_alone(self.planner) and _plans_alone(self.reader)
            return msgspec.msgpack.encode((alone, isinstance(self.reader, NativeReader), node))

        def combine(parts: list[bytes]) -> bytes:
            said = [msgspec.msgpack.decode(part, type=tuple[bool, bool, str]) for part in parts]
            reader = self.reader
            root = reader.root() if isinstance(reader, NativeReader) and all(takes for _, takes, _ in said) else None
            nodes = [node for _, _, node in said]
            return msgspec.msgpack.encode((all(alone for alone, _, _ in said), root, nodes, uuid.uuid4().hex))

        return msgspec.msgpack.decode(self.team.reduce(step, combine), type=tuple[bool, bytes | None, list[str], str])


def _plans_alone(one: LoadPlanner | StorageReader) -> bool:
    """Whether a planner or a reader has no global step."""
    return bool(getattr(one, "plans_alone", False))
