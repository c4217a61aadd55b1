"""Safetensors files as Hugging Face has them: the format, stores, interrupted saves, PyTorch's classes, commands."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from checkpoint.faults import FaultySystem
from ranks import device_type, run_fresh, run_ranks
from terrazzo.checkpoint import Checkpoint, DefaultLoadPlanner, DefaultSavePlanner, load, save
from terrazzo.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
from terrazzo.checkpoint.formats import HuggingFaceReader, HuggingFaceWriter, detect
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.formats.huggingface.layout import About, WeightsLayout, lay_out
from terrazzo.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
)
from terrazzo.checkpoint.native import commit
from terrazzo.checkpoint.stores import LocalStore, MemoryStore, Store
from terrazzo.checkpoint.stores.fsspec_store import FsspecStore
from terrazzo.cli import app
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConflictError,
    UnsupportedValueError,
)

pytestmark = pytest.mark.on_late(elsewhere=True)


def state(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "b": torch.randn(5, 7, generator=generator),
        "a": torch.randint(9, (5,), generator=generator),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(seed / 2),
        "mask": torch.tensor([True, False]),
        "small": torch.randn(4, generator=generator).to(torch.float8_e4m3fn),
        "z": torch.randn(4, 2, generator=generator).double(),
    }


def small_files(tensors: Any) -> WeightsLayout:
    return lay_out(tensors, 100)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == tensor.dtype and torch.equal(one[name].cpu().float(), tensor.cpu().float())
        for name, tensor in other.items()
    )


def found_in(folder: Path) -> dict[str, torch.Tensor]:
    """What transformers would find: `model.safetensors`, or what the index names; by the safetensors library."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert sum(map(len, files.values())) == len(weight_map)
    return {name: files[file][name] for name, file in weight_map.items()}


@pytest.mark.on_late
def test_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    save(state(), storage_writer=HuggingFaceWriter(tmp_path / "ours"))
    save_file(state(), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert os.listdir(tmp_path / "ours") == ["model.safetensors"]
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    target = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    load(target, checkpoint_id=tmp_path / "theirs.safetensors")
    assert equal(target, state())


@pytest.mark.parametrize(
    "order", [(small_files, lay_out), (lay_out, small_files), pytest.param((small_files,) * 2, marks=pytest.mark.long)]
)
def test_an_old_checkpoint_stays_whole_until_the_new_one_is(order: Any, tmp_path: Path) -> None:
    """A fault at each operation of a save onto another: the folder holds one of them, and one more save clears up."""
    old, new = state(1), state(2)
    at, outcomes = 0, set()
    while True:
        folder = tmp_path / str(at)
        save(old, storage_writer=HuggingFaceWriter(folder, make_layout=order[0]))
        system = FaultySystem(at, "EIO")
        try:
            save(new, storage_writer=HuggingFaceWriter(LocalStore(folder, system), make_layout=order[1]))
            failed = False
        except CheckpointError as error:
            assert "Input/output error" in str(error)
            failed = True
        found = found_in(folder)
        assert equal(found, new) or (failed and equal(found, old)), f"operation {at}: {system.happened}"
        outcomes.add(equal(found, new))
        save(new, storage_writer=HuggingFaceWriter(folder, make_layout=order[1]))
        assert equal(found_in(folder), new)
        names = sorted(os.listdir(folder))
        assert all(name.startswith("model") for name in names), f"operation {at} left something: {names}"
        assert len(names) == (1 if order[1] is lay_out else len(load_index(folder)) + 1)
        if system.happened is None:
            break
        at += 1
    assert at > 15 and outcomes == {True, False}


def load_index(folder: Path) -> set[str]:
    return set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())


def killed_save(folder: str, at: int) -> None:
    store = LocalStore(folder, FaultySystem(at, "kill"))
    save(state(2), storage_writer=HuggingFaceWriter(store, make_layout=small_files), no_dist=True)


