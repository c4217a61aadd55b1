"""A checkpoint of many ranks without the ranks: one process makes their parts as arrays, merges and reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from terrazzo.checkpoint import ChunkStorageMetadata, DefaultLoadPlanner, DefaultSavePlanner, SavePlan
from terrazzo.checkpoint.native.collector import paused_collector
from terrazzo.checkpoint.native.contents import metadata_of
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.format import checksum
from terrazzo.checkpoint.native.index import Rows, encode_index, name_hash
from terrazzo.checkpoint.native.manifest import FileEntry, TensorEntry
from terrazzo.checkpoint.native.merging import About, Part, make_part, merge, packed
from terrazzo.checkpoint.native.root import PartEntry, Root, encode_root
from terrazzo.checkpoint.plan.ownership import groups_unsure
from terrazzo.checkpoint.plan.sharded import Holders
from terrazzo.checkpoint.stores import MemoryStore, Request

ROWS, WIDTH = 4, 1024  # of each rank's shard
OWN = 20  # tensors that a rank has all of


@dataclass
class Shard:
    """One rank's rows of a tensor that is sharded over many ranks; meta data only."""

    ranks: int
    rank: int
    holders: Holders
    dtype: torch.dtype = torch.float32

    def size(self) -> torch.Size:
        return torch.Size([ROWS * self.ranks, WIDTH])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([ROWS * self.rank, 0]), torch.Size([ROWS, WIDTH]))]

    def to_local(self) -> torch.Tensor:
        return _LOCAL


_LOCAL = torch.zeros(ROWS, WIDTH)


def state_of(rank: int, ranks: int, tensors: int) -> dict[str, Shard]:
    """A rank's state dict."""
    holders = Holders((rank,), frozenset(range(ranks)))
    return {f"layers.{number}.weight": Shard(ranks, rank, holders) for number in range(tensors)}


def plan_save(rank: int, ranks: int, state: dict[str, Shard]) -> SavePlan:
    """What one rank does before it writes, with the messages of all ranks at hand."""
    planner = DefaultSavePlanner()
    planner.set_up_ranks(rank, tuple(range(ranks)))
    planner.set_up_planner(dict(state), None, rank == 0)
    plan = planner.create_local_plan()
    negotiation = planner.negotiate(plan)
    assert not groups_unsure([negotiation.notes()] * ranks)
    return planner.share_plan(plan, negotiation, negotiation.settled())


def parts_of(ranks: int, tensors: int) -> list[Part]:
    """What all ranks would send to the coordinator.

    Each rank also has all of some small tensors, so no two of them have the same tables.
    """
    entries = sorted(
        (TensorEntry(name_of(n), "float32", (ROWS * ranks, WIDTH)) for n in range(tensors)),
        key=lambda entry: entry.name,
    )
    shared = make_part(entries, [(0, 0, ROWS, WIDTH)] * tensors, part_entry(0), [])
    parts = []
    for rank in range(ranks):
        own = [TensorEntry(f"rank{rank}.bias.{n}", "float32", (WIDTH,)) for n in range(OWN)]
        alone = make_part(own, [(0, WIDTH)] * OWN, part_entry(rank), [])
        boxes = np.tile(np.array([ROWS * rank, 0, ROWS, WIDTH], dtype="<i8"), tensors).tobytes()
        rows = np.arange(tensors + OWN, dtype="<u4").tobytes()
        parts.append(
            msgspec.structs.replace(
                alone,
                tables=(shared.tables[0], alone.tables[1]),
                rows=packed(rows),
                boxes=packed(boxes + np.tile(np.array([0, WIDTH], dtype="<i8"), OWN).tobytes()),
            )
        )
    return parts


def name_of(number: int) -> str:
    """The name of a tensor."""
    return f"layers.{number}.weight"


def part_entry(rank: int, index: bytes = b"") -> PartEntry:
    """What the root says of a rank's files."""
    name = f"data-0123456789ab-{rank:05d}.safetensors"
    return PartEntry(
        [FileEntry(name, 1 << 40, 4096, rank)], f"index-0123456789ab-{rank:05d}", len(index), checksum(index)
    )


def merge_parts(parts: list[Part]) -> bytes:
    """The coordinator's work: the root."""
    return merge(parts, About("0123456789ab", 0.0, "benchmark", {}, None))


def index_of(rank: int, tensors: int) -> bytes:
    """The index of one rank."""
    ones = np.ones(tensors, dtype=np.uint32)
    return encode_index(
        Rows(
            hashes=np.array([name_hash(name_of(n)) for n in range(tensors)], dtype=np.uint64),
            starts=(8192 + np.arange(tensors) * ROWS * WIDTH * 4).astype(np.uint64),
            nbytes=ones.astype(np.uint64) * np.uint64(ROWS * WIDTH * 4),
            files=ones * 0,
            blocks=ones * (256 << 10),
            ndims=ones * 2,
            codecs=ones * 0,
            boxes=np.tile(np.array([ROWS * rank, 0, ROWS, WIDTH], dtype=np.uint64), tensors),
            sums=ones.astype(np.uint64),
            frames=ones[:0],
        )
    )


class IndexStore(MemoryStore):
    """A store that has nothing but one index, whatever is asked of it."""

    def __init__(self, index: bytes) -> None:
        super().__init__()
        self._index = index

    def read(self, requests: Iterable[Request], *, in_flight_bytes: int = 0) -> Iterator[Request]:
        for request in requests:
            request.buffers[0][:] = self._index
            yield request


def with_index(data: bytes, rank: int, index: bytes) -> bytes:
    """The root, in which a rank's part has this index."""
    head = Root(data, "simulated").head
    parts = list(head.parts)
    parts[rank] = part_entry(rank, index)
    return encode_root(msgspec.structs.replace(head, parts=parts))


def read_part(data: bytes, index: bytes, state: dict[str, Shard]) -> int:
    """One rank finds what it has to read, from the root and an index; returns the number of chunks."""
    with paused_collector():  # as a load does
        root = Root(data, "simulated")
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dict(state), metadata_of(root), False)
        plan = planner.create_local_plan()
        return len(PartIndexes(root, IndexStore(index)).find(plan.items))
