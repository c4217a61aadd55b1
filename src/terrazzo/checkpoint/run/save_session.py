"""One save, from plan to commit, on one rank.

    1. every rank plans what it could write, and sends the coordinator a small message
    2. usually each rank computes which part it writes (`ownership`); if the planner or the storage needs the plans
       of all ranks, the coordinator does (`torch_api.items`)
    3. every rank writes its part, durably
    4. when all have, the coordinator commits the checkpoint by one atomic operation

An error in any step on any rank is raised as the same exception on every rank. Before step 4 it leaves no files.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from terrazzo.checkpoint.native.containers import Paths, forms_of, merged_forms
from terrazzo.checkpoint.native.names import for_torch
from terrazzo.checkpoint.native.root import Path
from terrazzo.checkpoint.native.rows import Row
from terrazzo.checkpoint.plan.ownership import Agreement, Note, answers, groups_unsure
from terrazzo.checkpoint.plan.save_planner import DefaultSavePlanner
from terrazzo.checkpoint.planner import SavePlan, SavePlanner
from terrazzo.checkpoint.run import messages
from terrazzo.checkpoint.run.coordination import Team
from terrazzo.checkpoint.run.events import LOGGER, Event, operation
from terrazzo.checkpoint.run.locate import find_writer
from terrazzo.checkpoint.storage import StorageWriter, WriteResult, with_kwargs
from terrazzo.checkpoint.stores import Store, store_at
from terrazzo.checkpoint.torch_api.items import check_planner
from terrazzo.checkpoint.torch_api.storages import RowWriter, SaveSide
from terrazzo.errors import CheckpointError, CheckpointException, UnsupportedValueError


class _Hello(msgspec.Struct, array_like=True, frozen=True):
    """A rank is ready to save."""

    alone: bool  # planner and storage need no global step
    notes: list[Note]
    about: bytes  # the rows that it could write


class _Start(msgspec.Struct, array_like=True, frozen=True):
    """All ranks are ready."""

    arranged: bytes  # for the ranks' writers
    alone: bool
    unsure: list[int]  # groups of holders whose notes differ


@dataclass(slots=True)
class SaveSession:
    """The state of one save on one rank. `writer` and `side`, which is the writer as the save uses it, are there when
    the save has begun. If it is not `together`, each rank saves and commits its state by itself."""

    planner: SavePlanner
    given_writer: StorageWriter | None
    team: Team
    checkpoint_id: Any
    store: Store | None = None
    base: str | os.PathLike[str] | Store | None = None
    together: bool = True
    writer: StorageWriter = field(init=False, repr=False)
    side: SaveSide = field(init=False, repr=False)
    _held: Agreement | None = None  # what this rank could write
    _plan: SavePlan | None = None  # the same as items, if planner or writer need them
    _metadata: Metadata | None = None  # on the coordinator, when the checkpoint is committed
    _number: int | None = None  # of this rank, if it saves by itself

    def run(self, state_dict: Callable[[], STATE_DICT_TYPE]) -> Metadata:
        """Save the result of `state_dict()`; returns the checkpoint's metadata on every rank."""
        if not self.together:
            alone = replace(self, team=Team(0, (self.team.global_rank,), None, self.team.doing), together=True)
            alone._number = self.team.rank
            return self.team.together(partial(alone.run, state_dict))
        with operation("save", self.checkpoint_id, self.team.global_rank) as event:
            try:
                with self.team.guarded():
                    write, commit = self._planned(state_dict, event)
                    outcome = self.team.reduce(write, commit, lambda: self.side.may_abandon())
                    return self.side.describe_committed(outcome) if self._metadata is None else self._metadata
            except CheckpointException as failed:
                if getattr(failed, "_discard", False) and hasattr(self, "side"):
                    try:
                        self.side.abandon()
                    except (CheckpointError, OSError) as error:  # the error of the save itself is raised
                        LOGGER.warning("%s: files of the failed save could not be removed: %s", self.team.doing, error)
                raise
            finally:
                if self._own is not None:
                    self._own.forget()

    @property
    def _row_writer(self) -> RowWriter:
        assert isinstance(self.writer, RowWriter)
        return self.writer

    @property
    def _own(self) -> DefaultSavePlanner | None:
        """The planner, if it is the library's or built on it; the plans of others go through the coordinator."""
        return self.planner if isinstance(self.planner, DefaultSavePlanner) else None

    def _planned(
        self, state_dict: Callable[[], STATE_DICT_TYPE], event: Event
    ) -> tuple[Callable[[], bytes], Callable[[list[bytes]], bytes]]:
        """When all ranks have planned: what writes this rank's part, and what commits, on the coordinator."""
        start = self._agree_to_start(state_dict)
        central = None if start.alone else self._global_plan()
        answer = b""
        if start.alone and start.unsure:
            assert self._held is not None
            answer = self.team.reduce_scatter(partial(self._held.numbers, start.unsure), answers)

        def write() -> bytes:
            rows: list[Row] = []
            paths: Any = None
            if central is not None:
                plan: SavePlan | None = central[0]
            else:
                assert self._held is not None
                rows = self._held.settled(start.unsure, answer)
                plan, paths = self._plan, self._held.paths
                if plan is not None and self._own is not None:
                    shared = replace(plan, items=self._own.items_of(plan, rows))
                    self.side.begin(start.arranged, self.team.rank)
                    plan = self._row_writer.placed(shared, start.arranged, self.team.rank)
                    paths = plan.planner_data
            with operation("write", self.checkpoint_id, self.team.global_rank) as written:
                if plan is None:
                    results = self._row_writer.write(rows, start.arranged, self.team.rank)
                else:
                    results = self.writer.write_data(self.planner.finish_plan(plan), self.planner).wait()
                event.bytes = written.bytes = _bytes_of(results)
            return _with_paths(self.side.encode_results(results), paths)

        def commit(parts: list[bytes]) -> bytes:
            results, planner_data = _all_results(parts, self.side)
            made = None if central is None else central[1]
            self._metadata = Metadata({}, planner_data=planner_data) if made is None else made
            with operation("commit", self.checkpoint_id, self.team.rank):
                self.writer.finish(self._metadata, results)
            return self.side.committed(self._metadata)

        return write, commit

    def _items(self) -> SavePlan:
        return self.writer.prepare_local_plan(self.planner.create_local_plan())

    def _agree_to_start(self, state_dict: Callable[[], STATE_DICT_TYPE]) -> _Start:
        """Plan on every rank, and wait until every rank has; nothing is written before."""

        def prepare() -> bytes:
            check_planner(self.planner)
            values = state_dict()
            torchs = self._number is not None or (for_torch() and self.base is None)
            self.writer = find_writer(self.given_writer, self.checkpoint_id, self.store, pytorchs_files=torchs)
            self.side = self.writer if isinstance(self.writer, RowWriter) else SaveSide()
            if self.base is not None:
                self.side.build_on(store_at(self.base) if isinstance(self.base, (str, os.PathLike)) else self.base)
            own = self._own
            if own is not None:
                own.set_up_ranks(self.team.rank, self.team.ranks)
            set_up_save_planner(self.planner, values, self.writer, self.team.is_coordinator)
            self._set_up_writer()
            with operation("plan", self.checkpoint_id, self.team.rank) as event:
                held = own.hold() if own is not None and self.side.takes_rows else None
                if held is None:
                    self._plan = self._items()
                    event.details["items"] = len(self._plan.items)
                    held = None if own is None else own.hold_items(self._plan)
                else:
                    event.details["items"] = len(held.rows)
                self._held = held
            alone = own is not None and own.plans_alone and self.side.plans_alone
            about = self.side.about(held.rows) if alone and held is not None else b""
            return msgspec.msgpack.encode(_Hello(alone, [] if held is None else held.notes(), about))

        def agree(parts: list[bytes]) -> bytes:
            hellos = [msgspec.msgpack.decode(part, type=_Hello) for part in parts]
            alone = all(hello.alone for hello in hellos)
            unsure = groups_unsure([hello.notes for hello in hellos]) if alone else []
            arranged = self.side.arranged([hello.about for hello in hellos]) if alone else b""
            return msgspec.msgpack.encode(_Start(arranged, alone, unsure))

        return msgspec.msgpack.decode(self.team.reduce(prepare, agree), type=_Start)

    def _set_up_writer(self) -> None:
        apart = self._number is not None
        more = with_kwargs(
            self.writer.set_up_storage_writer,
            rank=self._number if apart else self.team.rank,
            use_collectives=not apart,
        )
        if apart and not (self.side.writes_apart if isinstance(self.writer, RowWriter) else more):
            raise UnsupportedValueError(
                f"with use_collectives=False each rank writes a checkpoint of its own into one folder, which "
                f"{type(self.writer).__name__} cannot: leave storage_writer, store and base out, for PyTorch's files"
            )
        self.writer.set_up_storage_writer(self.team.is_coordinator, **more)

    def _global_plan(self) -> tuple[SavePlan, Metadata | None]:
        """This rank's part of a plan that the coordinator makes, and on the coordinator the metadata."""
        metadata: Metadata | None = None

        def send() -> bytes:
            return messages.encode(self._items() if self._plan is None else self._plan)  # another rank needs items

        def combine(parts: list[bytes]) -> list[bytes]:
            nonlocal metadata
            plans, metadata = self.planner.create_global_plan([messages.decode(part, SavePlan) for part in parts])
            settled = self.writer.prepare_global_plan(list(plans))
            arranged = b"" if self.side.plans_alone else self.side.arranged_of(settled)
            return [messages.encode((part, arranged)) for part in settled]

        part, arranged = messages.decode(self.team.reduce_scatter(send, combine), tuple)
        self.side.begin(arranged, self.team.rank)
        return part, metadata


