"""One load on one rank.

Usually a load does not communicate: the rank reads the metadata, plans what it needs and reads it. If the caller asks
for it, or if the planner has a global step or the storage is not terrazzo's, the load is collective: an error of one
rank is raised as the same `CheckpointException` on all ranks, and `load` returns when all ranks are done. With
terrazzo's format the coordinator then reads the root for all ranks, so that all load the same checkpoint, even if it is
replaced meanwhile.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed import PrefixStore, ProcessGroupGloo

from terrazzo._torch.groups import default_store
from terrazzo.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from terrazzo.checkpoint.native.rows import ReadPlan, Target
from terrazzo.checkpoint.native.storage import NativeReader
from terrazzo.checkpoint.native.tensors import as_bytes
from terrazzo.checkpoint.plan.load_planner import DefaultLoadPlanner
from terrazzo.checkpoint.planner import LoadPlan, LoadPlanner
from terrazzo.checkpoint.run import messages
from terrazzo.checkpoint.run.coordination import Team, exception_of, failure_of
from terrazzo.checkpoint.run.events import operation
from terrazzo.checkpoint.run.staging import carve, room_of
from terrazzo.checkpoint.storage import StorageReader, with_kwargs
from terrazzo.checkpoint.torch_api.items import check_planner
from terrazzo.checkpoint.torch_api.storages import TargetReader
from terrazzo.comm.processes import host_identity
from terrazzo.comm.waits import Waiting
from terrazzo.layout.box import row_major_windows


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
        state_dict: returns what to load into, in place.
        give_back: gets that when it has been loaded.
        wanted_together: whether the caller asked for a collective load.
        once_per_node: whether ranks read for the others of their node.
    """

    planner: LoadPlanner
    given_reader: StorageReader | None
    find: Callable[[], StorageReader]
    team: Team
    connect: Callable[[], Team]
    checkpoint_id: Any
    state_dict: Callable[[], STATE_DICT_TYPE]
    give_back: Callable[[STATE_DICT_TYPE], None]
    wanted_together: bool = False
    once_per_node: bool = False
    _reader: StorageReader | None = None
    _values: STATE_DICT_TYPE = field(default_factory=dict)

    @property
    def reader(self) -> StorageReader:
        """The reader, found at the first access."""
        if self._reader is None:
            self._reader = self.find()
            if isinstance(self._reader, TargetReader):
                self._reader.rank = self.team.rank
        return self._reader

    @property
    def _own(self) -> DefaultLoadPlanner | None:
        """The planner, if it is the library's or built on it."""
        return self.planner if isinstance(self.planner, DefaultLoadPlanner) else None

    def run(self) -> None:
        """Load."""
        with operation("load", self.checkpoint_id, self.team.global_rank) as event:
            try:
                self._run()
            finally:
                if self._own is not None:
                    self._own.forget()
            event.bytes = getattr(self.reader, "bytes_read", 0)

    def _run(self) -> None:
        # As far as is known without a look at the checkpoint.
        alone = _plans_alone(self.planner) and (self.given_reader is None or _plans_alone(self.given_reader))
        collective = self.wanted_together or self.once_per_node or not alone
        if not collective:
            with self._explained():
                collective = not _plans_alone(self.reader)
        if not collective:
            with self._explained():
                self._read_alone()
            self._finish()
            return
        self.team = self.connect()
        with self.team.guarded():
            self._load_together()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors into a `CheckpointException`, which names the rank and the checkpoint."""
        try:
            yield
        except Exception as error:
            failure = failure_of(error, self.team.global_rank)
            raise exception_of([failure], self.team.doing, error) from error

    def _set_up(self, root: bytes | None) -> None:
        self._values = self.state_dict()
        check_planner(self.planner)
        reader = self.reader
        if root is not None and isinstance(reader, NativeReader):
            metadata = reader.use_root(root)
        else:
            metadata = self._read_metadata()
        if self._own is not None:
            self._own.set_up_ranks(self.team.rank, self.team.ranks)
        self.planner.set_up_planner(self._values, metadata, self.team.is_coordinator)
        more = with_kwargs(self.reader.set_up_storage_reader, rank=self.team.rank, use_collectives=True)
        self.reader.set_up_storage_reader(metadata, self.team.is_coordinator, **more)

    def _read_metadata(self) -> Metadata:
        try:
            return self.reader.read_metadata()
        except Exception:  # where each rank has saved by itself, PyTorch's readers have to be told the rank
            more = with_kwargs(self.reader.read_metadata, rank=self.team.rank)
            if not more or isinstance(self.reader, TargetReader):
                raise
            return self.reader.read_metadata(**more)

    def _items(self) -> LoadPlan:
        return self.reader.prepare_local_plan(self.planner.create_local_plan())

    def _own_plan(self) -> ReadPlan | None:
        """This rank's plan in the library's own form; None if planner or reader need PyTorch's items."""
        takes = isinstance(self.reader, TargetReader) and self.reader.takes_read_plans
        return self._own.read_plan() if takes and self._own is not None else None

    def _read_alone(self, root: bytes | None = None) -> None:
        """Plan and read, without communication."""
        self._set_up(root)
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

    def _finish(self) -> None:
        if self._own is not None:
            self._own.write_back()
        self.give_back(self._values)

    def _load_together(self) -> None:
        alone, root, nodes, name = self._agree()

        def plan() -> bytes:
            self._set_up(root)
            return messages.encode(self._items())

        def combine(parts: list[bytes]) -> list[bytes]:
            plans = self.planner.create_global_plan([messages.decode(part, LoadPlan) for part in parts])
            return [messages.encode(part) for part in self.reader.prepare_global_plan(plans)]

        # The caller's objects get their states only when every rank has read.
        if alone and all(nodes) and self.team.plane is not None:
            self._read_once_per_node(nodes, name, root, self.team.plane.timeout)
        elif alone:
            self.team.together(partial(self._read_alone, root))
        else:
            central = messages.decode(self.team.reduce_scatter(plan, combine), LoadPlan)
            self.team.together(lambda: self._read_items(central))
        self.team.together(self._finish)

    def _read_once_per_node(self, nodes: list[str], name: str, root: bytes | None, timeout: timedelta) -> None:
        """Read what several ranks of a node need once, and send it to them; errors are exchanged after each step."""
        here = [rank for rank, where in zip(self.team.ranks, nodes, strict=True) if where == nodes[self.team.rank]]

        def plan() -> ReadPlan | None:
            self._set_up(root)
            return self._own_plan()  # None: a custom planner's tensors need not be those of the state dict

        own = self.team.together(plan)
        targets = () if own is None else own.targets
        with closing(Node(here, name, timeout)) as node:
            passed = self.team.together(partial(node.agree, targets))
            self.team.together(lambda: self._read(None if own is None else node.own_part(own, passed)))
            self.team.together(partial(node.pass_on, targets, passed))

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