@pytest.mark.proof
def test_killed_saves(tmp_path: Path) -> None:
    at = 0
    while True:
        folder = tmp_path / str(at)
        save(state(1), storage_writer=HuggingFaceWriter(folder, make_layout=small_files))
        (outcome,) = run_fresh(1, killed_save, str(folder), at)
        found = found_in(folder)
        assert equal(found, state(2)) or (not outcome.ok and equal(found, state(1)))
        save(state(3), storage_writer=HuggingFaceWriter(folder, make_layout=small_files))
        assert equal(found_in(folder), state(3))
        assert len(os.listdir(folder)) == len(load_index(folder)) + 1
        if outcome.ok:
            break
        at += 3


def test_two_saves_to_one_place(tmp_path: Path) -> None:
    first = HuggingFaceWriter(tmp_path, make_layout=small_files)
    first.reset(None)
    first.set_up_storage_writer(True)
    save(state(2), storage_writer=HuggingFaceWriter(tmp_path, make_layout=small_files))

    class Late(HuggingFaceWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            save(state(3), storage_writer=HuggingFaceWriter(tmp_path, make_layout=small_files))
            super().finish(metadata, results)

    with pytest.raises(ConflictError):
        save(state(4), storage_writer=Late(tmp_path, make_layout=small_files))
    assert equal(found_in(tmp_path), state(3))
    first.abandon()
    with pytest.raises(CheckpointExistsError):
        save(state(1), storage_writer=HuggingFaceWriter(tmp_path, overwrite=False))


@pytest.mark.parametrize("moment", ["before the index", "after the index", "at the end"])
@pytest.mark.parametrize("locks", [True, False])
def test_one_file_and_several_files_at_once(locks: bool, moment: str, tmp_path: Path) -> None:
    """One of two jobs fails, and the other's checkpoint is there, whatever the order of their commits."""
    ended: list[int] = []
    commit_one = [lambda: None]

    class Between(FsspecStore):
        """Not a folder, so without locks; the other job commits at a moment of a put."""

        def put(self, key: str, data: Any, **condition: Any) -> Any:
            if key.endswith(".index.json") and moment == "before the index":
                commit_one[0]()
            version = super().put(key, data, **condition)
            if key.endswith(".index.json") and moment == "after the index":
                commit_one[0]()
            return version

    store = LocalStore(tmp_path) if locks else Between(f"local://{tmp_path}")

    class One(HuggingFaceWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            def commit() -> None:
                commit_one[0] = lambda: None
                with suppress(ConflictError):
                    HuggingFaceWriter.finish(self, metadata, results)
                    ended.append(1)

            commit_one[0] = commit
            with suppress(ConflictError):
                save(state(2), storage_writer=HuggingFaceWriter(store, make_layout=small_files))
                ended.append(2)
            commit_one[0]()
            if 1 not in ended:
                raise ConflictError("the other one has won")

    with suppress(ConflictError):
        save(state(1), storage_writer=One(store))
    (winner,) = ended
    assert equal(found_in(tmp_path), state(winner))


def test_a_failure_after_the_index_is_there(tmp_path: Path) -> None:
    class Undeletable(FsspecStore):
        def delete(self, keys: Any) -> None:
            if "model.safetensors" in (keys := list(keys)):
                raise OSError(errno.EACCES, "no right to delete")
            super().delete(keys)

    save(state(1), storage_writer=HuggingFaceWriter(tmp_path))
    writer = HuggingFaceWriter(Undeletable(f"local://{tmp_path}"), make_layout=small_files)
    with pytest.raises(CheckpointError, match="no right to delete"):
        save(state(2), storage_writer=writer)
    assert not writer.may_abandon()  # the other ranks go by this
    assert load_index(tmp_path) <= set(os.listdir(tmp_path))


def test_shards_without_an_index(tmp_path: Path) -> None:
    """All of them are a checkpoint; what a first save to an object store has written until it ends is none."""
    save(state(), storage_writer=HuggingFaceWriter(tmp_path, make_layout=small_files))
    names = sorted(load_index(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    target = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    load(target, checkpoint_id=tmp_path)
    assert equal(target, state())
    (tmp_path / names[-1]).unlink()
    with pytest.raises(CheckpointCorruptError, match="the save has not ended, or files are missing"):
        Checkpoint(tmp_path)


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    def saved(**values: float) -> None:
        save_file({name: torch.full((4,), value) for name, value in values.items()}, tmp_path / "model.safetensors")

    saved(a=1.0, b=2.0)
    reader = HuggingFaceReader(tmp_path)
    reader.read_metadata()
    os.utime(tmp_path / "model.safetensors", (0, 0))  # the same size and another time
    target = {"a": torch.zeros(4)}
    plan = DefaultLoadPlanner()
    plan.set_up_planner(target, reader.read_metadata())
    with pytest.raises(ConflictError, match="has been replaced while it was read"):
        reader.read_data(plan.create_local_plan(), plan)
    saved(b=3.0, c=4.0)
    target = {"b": torch.zeros(4)}
    load(target, storage_reader=reader)
    assert target["b"].tolist() == [3.0] * 4
    os.utime(tmp_path / "model.safetensors", (0, 0))
    saved(c=5.0, b=6.0)
    load(target, storage_reader=reader)
    assert target["b"].tolist() == [6.0] * 4


class Looking(HuggingFaceWriter):
    """Looks at the files before this rank writes to them."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.sizes = [entry.size for entry in self.store.list(".hf-")]
        return super().write_data(plan, planner)


def check_sizes(folder: str) -> None:
    for layout in (None, lay_out({name: About(tensor.dtype, tuple(tensor.shape)) for name, tensor in state().items()})):
        writer = Looking(f"{folder}/same", layout)
        save(state(), storage_writer=writer)
        assert writer.sizes == [os.stat(f"{folder}/same/model.safetensors").st_size]
        dist.barrier()
    with pytest.raises(CheckpointError, match="not the same folder on all ranks"):
        save(state(), storage_writer=HuggingFaceWriter(f"{folder}/{dist.get_rank()}", make_layout=small_files))


def test_files_have_their_size_before_ranks_open_them(tmp_path: Path) -> None:
    """Clients of NFS may write zeros over what other nodes write beyond the end that they know."""
    run_ranks(2, check_sizes, str(tmp_path))


def test_a_long_save_is_not_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(FsspecStore):
        signs = 0

        def put(self, key: str, data: Any, **condition: Any) -> Any:
            self.signs += key.startswith("save-")
            return super().put(key, data, **condition)

    store = Counting(f"local://{tmp_path}")
    monkeypatch.setattr(commit, "RENEW_SECONDS", 0.0)
    save(state(1), storage_writer=HuggingFaceWriter(store, make_layout=small_files))
    assert store.signs > 3

    class Late(HuggingFaceWriter):
        lost = ""

        def finish(self, metadata: Any, results: Any) -> None:
            store.delete([name for name in os.listdir(tmp_path) if name not in before and self.lost in name])
            super().finish(metadata, results)

    before = os.listdir(tmp_path)
    for lost in ("save-", "-00002-of"):
        with pytest.raises(ConflictError, match="another save has taken this one for dead"):
            writer = Late(store, make_layout=small_files)
            writer.lost = lost
            save(state(2), storage_writer=writer)
        assert equal(found_in(tmp_path), state(1))
    save(state(3), storage_writer=HuggingFaceWriter(store, make_layout=small_files))
    assert equal(found_in(tmp_path), state(3)) and len(os.listdir(tmp_path)) == len(load_index(tmp_path)) + 1
    held = commit.Commit(store, "root")
    held.hold("0123456789ab")
    store.delete([commit.lease_name("0123456789ab")])
    held.renew()
    assert not held.is_held(), "a lease that another save has removed is not written again"


def check_group(folder: str) -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with pytest.raises(CheckpointError, match="2 ranks save, but the writer is for 4"):
            save(state(), storage_writer=HuggingFaceStorageWriter(f"local://{folder}"), process_group=group)
        writer = HuggingFaceStorageWriter(f"local://{folder}", process_group=group)
        save(state(), storage_writer=writer, process_group=group)
    dist.barrier()
    assert equal(found_in(Path(folder)), state())


def test_some_of_the_ranks_save_to_a_store(tmp_path: Path) -> None:
    run_ranks(4, check_group, str(tmp_path))


def check_streamed(folder: str) -> None:
    """A store that takes whole files only: each has an owner, whom the others send their parts."""
    from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    whole = state() | {"large": torch.arange(3_000_000, dtype=torch.int32).reshape(1500, 2000)}
    sharded = {
        name: distribute_tensor(tensor, mesh, [Shard(tensor.ndim - 1)], src_data_rank=None)
        if name in ("b", "z", "large")
        else tensor
        for name, tensor in whole.items()
    }
    store = FsspecStore(f"local://{folder}")
    for layout in (lay_out, small_files):
        save(dict(sharded), storage_writer=HuggingFaceWriter(store, make_layout=layout))
        assert equal(found_in(Path(folder)), whole)
        dist.barrier()
        target = {name: torch.zeros_like(tensor) for name, tensor in sharded.items()}
        load(target, store=store)
        for name, tensor in target.items():
            found = tensor.full_tensor() if name in ("b", "z", "large") else tensor
            assert torch.equal(found.float(), whole[name].float()), name
        dist.barrier()


def test_stores_that_take_whole_files(tmp_path: Path) -> None:
    run_ranks(2, check_streamed, str(tmp_path))
    store: Store = MemoryStore()
    save(state(), storage_writer=HuggingFaceWriter(store, make_layout=small_files))
    convert(store, tmp_path / "native", "native")
    target = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    load(target, checkpoint_id=tmp_path / "native")
    assert equal(target, state())


class Forgetful(DefaultSavePlanner):
    """Promises all, and has one tensor less written."""

    def finish_plan(self, new_plan: Any) -> Any:
        return replace(new_plan, items=[item for item in new_plan.items if item.index.fqn != "b"])


@pytest.mark.parametrize("layout", [lay_out, small_files])
def test_what_was_not_written_is_noticed(layout: Any, tmp_path: Path) -> None:
    for place in (LocalStore(tmp_path), FsspecStore(f"local://{tmp_path}")):
        save(state(1), storage_writer=HuggingFaceWriter(tmp_path, make_layout=layout))
        with pytest.raises(CheckpointError, match="ranks have (written|given)"):
            save(state(2), storage_writer=HuggingFaceWriter(place, make_layout=layout), planner=Forgetful())
        assert equal(found_in(tmp_path), state(1))


class Failing(FsspecStore):
    def stream(self, key: str) -> Any:
        raise OSError(errno.ENOSPC, "the bucket is full", key)


def check_failing_owner(folder: str) -> None:
    rank = dist.get_rank()
    store = (Failing if rank == 1 else FsspecStore)(f"local://{folder}")
    with pytest.raises(CheckpointError, match="rank 1: OSError.*the bucket is full"):
        save(state(), storage_writer=HuggingFaceWriter(store, make_layout=small_files))
    dist.barrier()
    assert os.listdir(folder) == []


def test_an_owner_that_fails_is_told_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, check_failing_owner, str(tmp_path))


def test_what_is_wrong_with_files(tmp_path: Path) -> None:
    save(state(), storage_writer=HuggingFaceWriter(tmp_path, make_layout=small_files))
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for name, file, kind, words in (
        ("b", "../model.safetensors", CheckpointCorruptError, "is not the name of a safetensors file"),
        ("b", "other.safetensors", CheckpointNotFoundError, "other.safetensors, which is not there"),
        ("q", content["weight_map"]["b"], CheckpointCorruptError, "'q' is in .*, where it is not"),
    ):
        changed = content | {"weight_map": content["weight_map"] | {name: file}}
        index.write_text(json.dumps(changed))
        with pytest.raises(kind, match=words):
            Checkpoint(tmp_path)
    index.unlink()
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / content["weight_map"]["b"]).read_bytes())
    with pytest.raises(CheckpointCorruptError, match="and no index says which one counts"):
        Checkpoint(tmp_path)
    assert detect(tmp_path) == "huggingface"
    for changes in ({"shape": [-1, -4]}, {"data_offsets": [0.0, 16.0]}, {"data_offsets": [16, 0]}, {"shape": "4"}):
        header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        with pytest.raises(CheckpointCorruptError, match="damaged safetensors header"):
            Checkpoint(tmp_path)
    with pytest.raises(UnsupportedValueError, match="step is not a tensor"):
        save({"w": torch.ones(1), "step": 3}, storage_writer=HuggingFaceWriter(tmp_path / "x"))
    save({"w": torch.ones(1, dtype=torch.complex128)}, checkpoint_id=tmp_path / "native")
    with pytest.raises(UnsupportedValueError, match="w: safetensors has no type"):
        convert(tmp_path / "native", tmp_path / "y", "huggingface")
    assert os.listdir(tmp_path / "y") == [], "what shows that a save is under way is removed"


def test_a_single_file_is_read_through_one_store(tmp_path: Path) -> None:
    """Not one for each tensor, each with requests of its own."""
    save_file({f"w{number}": torch.full((3,), float(number)) for number in range(8)}, tmp_path / "one.safetensors")
    reader = HuggingFaceReader(tmp_path / "one.safetensors")
    names = list(reader.read_metadata().state_dict_metadata)
    assert len({row.store for name in names for row in reader.rows_of(name)}) == 1
    target = {name: torch.zeros(3) for name in names}
    load(target, storage_reader=reader)
    assert all(torch.equal(target[f"w{number}"], torch.full((3,), float(number))) for number in range(8))


def check_torch_classes(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device_type(), (2,))
    whole = {"w": torch.arange(30.0).reshape(5, 6), "b": torch.arange(4)}
    theirs = {"w": distribute_tensor(whole["w"], mesh, [Shard(0)]), "b": whole["b"]}

    def empty() -> dict[str, Any]:
        return {"w": distribute_tensor(torch.zeros(5, 6), mesh, [Shard(1)]), "b": torch.zeros(4, dtype=torch.int64)}

    def check(found: dict[str, Any]) -> None:
        assert isinstance(found["w"], DTensor) and torch.equal(found["w"].full_tensor(), whole["w"])
        assert torch.equal(found["b"], whole["b"])

    numbers = {"w": 1, "b": 2}
    metadata = save(
        dict(theirs), storage_writer=HuggingFaceStorageWriter(f"{folder}/ours", numbers, save_distributed=True)
    )
    assert sorted(metadata.state_dict_metadata) == ["b", "w"]
    target = empty()
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(f"{folder}/ours"))
    check(target)
    # Of PyTorch's, each rank's file has parts of tensors.
    dcp.save(dict(theirs), storage_writer=dcp.HuggingFaceStorageWriter(f"{folder}/theirs", save_distributed=True))
    dist.barrier()
    target = empty()
    load(target, storage_reader=HuggingFaceStorageReader(f"{folder}/theirs"))
    check(target)

    def places(reader: Any) -> dict[Any, Any]:
        """Which file has which part, as libraries read it from the metadata."""
        found = reader.read_metadata().storage_data.items()
        return {(i.fqn, i.offset): (part.relative_path, part.shape, part.dtype) for i, part in found}

    for written in ("ours", "theirs"):
        path = f"{folder}/{written}"
        assert places(HuggingFaceStorageReader(path)) == places(dcp.HuggingFaceStorageReader(path))
    # Parts become whole tensors, in as many files as are asked for; files that are complete are copied, also in place.
    for source, place, files in (
        ("theirs", "theirs/whole", numbers),
        ("ours", "one", dict.fromkeys(numbers, 1)),
        ("theirs", "theirs", numbers),
        ("ours", "ours", numbers),
    ):
        consolidate_safetensors_files_on_every_rank(f"{folder}/{source}", f"{folder}/{place}", files)
    with pytest.raises(CheckpointMismatchError, match="has no 'x', nor 1 more that are named"):
        consolidate_safetensors_files_on_every_rank(f"{folder}/ours", f"{folder}/none", {"x": 1, "y": 1, "w": 1})


@pytest.mark.cpu_only("PyTorch's save reads pinned memory before it is there, if another device is current")
def test_names_of_pytorch(tmp_path: Path) -> None:
    run_ranks(2, check_torch_classes, str(tmp_path))
    two = [*(f"model-0000{number}-of-00002.safetensors" for number in (1, 2)), "model.safetensors.index.json"]
    assert sorted(os.listdir(tmp_path / "ours")) == two
    assert sorted(os.listdir(tmp_path / "theirs/whole")) == two
    assert sorted(os.listdir(tmp_path / "one")) == ["model-00001-of-00001.safetensors", two[-1]]
    for folder in ("ours", "one", "theirs", "theirs/whole"):
        found = found_in(tmp_path / folder)
        assert equal(found, {"w": torch.arange(30.0).reshape(5, 6), "b": torch.arange(4)})


def test_the_place_of_a_writer_does_not_change_with_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    writer = HuggingFaceStorageWriter("first")
    assert Path(writer.checkpoint_id) == tmp_path / "first"
    for name in ("second", (tmp_path / "second").as_uri()):
        writer.reset(name)
        assert Path(writer.checkpoint_id) == tmp_path / "second"


@pytest.mark.on_late
def test_float8_in_blocks(tmp_path: Path) -> None:
    """PyTorch's reader, and the arithmetic on one device."""
    import torch.distributed.checkpoint as dcp

    from terrazzo.integrations.huggingface import load_model

    weight = torch.randn(300, 200).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2) + 0.5
    expected = weight.float() * scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    save(
        {"l.weight": weight, "l.weight_scale_inv": scale, "l.bias": torch.ones(3)},
        storage_writer=HuggingFaceStorageWriter(tmp_path),
    )
    for module, reader in (
        (dcp, dcp.QuantizedHuggingFaceStorageReader(str(tmp_path))),
        (None, QuantizedHuggingFaceStorageReader(tmp_path)),
    ):
        target = {"l.weight": torch.zeros(300, 200)}
        (load if module is None else module.load)(target, storage_reader=reader)
        assert torch.equal(target["l.weight"], expected)
    part = Checkpoint(HuggingFaceReader(tmp_path, dequantise=torch.float32))["l.weight"][100:140, 120:]
    assert torch.equal(part.cpu(), expected[100:140, 120:].cpu())

    model = torch.nn.Module()
    model.add_module("l", torch.nn.Linear(200, 300, device="meta", dtype=torch.bfloat16))
    model.l.bias = torch.nn.Parameter(torch.zeros(3))
    assert load_model(model, tmp_path) == ([], [])
    assert torch.equal(model.l.weight.cpu(), expected.bfloat16().cpu())

    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [64, 64]}}))
    with pytest.raises(CheckpointCorruptError, match="in blocks of 64 x 64 it should be"):
        load_model(model, tmp_path)


