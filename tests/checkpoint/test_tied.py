"""Tied weights, one tensor under several names, are stored once and loaded under each name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import device_type, run_ranks
from terrazzo.checkpoint import Checkpoint, DefaultSavePlanner, FileSystemWriter, async_save, load, save, verify
from terrazzo.checkpoint.planner import WriteItem
from terrazzo.checkpoint.stores import MemoryStore
from terrazzo.tensor import DTensor, Replicate, Shard

pytestmark = pytest.mark.on_late(elsewhere=True)

NBYTES = 300 * 50 * 4


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 50)
        self.head = nn.Linear(50, 300, bias=False)
        self.head.weight = self.embed.weight


def stored(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("data-*"))


def check(path: Any, expected: dict[str, torch.Tensor]) -> None:
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    load(target, checkpoint_id=path, no_dist=True)
    for name, value in expected.items():
        assert torch.equal(target[name], value), name
        assert torch.equal(Checkpoint(path)[name][1:3], value[1:3].cpu()), name
    assert verify(path) == []


@pytest.mark.parametrize("compression", [False, True])
@pytest.mark.on_late
def test_one_copy_two_names(tmp_path: Path, compression: bool) -> None:
    state = Tied().state_dict()
    writer = FileSystemWriter(tmp_path / "a", compression=compression)
    save(state, storage_writer=writer, no_dist=True)
    assert stored(tmp_path / "a") < NBYTES + 9000
    check(tmp_path / "a", dict(state))
    if not compression:  # what another reader of the data file sees
        (data,) = (tmp_path / "a").glob("data-*")
        assert list(load_file(data)) == ["embed.weight"]
    # The next one takes both names from there.
    writer = FileSystemWriter(tmp_path / "b", compression=compression)
    save(state | {"step": torch.ones(3)}, storage_writer=writer, no_dist=True, base=tmp_path / "a")
    inodes = {file.stat().st_ino for file in (tmp_path / "a").iterdir()}
    new = [file for file in (tmp_path / "b").glob("data-*") if file.stat().st_ino not in inodes]
    assert sum(file.stat().st_size for file in new) < 10_000
    check(tmp_path / "b", state | {"step": torch.ones(3)})


@pytest.mark.on_late
def test_a_background_save_keeps_the_tie(tmp_path: Path) -> None:
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saving = async_save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    with torch.no_grad():
        model.embed.weight.zero_()
    saving.result()
    assert stored(tmp_path) < NBYTES + 9000
    check(tmp_path, before)


def test_pieces_of_small_files_are_shared_too() -> None:
    store = MemoryStore()
    store.caps = type(store.caps)(in_place=False, file_bytes=20_000)
    state = dict(Tied().state_dict())
    save(state, store=store, no_dist=True)
    assert sum(entry.size for entry in store.list("data-")) < NBYTES + 5 * 5000
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    load(target, store=store, no_dist=True)
    assert all(torch.equal(target[name], value) for name, value in state.items())


@pytest.mark.on_late
def test_other_views_of_the_same_memory_are_their_own_tensors(tmp_path: Path) -> None:
    x = torch.arange(16.0).reshape(4, 4)
    z = torch.randn(4, 4, dtype=torch.complex64)
    state = {"x": x, "t": x.t(), "first": x[:2], "rest": x[2:], "ints": x.view(torch.int32), "row": x.view(16)}
    state |= {"z": z, "conj": z.conj(), "none": x[:0], "none2": z[:0]}
    save(state, checkpoint_id=tmp_path, no_dist=True)
    for name, value in state.items():
        assert torch.equal(Checkpoint(tmp_path)[name][...], value.cpu()), name


class Doubling(DefaultSavePlanner):
    """What it writes depends on the name."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found * 2 if write_item.index.fqn == "head.weight" else found


def doubling() -> DefaultSavePlanner:
    """The same by a function that is set on the planner."""
    planner = DefaultSavePlanner()
    own = planner.transform_object
    planner.transform_object = lambda item, object: own(item, object) * (1 + (item.index.fqn == "head.weight"))  # type: ignore[method-assign]
    return planner


@pytest.mark.parametrize("made", [Doubling, doubling])
@pytest.mark.on_late
def test_a_planner_that_changes_values_gets_all_of_them_written(tmp_path: Path, made: Any) -> None:
    state = Tied().state_dict()
    save(state, checkpoint_id=tmp_path, planner=made(), no_dist=True)
    check(tmp_path, {"embed.weight": state["embed.weight"], "head.weight": state["head.weight"] * 2})


def on_two_ranks(path: str) -> None:
    torch.manual_seed(0)
    rank, mesh = dist.get_rank(), init_device_mesh(device_type(), (2,))
    plain, other = torch.randn(64, 50), torch.randn(64, 50)
    local = torch.randn(32, 50) + rank
    sharded = DTensor.from_local(local, mesh, [Shard(0)])
    replicated = DTensor.from_local(other, mesh, [Replicate()])
    state = {"b": plain, "a": plain, "c": sharded, "d": sharded, "e": replicated, "f": replicated.clone()}
    state["g"] = state["e"]
    nbytes = plain.nbytes
    for name, planner in (("whole", DefaultSavePlanner()), ("split", DefaultSavePlanner(split_from=1000))):
        save(state, checkpoint_id=f"{path}/{name}", planner=planner)
        dist.barrier()
        assert stored(Path(path) / name) <= 4 * nbytes + 2 * 4096  # b, c, e, f, and two headers
        target = {key: torch.zeros_like(value) for key, value in state.items()}
        load(target, checkpoint_id=f"{path}/{name}")
        for key, value in state.items():
            same = target[key].to_local() if isinstance(value, DTensor) else target[key]
            assert torch.equal(same, value.to_local() if isinstance(value, DTensor) else value), key
        assert verify(f"{path}/{name}") == []
    # Only one of the ranks has one tensor under both names.
    mixed = {"x": plain, "y": plain if rank else plain.clone(), "z": torch.ones(3)}
    save(mixed, checkpoint_id=f"{path}/mixed")
    check(f"{path}/mixed", mixed)


def test_among_ranks(tmp_path: Path) -> None:
    run_ranks(2, on_two_ranks, str(tmp_path))