# ------------------------------------------------------------------ what several ranks of a node need is read once


_PIECE: Final = 32 << 20  # bytes that are sent at once


@dataclass(frozen=True, slots=True)
class Passed:
    """What one rank reads for others: ranks as indices on the node, parts of targets as indices in this rank's
    plan."""

    reader: int
    receivers: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]


def _shareable(targets: Sequence[Target]) -> dict[tuple[int, int], tuple[tuple[int, int], int]]:
    """The parts that other ranks may need, too, with their bytes, by a hash of 128 bits."""
    found: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
    for number, target in enumerate(targets):
        dtype = target.tensor.dtype
        for place, part in enumerate(target.parts):
            about = (target.source, part.chunk.offsets, part.in_chunk, part.lengths, str(dtype))
            key = divmod(xxhash.xxh3_128_intdigest(repr(about).encode()), 1 << 64)
            found.setdefault(key, ((number, place), prod(part.lengths) * dtype.itemsize))
    return found


def assigned(wanted: Sequence[np.ndarray[Any, Any]]) -> list[tuple[tuple[int, int], int, tuple[int, ...]]]:
    """For each hash that several ranks need: the rank that reads it, and those that receive it.

    `wanted` has a table for each rank, with a row for each hash: its two halves, and the number of bytes.

    >>> tables = [np.array([[0, 7, 100], [0, 8, 40], [0, 9, 40]]), np.array([[0, 7, 100], [0, 8, 40]])]
    >>> assigned(tables)
    [((0, 7), 0, (1,)), ((0, 8), 1, (0,))]
    """
    rows = np.concatenate(wanted)
    ranks = np.repeat(np.arange(len(wanted)), [len(table) for table in wanted])
    order = np.lexsort((ranks, rows[:, 1], rows[:, 0]))
    rows, ranks = rows[order], ranks[order]
    firsts = np.nonzero(np.append(True, (rows[1:, :2] != rows[:-1, :2]).any(axis=1)))[0][: len(rows)]
    ends = np.append(firsts[1:], len(rows))[: len(firsts)]
    several = np.nonzero(ends - firsts > 1)[0]
    loads = [0] * len(wanted)
    largest_first = several[np.argsort(-rows[firsts[several], 2].astype(np.int64), kind="stable")]
    found = []
    for place in largest_first.tolist():
        holders = ranks[firsts[place] : ends[place]].tolist()
        high, low, nbytes = rows[firsts[place]].tolist()
        reader = min(holders, key=lambda rank: (loads[rank], rank))
        loads[reader] += nbytes
        found.append(((high, low), reader, tuple(rank for rank in holders if rank != reader)))
    return found