def set_up_save_planner(
    planner: SavePlanner, state_dict: STATE_DICT_TYPE, writer: StorageWriter, is_coordinator: bool
) -> None:
    """Set up a planner, also one written for PyTorch before 2.3, which does not take `storage_meta`."""
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        planner.set_up_planner(state_dict=state_dict, storage_meta=writer.storage_meta(), is_coordinator=is_coordinator)
    else:
        planner.set_up_planner(state_dict, is_coordinator)  # type: ignore[arg-type]  # the older signature


def _bytes_of(results: Sequence[WriteResult]) -> int:
    known: int | None = getattr(results, "nbytes", None)
    return known if known is not None else sum(result.size_in_bytes for result in results)


def _with_paths(results: bytes, planner_data: Any) -> bytes:
    """Encode a rank's results, the paths of its names and the forms of its dicts, for the coordinator.

    Paths whose keys cannot be stored are left out; their names are loaded at the top of the state dict.
    """
    paths = planner_data if isinstance(planner_data, dict) else {}
    plain = {name: path for name, path in paths.items() if all(type(key) is str or type(key) is int for key in path)}
    encoded = msgspec.msgpack.encode((plain, list(forms_of(planner_data).items())))
    return msgspec.msgpack.encode((encoded, results))


def _all_results(parts: list[bytes], side: SaveSide) -> tuple[list[Sequence[WriteResult]], Paths | None]:
    results: list[Sequence[WriteResult]] = []
    seen: set[bytes] = set()
    paths, found = Paths(), list[dict[Path, bytes]]()
    for part in parts:
        encoded_paths, encoded = msgspec.msgpack.decode(part, type=tuple[bytes, bytes])
        results.append(side.decode_results(encoded))
        if encoded_paths not in seen:
            seen.add(encoded_paths)
            plain, forms = msgspec.msgpack.decode(encoded_paths, type=tuple[dict[str, Path], list[tuple[Path, bytes]]])
            paths.update(plain)
            found.append(dict(forms))
    paths.forms = merged_forms(found)
    return results, paths if paths or paths.forms else None
