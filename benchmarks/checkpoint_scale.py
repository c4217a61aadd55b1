"""A checkpoint of many ranks without the ranks: one process makes their parts as arrays, merges and reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from terrazzo.checkpoint import ChunkStorageMetadata, DefaultLoadPlanner, DefaultSavePlanner
from terrazzo.checkpoint.native.contents import metadata_of
from terrazzo.checkpoint.native.finding import PartIndexes
from terrazzo.checkpoint.native.format import checksum
from terrazzo.checkpoint.native.index import IndexRows, encode_index, name_hash
from terrazzo.checkpoint.native.merging import merge
from terrazzo.checkpoint.native.parts import WrittenPart, make_part, packed, unpacked
from terrazzo.checkpoint.native.root import FileEntry, PartEntry, Root, TensorEntry, encode_root
from terrazzo.checkpoint.plan.ownership import groups_unsure
from terrazzo.checkpoint.stores import MemoryStore, Request
from terrazzo.tensor import Shard

ROWS, WIDTH = 4, 64  # of each rank's shard
OWN = 20  # tensors that a rank has all of


@dataclass(frozen=True)
class Job:
    """Ranks, tensors that each of them has a shard of, and how many different shapes these have."""

    ranks: int
    tensors: int
    shapes: int

    def width(self, number: int) -> int:
        """The columns of a tensor."""
        return WIDTH + number % self.shapes


class Mesh:
    """A mesh of one dim, seen from one of its ranks."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.mesh = torch.arange(ranks)
        self._coordinate = [rank]

    def get_coordinate(self) -> list[int]:
        return self._coordinate


class Sharded:
    """One rank's rows of a tensor that is sharded over many ranks, as a DTensor is; meta data only."""

    placements = (Shard(0),)
    dtype = torch.float32

    def __init__(self, mesh: Mesh, rank: int, local: torch.Tensor) -> None:
        self.device_mesh = mesh
        self._rank = rank
        self._local = local
        self._size = torch.Size([ROWS * len(mesh.mesh), local.shape[1]])

    def size(self) -> torch.Size:
        return self._size

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([ROWS * self._rank, 0]), self._local.shape)]

    def to_local(self) -> torch.Tensor:
        return self._local


def state_of(rank: int, job: Job) -> dict[str, Sharded]:
    """A rank's state dict."""
    mesh = Mesh(rank, job.ranks)
    memory = torch.zeros(ROWS * (WIDTH + job.shapes))
    locals_ = [memory[: ROWS * job.width(n)].view(ROWS, -1) for n in range(job.shapes)]
    return {name_of(n): Sharded(mesh, rank, locals_[n % job.shapes]) for n in range(job.tensors)}


def plan_save(rank: int, job: Job, state: dict[str, Sharded]) -> int:
    """What one rank does before it writes, with the messages of all ranks at hand; how many pieces it will write."""
    planner = DefaultSavePlanner()
    planner.set_up_ranks(rank, tuple(range(job.ranks)))
    planner.set_up_planner(dict(state), None, rank == 0)
    held = planner.hold()
    assert held is not None
    assert not groups_unsure([held.notes()] * job.ranks)
    return len(held.settled())


def parts_of(job: Job) -> list[WrittenPart]:
    """What all ranks would send to the coordinator.

    Each rank also has all of some small tensors, so no two of them have the same tables.
    """
    entries = [TensorEntry(name_of(n), "float32", (ROWS * job.ranks, job.width(n))) for n in range(job.tensors)]
    first = make_part(entries, [(0, 0, ROWS, job.width(n)) for n in range(job.tensors)], part_entry(0), [])
    boxes = np.frombuffer(unpacked(first.boxes), "<i8").reshape(-1, 2, 2).copy()
    parts = []
    for rank in range(job.ranks):
        own = [TensorEntry(f"rank{rank}.bias.{n}", "float32", (WIDTH,)) for n in range(OWN)]
        alone = make_part(own, [(0, WIDTH)] * OWN, part_entry(rank), [])
        boxes[:, 0, 0] = ROWS * rank  # all else is as on the first rank
        parts.append(
            msgspec.structs.replace(first, whole=alone.whole, boxes=packed(boxes.tobytes()), entry=part_entry(rank))
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


def merge_parts(parts: list[WrittenPart]) -> bytes:
    """The coordinator's work: the root."""
    return merge(parts, "0123456789ab")


def index_of(rank: int, job: Job) -> bytes:
    """The index of one rank."""
    tensors = job.tensors
    ones = np.ones(tensors, dtype=np.uint32)
    widths = np.array([job.width(n) for n in range(tensors)], dtype=np.uint64)
    nbytes, block = np.uint64(ROWS * 4) * widths, np.uint64(256 << 10)
    boxes = np.stack([ones * ROWS * rank, ones * 0, ones * ROWS, widths], axis=1).astype(np.uint64)
    return encode_index(
        IndexRows(
            hashes=np.array([name_hash(name_of(n)) for n in range(tensors)], dtype=np.uint64),
            starts=np.uint64(8192) + np.cumsum(nbytes) - nbytes,
            nbytes=nbytes,
            files=ones * 0,
            blocks=ones * np.uint32(block),
            ndims=ones * 2,
            codecs=ones * 0,
            boxes=boxes.reshape(-1),
            sums=np.ones(int(((nbytes + block - np.uint64(1)) // block).sum()), dtype=np.uint64),
            frames=ones[:0],
        )
    )


class IndexStore(MemoryStore):
    """A store that has nothing but one index, whatever is asked of it."""

    def __init__(self, index: bytes) -> None:
        super().__init__()
        self._index = index

    def read(self, requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            request.buffers[0][:] = self._index
            yield request


def with_index(data: bytes, rank: int, index: bytes) -> bytes:
    """The root, in which a rank's part has this index."""
    head = Root(data, "simulated").head
    parts = list(head.parts)
    parts[rank] = part_entry(rank, index)
    return encode_root(msgspec.structs.replace(head, parts=parts))


def read_part(data: bytes, index: bytes, state: dict[str, Sharded]) -> int:
    """One rank finds what it has to read, from the root and an index; returns the number of chunks."""
    root = Root(data, "simulated")
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(state), metadata_of(root, IndexStore(index)), False)
    plan = planner.read_plan()
    assert plan is not None
    return len(
        PartIndexes(root, IndexStore(index)).find(
            [(target.source, part) for target in plan.targets for part in target.parts]
        )
    )
