"""`load(read="once_per_node")`: what replicas want is read by one rank of a node, and all get it."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks
from terrazzo._torch.groups import default_store
from terrazzo.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
    load,
    save,
)
from terrazzo.checkpoint.formats import DCPReader, DCPWriter
from terrazzo.checkpoint.run import load_session
from terrazzo.errors import CheckpointCorruptError, CheckpointError
from terrazzo.tensor import DTensor, Replicate, Shard, distribute_tensor

LARGE = (300, 700)


def stored_state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "large": torch.randn(LARGE),
        "cut": torch.randn(64, 50),
        "narrow": torch.randn(200, 40).bfloat16(),
        "ints": torch.arange(3000),
        "bits": torch.zeros(7, dtype=torch.bool),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "step": 7,
    }


def targets(mesh: Any) -> dict[str, Any]:
    like = {name: torch.full_like(v, 1) if isinstance(v, torch.Tensor) else 0 for name, v in stored_state().items()}
    like["large"] = torch.zeros(LARGE[::-1]).t()  # not contiguous
    like["narrow"] = torch.zeros(200, 40)  # of another dtype
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    like["cut"] = distribute_tensor(torch.zeros(64, 50), mesh, placements)
    return like


def check(found: dict[str, Any]) -> None:
    for name, value in stored_state().items():
        got = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        assert torch.equal(got, value.to(got.dtype)) if isinstance(value, torch.Tensor) else got == value, name


def on_ranks(path: str, per_node: int) -> int:
    """Load, and return the bytes that this rank has read."""
    rank, world = dist.get_rank(), dist.get_world_size()
    names = load_session.host_identity
    load_session.host_identity = lambda: f"node {rank // per_node}"
    load_session._PIECE, piece = 102_400, load_session._PIECE  # so that the large one goes in pieces
    try:
        mesh = init_device_mesh("cpu", (world,) if world == per_node else (per_node, world // per_node))
        reader = FileSystemReader(path, verify=False)
        state = targets(mesh)
        load(state, storage_reader=reader, read="once_per_node")
        check(state)
        return reader.bytes_read
    finally:
        load_session.host_identity, load_session._PIECE = names, piece


@pytest.mark.parametrize("world", [2, 4])
def test_each_byte_is_read_once_on_each_node(tmp_path: Path, world: int) -> None:
    save(stored_state(), storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    replicated = sum(v.nbytes for n, v in stored_state().items() if isinstance(v, torch.Tensor) and n != "cut")
    cut = stored_state()["cut"].nbytes
    read = run_ranks(world, on_ranks, str(tmp_path), 2)
    for first, second in zip(read[::2], read[1::2], strict=True):
        assert replicated <= first + second <= replicated + cut + 100_000
        assert min(first, second) > 0  # both work


class Halving(DefaultLoadPlanner):
    """What it hands out is not the state dict's memory."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor / 2)


def others(path: str) -> None:
    """Other formats, planners, keys and errors."""
    rank = dist.get_rank()
    save({"w": torch.arange(6.0)}, storage_writer=DCPWriter(f"{path}/dcp"))
    state = {"w": torch.zeros(6)}
    load(state, storage_reader=DCPReader(f"{path}/dcp"), read="once_per_node")
    assert torch.equal(state["w"], torch.arange(6.0))
    save({"w": torch.arange(6.0), "x": torch.ones(5000)}, checkpoint_id=f"{path}/own")
    for half in (0, rank, 1):
        state = {"w": torch.zeros(6)} | ({"x": torch.zeros(5000)} if rank else {})
        load(state, checkpoint_id=f"{path}/own", planner=Halving() if half else None, read="once_per_node")
        assert torch.equal(state["w"], torch.arange(6.0) / (2 if half else 1))
        assert not rank or bool((state["x"] == (0.5 if half else 1)).all())
    # One rank's error is everybody's.
    with pytest.raises(CheckpointException, match="rank 1: .*nothing was loaded") as caught:
        load({"w": torch.zeros(6 + rank)}, checkpoint_id=f"{path}/own", read="once_per_node")
    assert list(caught.value.failures) == [1]
    dist.barrier()
    if rank == 0:
        for data in Path(path, "own").glob("data-*"):
            damaged = bytearray(data.read_bytes())
            damaged[4096:] = bytes(len(damaged) - 4096)
            data.write_bytes(damaged)
    dist.barrier()
    with pytest.raises(CheckpointCorruptError):
        load({"w": torch.zeros(6), "x": torch.zeros(5000)}, checkpoint_id=f"{path}/own", read="once_per_node")
    with pytest.raises(CheckpointError, match="must be 'each' or"):
        load({}, checkpoint_id=f"{path}/own", read="twice")  # type: ignore[arg-type]


def test_other_formats_planners_keys_and_errors(tmp_path: Path) -> None:
    run_ranks(2, others, str(tmp_path))


def test_alone_it_is_a_load(tmp_path: Path) -> None:
    save(stored_state(), checkpoint_id=tmp_path, no_dist=True)
    state = {"ints": torch.zeros(3000, dtype=torch.int64)}
    load(state, checkpoint_id=tmp_path, no_dist=True, read="once_per_node")
    assert torch.equal(state["ints"], torch.arange(3000))


class Empty:
    """A stateful object whose `state_dict` asks a model without parameters for one."""

    def state_dict(self) -> dict[str, Any]:
        return {"like": next(torch.nn.Module().parameters())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError(state_dict)


def failing(path: str) -> None:
    rank = dist.get_rank()
    # What a user's code raises is reported, also a StopIteration, which means something else in generators.
    state: dict[str, Any] = {"w": Empty() if rank else torch.zeros(6)}
    with pytest.raises(CheckpointException, match="rank 1: StopIteration") as caught:
        load(state, checkpoint_id=path, read="once_per_node")
    assert list(caught.value.failures) == [1]
    assert not rank or isinstance(caught.value.__cause__, StopIteration)
    # A rank that fails while others wait for its bytes makes them fail at once.
    for method in ("_gathered", "_exchange"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(load_session.Node, method, refusing)
            began = time.monotonic()
            with pytest.raises(CheckpointException, match="ranks? 1: ValueError: not today"):
                load({"w": torch.zeros(6)}, checkpoint_id=path, read="once_per_node", timeout=timedelta(seconds=30))
            assert time.monotonic() - began < 15


def refusing(*_: Any) -> None:
    raise ValueError("not today")


def open_until_all_have_read(path: str) -> None:
    """No rank closes its connections before every rank has received."""
    rank, store, node = dist.get_rank(), default_store(), load_session.Node
    pass_on, close = node.pass_on, node.close

    def slow(self: Any, *arguments: Any) -> None:
        pass_on(self, *arguments)
        if rank == 1:
            time.sleep(0.3)
            store.set("received", "yes")

    def checked(self: Any) -> None:
        assert store.check(["received"])
        close(self)

    state = {"w": torch.zeros(6)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "pass_on", slow)
        patch.setattr(node, "close", checked)
        load(state, checkpoint_id=path, read="once_per_node", timeout=timedelta(seconds=30))
    assert torch.equal(state["w"], torch.arange(6.0))


@pytest.mark.parametrize("fn", [failing, open_until_all_have_read])
def test_errors_between_the_steps_and_the_end_of_connections(tmp_path: Path, fn: Any) -> None:
    save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path, no_dist=True)
    run_ranks(2, fn, str(tmp_path))
