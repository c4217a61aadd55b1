"""One save, from plan to commit, on one rank.

    1. every rank plans what it could write, and tells the coordinator in one small message that it is ready
    2. who writes what:   usually each rank works out its own part (`ownership`);
                          with a planner or a storage that wants all plans, the coordinator does (`global_plan`)
    3. every rank writes its part, durably
    4. the coordinator, having heard that all have, makes the checkpoint valid in one atomic act

An error in any step on any rank becomes the same exception on every rank; before step 4 it leaves nothing behind.
"""

from __future__ import annotations

import inspect
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from terrazzo.checkpoint import messages
from terrazzo.checkpoint.collector import paused_collector
from terrazzo.checkpoint.coordination import Place, StepFailed
from terrazzo.checkpoint.events import LOGGER, Event, operation
from terrazzo.checkpoint.filesystem import NativeWriter
from terrazzo.checkpoint.global_plan import GlobalPlanCache
from terrazzo.checkpoint.locate import find_writer
from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from terrazzo.checkpoint.native.manifest import Path
from terrazzo.checkpoint.native.merging import PartResults
from terrazzo.checkpoint.ownership import Negotiation, Note, answers, groups_unsure
from terrazzo.checkpoint.planner import SavePlan, SavePlanner
from terrazzo.checkpoint.save_planner import DefaultSavePlanner
from terrazzo.checkpoint.storage import StorageWriter, WriteResult
from terrazzo.checkpoint.stores import Store
from terrazzo.errors import CheckpointError


class _Hello(msgspec.Struct, array_like=True, frozen=True):
    """A rank is ready to save."""

    alone: bool  # planner and storage need no global step
    notes: list[Note]
    cache_token: str


class _Start(msgspec.Struct, array_like=True, frozen=True):
    """All ranks are ready."""

    save_id: str
    alone: bool
    unsure: list[int]  # groups of holders of which not all said the same
    cache_token: str


@dataclass(slots=True)
class SaveSession:
    """The state of one save on one rank."""

    planner: SavePlanner
    given_writer: StorageWriter | None
    place: Place
    checkpoint_id: Any
    store: Store | None = None
    base: str | os.PathLike[str] | Store | None = None
    _writer: StorageWriter | None = None

    def run(self, state_dict: Callable[[], STATE_DICT_TYPE]) -> Metadata:
        """Save what `state_dict()` returns; returns the checkpoint's metadata on every rank."""
        with operation("save", self.checkpoint_id, self.place.global_rank) as event:
            try:
                with self.place.guarded():
                    return self._run(state_dict, event)
            except StepFailed as failed:
                if failed.discard and isinstance(self._writer, NativeWriter):
                    self._discard(self._writer)
                raise failed.error from failed.error.__cause__
            finally:
                if isinstance(self.planner, DefaultSavePlanner):
                    self.planner.forget()

    def _discard(self, writer: NativeWriter) -> None:
        try:
            writer.abandon()
        except (CheckpointError, OSError) as error:  # what failed the save is what to tell
            LOGGER.warning("%s: what the failed save left behind stays for now: %s", self.place.doing, error)

    @property
    def writer(self) -> StorageWriter:
        """The writer, once the save has begun."""
        assert self._writer is not None
        return self._writer

    def _run(self, state_dict: Callable[[], STATE_DICT_TYPE], event: Event) -> Metadata:
        plan, negotiation, start = self._agree_to_start(state_dict)
        central = None if start.alone else self._global_plan(plan, start.cache_token)
        answer = b""
        if start.alone and start.unsure:
            assert negotiation is not None
            side = negotiation
            answer = self.place.reduce_scatter(lambda: side.numbers(start.unsure), answers)
        metadata: Metadata | None = None

        def write() -> bytes:
            if central is not None:
                mine = central[0]
            else:
                assert isinstance(self.planner, DefaultSavePlanner) and negotiation is not None
                assert isinstance(self.writer, NativeWriter)
                shared = self.planner.share_plan(plan, negotiation, negotiation.settled(start.unsure, answer))
                mine = self.writer.place(shared, start.save_id, self.place.rank)
            with operation("write", self.checkpoint_id, self.place.global_rank) as written:
                results = self.writer.write_data(self.planner.finish_plan(mine), self.planner).wait()
                event.bytes = written.bytes = _bytes_of(results)
            return _encode_results(results, mine.planner_data if start.alone else None)

        def commit(parts: list[bytes]) -> bytes:
            nonlocal metadata
            results, planner_data = _decode_all_results(parts)
            if central is not None and central[1] is not None:
                metadata = central[1]
            else:
                metadata = Metadata({}, planner_data=planner_data)
            with operation("commit", self.checkpoint_id, self.place.rank):
                self.writer.finish(metadata, results)
            if isinstance(self.writer, NativeWriter):
                return self.writer.committed()
            return messages.encode(metadata)

        def may_discard() -> bool:
            return isinstance(self.writer, NativeWriter) and self.writer.may_abandon()

        outcome = self.place.reduce(write, commit, may_discard)
        if metadata is not None:
            return metadata
        if isinstance(self.writer, NativeWriter):
            return self.writer.describe_committed(outcome)
        return messages.decode(outcome, Metadata)

    def _agree_to_start(self, state_dict: Callable[[], STATE_DICT_TYPE]) -> tuple[SavePlan, Negotiation | None, _Start]:
        """Plan on every rank, and learn that every rank has; nothing is written before."""
        plan = SavePlan([])
        negotiation: Negotiation | None = None

        def prepare() -> bytes:
            nonlocal plan, negotiation
            values = state_dict()
            self._writer = find_writer(self.given_writer, self.checkpoint_id, self.store, self.base)
            if isinstance(self.planner, DefaultSavePlanner):
                self.planner.set_up_ranks(self.place.rank, self.place.ranks)
            set_up_save_planner(self.planner, values, self.writer, self.place.is_coordinator)
            self.writer.set_up_storage_writer(self.place.is_coordinator)
            with operation("plan", self.checkpoint_id, self.place.rank) as event, paused_collector():
                plan = self.writer.prepare_local_plan(self.planner.create_local_plan())
                event.details["items"] = len(plan.items)
                if isinstance(self.planner, DefaultSavePlanner):
                    negotiation = self.planner.negotiate(plan)
            cache = _cache_of(self.planner)
            hello = _Hello(
                # Any other planner or writer has a global step, whatever it says of itself.
                alone=isinstance(self.planner, DefaultSavePlanner)
                and self.planner.plans_alone
                and isinstance(self.writer, NativeWriter)
                and self.writer.plans_alone,
                notes=negotiation.notes() if negotiation is not None else [],
                cache_token="" if cache is None or not self.place.is_coordinator else cache.token,
            )
            return msgspec.msgpack.encode(hello)

        def agree(parts: list[bytes]) -> bytes:
            hellos = [msgspec.msgpack.decode(part, type=_Hello) for part in parts]
            alone = all(hello.alone for hello in hellos)
            unsure = groups_unsure([hello.notes for hello in hellos]) if alone else []
            save_id = getattr(self._writer, "save_id", "") or uuid.uuid4().hex[:12]
            return msgspec.msgpack.encode(_Start(save_id, alone, unsure, hellos[0].cache_token))

        start = msgspec.msgpack.decode(self.place.reduce(prepare, agree), type=_Start)
        return plan, negotiation, start

    def _global_plan(self, plan: SavePlan, coordinator_token: str) -> tuple[SavePlan, Metadata | None]:
        """This rank's part of a plan that the coordinator makes, and on the coordinator the metadata."""
        cache = _cache_of(self.planner)
        metadata: Metadata | None = None

        def send() -> bytes:
            return messages.encode(plan if cache is None else cache.to_send(plan, coordinator_token))

        def combine(parts: list[bytes]) -> list[bytes]:
            nonlocal metadata
            received = [messages.decode(part, SavePlan) for part in parts]
            if cache is None:
                plans, made = self.planner.create_global_plan(received)
            else:
                plans, made = cache.global_plan(received, self.planner.create_global_plan)
            metadata = replace(made)  # the storage will fill it in; a cached one has to stay as it is
            settled = self.writer.prepare_global_plan(list(plans))
            return [messages.encode((part, "" if cache is None else cache.token)) for part in settled]

        part, token = messages.decode(self.place.reduce_scatter(send, combine), tuple)
        if cache is not None:
            cache.token = token
        return part, metadata


