"""A checkpoint of many ranks without the ranks: one process makes their parts as arrays, merges and reads them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from terrazzo.checkpoint import ChunkStorageMetadata, DefaultLoadPlanner, DefaultSavePlanner, SavePlan
from terrazzo.checkpoint.native.chunk_index import ChunkIndex
from terrazzo.checkpoint.native.contents import metadata_of
from terrazzo.checkpoint.native.manifest import FileEntry, Manifest, TensorEntry
from terrazzo.checkpoint.native.parts import About, Part, merge
from terrazzo.checkpoint.ownership import groups_unsure
from terrazzo.checkpoint.sharded import Holders

ROWS, WIDTH = 4, 1024  # of each rank's shard


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
    """What all ranks would send to the coordinator."""
    entries = [TensorEntry(f"layers.{n}.weight", "float32", (ROWS * ranks, WIDTH)) for n in range(tensors)]
    table = msgspec.msgpack.encode(entries)
    chunk = ROWS * WIDTH * 4
    starts = (4096 + np.arange(tensors) * chunk).astype("<u8").tobytes()
    sums = np.arange(tensors, dtype="<u8").tobytes()
    parts = []
    for rank in range(ranks):
        boxes = np.tile(np.array([ROWS * rank, 0, ROWS, WIDTH], dtype="<i8"), tensors).tobytes()
        file = FileEntry(f"data-0123456789ab-{rank:05d}.safetensors", 4096 + tensors * chunk, 4096, rank)
        parts.append(Part(table, [file], bytes(4 * tensors), starts, boxes, sums, []))
    return parts


def merge_parts(parts: list[Part]) -> bytes:
    """The coordinator's work: the manifest."""
    return merge(parts, About("0123456789ab", 0.0, "benchmark", {}, None))


def read_part(data: bytes, state: dict[str, Shard]) -> int:
    """One rank finds in the manifest what it has to read; returns the number of chunks."""
    manifest = Manifest(data, "simulated")
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(state), metadata_of(manifest), False)
    plan = planner.create_local_plan()
    return len(ChunkIndex(manifest).find([item.storage_index for item in plan.items]))
