"""Pickled DTensors are loaded where their part is that of the rank, and nowhere else."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from terrazzo.errors import DTensorError
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def pickled() -> list[bytes]:
    """Tensors of one part per rank, replicas, terms, uneven and empty parts; on a line, a square and some ranks."""
    size = dist.get_world_size()
    line, square = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    made = [distribute_tensor(torch.arange(12.0).view(6, 2), line, [placed]) for placed in (R, S0, S1)]
    made += [distribute_tensor(torch.arange(8.0), square, placed) for placed in ([R, R], [S0, R], [R, S0], [S0, S0])]
    made.append(DTensor.from_local(torch.ones(3) * dist.get_rank(), line, [P]))
    made.append(distribute_tensor(torch.arange(4.0), square["b"], [S0]))
    return [pickle.dumps(x) for x in made]


def saved(x: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"x": x}, file)
    return file.getvalue()


def held_by(x: Any) -> Any:
    """The mesh of a tensor, and which part of it this rank has."""
    parts = [0 if p == R else at for p, at in zip(x.placements, x.device_mesh.get_coordinate(), strict=True)]
    return x.device_mesh.mesh.tolist(), parts


def check_other_ranks() -> None:
    """Of each tensor of each rank: its own part is loaded, an equal replica too, another part is an error."""
    mine = pickled()
    own = [pickle.loads(data) for data in mine]
    there: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(there, [(data, held_by(x)) for data, x in zip(mine, own, strict=True)])
    for writer, theirs in enumerate(there):
        for x, (data, part) in zip(own, theirs, strict=True):
            if part == held_by(x):
                found = pickle.loads(data)
                assert found.device_mesh is x.device_mesh and torch.equal(found.to_local(), x.to_local())
            else:
                with pytest.raises(
                    DTensorError, match=rf"cannot unpickle a DTensor of rank {writer} of 4.*full_tensor"
                ):
                    pickle.loads(data)
    for x in own:
        assert torch.equal(torch.load(io.BytesIO(saved(x)), weights_only=True)["x"].to_local(), x.to_local())
        assert torch.equal(copy.copy(x).to_local(), x.to_local())


def check_other_worlds(there: list[list[bytes]], same: bool) -> None:
    rank = dist.get_rank()
    for data in there[rank % len(there)]:
        if same:
            pickle.loads(data).to_local()
        else:
            with pytest.raises(
                DTensorError, match=rf"of {len(there)} cannot be unpickled in a world of {dist.get_world_size()}: "
            ):
                pickle.loads(data)


def check_one_rank() -> list[bytes]:
    return [saved(distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (1,)), [S0]))]


def check_of_one_rank(data: bytes) -> None:
    with pytest.raises(DTensorError, match=r"a DTensor of rank 0 of 1 cannot .*another world.*terrazzo\.checkpoint"):
        torch.load(io.BytesIO(data), weights_only=True)["x"].sum()


def test_another_ranks_part_is_not_loaded():
    run_ranks(4, check_other_ranks)


def test_a_run_of_as_many_ranks_loads_them_and_others_do_not():
    there = run_ranks(4, pickled)
    run_ranks(4, check_other_worlds, there, True)
    run_ranks(2, check_other_worlds, there, False)
    run_ranks(4, check_of_one_rank, run_ranks(1, check_one_rank)[0][0])
    for rank, tensors in enumerate(there):  # without a process group they can be inspected
        x = pickle.loads(tensors[1])
        assert x.device_mesh.get_coordinate() == (rank,)
        run_ranks(4, check_back, pickle.dumps(x), rank)


def check_back(data: bytes, writer: int) -> None:
    """What a process without a group sends back arrives at the rank that it was seen from."""
    whole = distribute_tensor(torch.arange(12.0).view(6, 2), init_device_mesh("cpu", (4,)), [S0])
    if dist.get_rank() == writer:
        assert torch.equal(pickle.loads(data).to_local(), whole.to_local())
    else:
        with pytest.raises(DTensorError, match=f"rank {writer}"):
            pickle.loads(data)