def set_up_save_planner(
    planner: SavePlanner, state_dict: STATE_DICT_TYPE, writer: StorageWriter, is_coordinator: bool
) -> None:
    """Set up a planner, also one written for PyTorch before 2.3, which does not take `storage_meta`."""
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        planner.set_up_planner(state_dict=state_dict, storage_meta=writer.storage_meta(), is_coordinator=is_coordinator)
    else:
        planner.set_up_planner(state_dict, is_coordinator)  # type: ignore[arg-type]  # the older signature


def _cache_of(planner: SavePlanner) -> GlobalPlanCache | None:
    return planner.plan_cache if isinstance(planner, DefaultSavePlanner) else None


def _bytes_of(results: Sequence[WriteResult]) -> int:
    return results.nbytes if isinstance(results, PartResults) else sum(result.size_in_bytes for result in results)


def _encode_results(results: Sequence[WriteResult], planner_data: Any) -> bytes:
    """A rank's results for the coordinator."""
    if isinstance(results, PartResults):
        paths = planner_data if isinstance(planner_data, dict) else {}
        return msgspec.msgpack.encode((b"", _encode_paths(paths), results.encode()))
    return msgspec.msgpack.encode((messages.encode(list(results)), b"", b""))


def _encode_paths(paths: dict[str, Any]) -> bytes:
    """The paths whose keys can be stored as they are; other names are found at the top of the state dict."""
    plain = {name: path for name, path in paths.items() if all(type(key) is str or type(key) is int for key in path)}
    return msgspec.msgpack.encode(plain)


def _decode_all_results(parts: list[bytes]) -> tuple[list[Sequence[WriteResult]], dict[str, Path] | None]:
    """The results of all ranks, and the paths of all names."""
    results: list[Sequence[WriteResult]] = []
    seen: set[bytes] = set()
    paths: dict[str, Path] = {}
    for part in parts:
        plain, encoded_paths, encoded = msgspec.msgpack.decode(part, type=tuple[bytes, bytes, bytes])
        if encoded:
            results.append(PartResults.decode(encoded))
        else:
            results.append(messages.decode(plain, list))
        if encoded_paths and encoded_paths not in seen:
            seen.add(encoded_paths)
            paths.update(msgspec.msgpack.decode(encoded_paths, type=dict[str, Path]))
    return results, paths or None