class Node:
    """The ranks of this node that load together, with a process group of their own.

    Ranks with the same values (data-parallel replicas, the replicas of HSDP) need the same bytes of a store. If the
    store is slower than the network inside the node, one rank reads them and sends them to the others:

        1. ranks exchange what they need: a hash of each box of a stored chunk and of its target's dtype and shape
        2. each box that several ranks need is assigned to one of them, with balanced bytes; all compute the same
        3. each rank reads what is assigned to it, and what only it needs, directly into its tensors
        4. it sends the others what they need, in pieces of bounded size

    Errors are exchanged with all ranks of the load between the steps.
    """

    def __init__(self, ranks: Sequence[int], name: str, timeout: timedelta) -> None:
        """`ranks` are global ranks. The name must be new: with a used name gloo would find old addresses."""
        self._size = len(ranks)
        self._position = list(ranks).index(dist.get_rank())
        self._waiting = Waiting("reading for each other", ranks)
        self._timeout = timeout
        self._where = f"terrazzo/node/{name}/{ranks[0]}"
        self._gloo: Any = None

    def close(self) -> None:
        """Close the connections, when all ranks have what was sent to them."""
        self._gloo = None

    @contextmanager
    def _closed_if_it_fails(self) -> Iterator[None]:
        """So that the others, which wait for this rank, fail at once, and not when their time is up."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def agree(self, targets: Sequence[Target]) -> list[Passed]:
        """What this rank sends to and receives from others. Connects them, so all ranks call this at the same time."""
        if self._size == 1:
            return []
        found: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
        with self._closed_if_it_fails(), self._waiting:
            self._gloo = ProcessGroupGloo(
                PrefixStore(self._where, default_store()), self._position, self._size, self._timeout
            )
            own = _shareable(targets)
            table = np.array([(*key, nbytes) for key, (_, nbytes) in own.items()], dtype=np.uint64).reshape(-1, 3)
            for key, reader, receivers in assigned(self._gathered(table)):
                if self._position == reader or self._position in receivers:
                    found[reader, receivers].append(own[key][0])
        return [Passed(reader, receivers, tuple(found[reader, receivers])) for reader, receivers in sorted(found)]

    def own_part(self, plan: ReadPlan, passed: Sequence[Passed]) -> ReadPlan:
        """This rank's plan, without what other ranks will send."""
        others: dict[int, set[int]] = defaultdict(set)
        for each in passed:
            if each.reader != self._position:
                for number, place in each.parts:
                    others[number].add(place)
        kept = []
        for number, target in enumerate(plan.targets):
            if number in others:
                left = tuple(part for place, part in enumerate(target.parts) if place not in others[number])
                if left:
                    kept.append(msgspec.structs.replace(target, parts=left))
            else:
                kept.append(target)
        return ReadPlan(kept, plan.values)

    def pass_on(self, targets: Sequence[Target], passed: Sequence[Passed]) -> None:
        """Send what this rank has read for others, and receive what they have read for it."""
        with self._closed_if_it_fails(), self._waiting, torch.no_grad():
            buffer = torch.empty(_PIECE if passed else 0, dtype=torch.uint8, device="cpu")
            for each in passed:  # in the same order on all ranks
                tensors = [targets[number].part(targets[number].parts[place]) for number, place in each.parts]
                for piece in _pieces(tensors):
                    self._exchange(each, piece, buffer)

    def _exchange(self, each: Passed, piece: list[torch.Tensor], buffer: torch.Tensor) -> None:
        specs = [(part.shape, part.dtype) for part in piece]
        views, sent = carve(buffer, specs), buffer[: room_of(specs)]
        if self._position == each.reader:
            for view, part in zip(views, piece, strict=True):
                view.copy_(part)
            for work in [self._gloo.send([sent], receiver, 0) for receiver in each.receivers]:
                work.wait(self._timeout)
            return
        self._gloo.recv([sent], each.reader, 0).wait(self._timeout)
        for view, part in zip(views, piece, strict=True):
            part.copy_(view)

    def _gathered(self, table: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        count = torch.tensor([len(table)], device="cpu")
        counts = [torch.zeros_like(count) for _ in range(self._size)]
        self._gloo.allgather([counts], [count]).wait(self._timeout)
        most = max(int(each) for each in counts)
        padded = torch.zeros(most, 3, dtype=torch.int64, device="cpu")
        padded[: len(table)] = torch.from_numpy(table.view(np.int64))
        received = [torch.empty_like(padded) for _ in range(self._size)]
        self._gloo.allgather([received], [padded]).wait(self._timeout)
        return [
            each[: int(size)].contiguous().numpy().view(np.uint64) for each, size in zip(received, counts, strict=True)
        ]


def _pieces(targets: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Views of the targets, in lists that fit into one buffer."""
    batch: list[torch.Tensor] = []
    used = 0
    for target in targets:
        whole = as_bytes(target)
        for window in row_major_windows(whole.shape, _PIECE // whole.dtype.itemsize):
            part = whole[window.slices()]
            room = room_of([(part.shape, part.dtype)])
            if used + room > _PIECE:
                yield batch
                batch, used = [], 0
            batch.append(part)
            used += room
    if batch:
        yield batch