def test_commands(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output
        return result.output

    native = {"model": {"w": torch.randn(4, 3), "b": torch.ones(2)}, "optim": {"w": torch.zeros(1)}, "step": 7}
    save(native, checkpoint_id=tmp_path / "native")
    refused = CliRunner().invoke(
        app, ["convert", str(tmp_path / "native"), str(tmp_path / "hf"), "--to", "huggingface"]
    )
    assert refused.exit_code != 0 and "step" in refused.output and "--only" in refused.output
    run("convert", str(tmp_path / "native"), str(tmp_path / "hf"), "--to", "huggingface", "--only", "model")
    assert equal(load_file(tmp_path / "hf" / "model.safetensors"), native["model"])
    assert "float32" in run("ls", str(tmp_path / "hf"))
    assert "shape [4, 3]" in run("show", str(tmp_path / "hf" / "model.safetensors"), "w")
    run("convert", str(tmp_path / "hf"), str(tmp_path / "again"), "--to", "dcp")
    assert "no difference" in run("diff", str(tmp_path / "hf"), str(tmp_path / "again"))


def test_sizes_of_files() -> None:
    about = About(torch.float32, (4,))
    layout = lay_out({"a": about, "large": About(torch.float32, (40,)), "b": about}, "32B")
    assert [file.names for file in layout.files] == [("a",), ("large",), ("b",)]
    with pytest.raises(ValueError, match="'5 apples' is no size"):
        lay_out({}, "5 apples")
