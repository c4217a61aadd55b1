"""Conversions between formats, loading from files of `torch.save`, and the command line."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils as torch_utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ranks import run_ranks
from terrazzo.checkpoint import DefaultLoadPlanner, Metadata, load, save
from terrazzo.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    main,
    torch_save_to_dcp,
)
from terrazzo.checkpoint.formats import DCPWriter, TorchSaveReader, detect
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsafePickleError,
    UnsupportedValueError,
)


def sample() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
    return {
        "model": dict(model.state_dict()),
        "half": torch.randn(6, 3, generator=generator).bfloat16(),
        "list": [torch.ones(2), {"x": torch.zeros(0, 2)}],
        "wide": torch.randn(300, 500, generator=generator).t(),
        "scalar": torch.tensor(2),
        "step": 3,
        "betas": (0.9, 0.99),
        "names": ["a", "b"],
        "none": None,
    }


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        assert set(actual) == set(expected), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{where}.{i}")
    else:
        assert actual == expected and type(actual) is type(expected), where


def blank(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(value) for value in state] if isinstance(state, list) else None


# ------------------------------------------------------------------ loading files of torch.save


@pytest.mark.parametrize("zipped", [True, False])
def test_load_takes_a_file_of_torch_save(zipped: bool, tmp_path: Path) -> None:
    expected = sample()
    torch.save(expected, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    state = blank(expected)
    load(state, checkpoint_id=tmp_path / "a.pt")
    assert_same(state, expected)


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.randn(1000, 1000), "b": torch.ones(3)}, tmp_path / "a.pt")
    reader = TorchSaveReader(tmp_path / "a.pt")
    state = {"b": torch.zeros(3)}
    load(state, storage_reader=reader)
    assert torch.equal(state["b"], torch.ones(3)) and reader.bytes_read == 12


def test_what_does_not_fit_or_is_no_state_dict(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.zeros(2)}, path)
    with pytest.raises(CheckpointMismatchError, match="b: not in the checkpoint"):
        load({"a": torch.zeros(2), "b": torch.zeros(1)}, checkpoint_id=path)
    torch.save(torch.zeros(2), path)
    with pytest.raises(CheckpointFormatError, match=r"holds a StoredTensor, not a state dict"):
        load({"a": torch.zeros(2)}, checkpoint_id=path)
    torch.save({"model": torch.nn.Linear(1, 1)}, path)
    with pytest.raises(UnsafePickleError, match="Linear"):
        load({"a": torch.zeros(2)}, checkpoint_id=path)
    with pytest.raises(CheckpointNotFoundError):
        load({"a": torch.zeros(2)}, storage_reader=TorchSaveReader(tmp_path / "none.pt"))


def load_sharded(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = sample()
    for dim in (0, 1):
        state = {"wide": distribute_tensor(torch.zeros(500, 300), mesh, [Shard(dim)]), "step": 0}
        load(state, checkpoint_id=path)
        assert torch.equal(state["wide"].full_tensor(), expected["wide"]) and state["step"] == 3


def test_each_rank_reads_its_part(tmp_path: Path) -> None:
    torch.save(sample(), tmp_path / "a.pt")
    for world in (2, 4):
        run_ranks(world, load_sharded, tmp_path / "a.pt")


# ------------------------------------------------------------------ one rank reads for all


def load_broadcast(path: Path, coordinator: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = sample()
    for planner in (DynamicMetaLoadPlanner(), DefaultLoadPlanner()):
        state = {
            "wide": distribute_tensor(torch.zeros(500, 300), mesh, [Shard(1)]),
            "half": distribute_tensor(torch.zeros(6, 3, dtype=torch.bfloat16), mesh, [Shard(0)]),
            "scalar": torch.tensor(0),
            "model": {"1.bias": torch.ones(5)},
            "list": [torch.zeros(2), {"x": torch.zeros(0, 2)}],
            "betas": None,
        }
        if dist.get_rank() == 1:  # ranks may ask for different things
            state["step"] = 0
            del state["scalar"]
        reader = BroadcastingTorchSaveReader(coordinator_rank=coordinator)
        # only the coordinator can see the file
        place = path if dist.get_rank() == coordinator else path.with_name("not here")
        load(state, storage_reader=reader, planner=planner, checkpoint_id=place)
        assert torch.equal(state["wide"].full_tensor(), expected["wide"])
        assert torch.equal(state["half"].full_tensor(), expected["half"])
        assert not state["model"]["1.bias"].any() and state["betas"] == (0.9, 0.99)
        if dist.get_rank() == 1:
            assert state["step"] == 3
        else:
            assert state["scalar"] == 2


@pytest.mark.parametrize(("world", "coordinator"), [(2, 0), (4, 2)])
def test_one_rank_reads_for_all(world: int, coordinator: int, tmp_path: Path) -> None:
    torch.save(sample(), tmp_path / "a.pt")
    run_ranks(world, load_broadcast, tmp_path / "a.pt", coordinator)


def broadcast_errors(path: Path) -> None:
    def attempt(place: Path) -> None:
        load({"w": torch.zeros(1000)}, storage_reader=BroadcastingTorchSaveReader(), checkpoint_id=place)

    with pytest.raises(CheckpointError, match="there is no file"):
        attempt(path.with_name("nothing"))
    attempt(path)
    if dist.get_rank() == 0:
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) - 3000] ^= 1
        path.write_bytes(damaged)
    dist.barrier()
    with pytest.raises(CheckpointError, match="not the bytes that were written"):
        attempt(path)


def test_the_readers_errors_reach_every_rank(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    run_ranks(2, broadcast_errors, tmp_path / "a.pt")


def test_one_process_alone(tmp_path: Path) -> None:
    expected = sample()
    torch.save(expected, tmp_path / "a.pt")
    state = blank(expected)
    load(
        state,
        storage_reader=BroadcastingTorchSaveReader(),
        planner=DynamicMetaLoadPlanner(),
        checkpoint_id=tmp_path / "a.pt",
    )
    assert_same(state, expected)


def test_a_dynamic_planner_takes_what_is_asked_for_to_be_there() -> None:
    planner = DynamicMetaLoadPlanner()
    planner.set_up_planner({"a": {"w": torch.zeros(2, 3, dtype=torch.float16)}, "step": 0}, Metadata({}), True)
    assert planner.metadata is not None
    entry = planner.metadata.state_dict_metadata["a.w"]
    assert entry.size == (2, 3) and entry.properties.dtype == torch.float16  # type: ignore[union-attr]
    assert len(planner.create_local_plan().items) == 2


# ------------------------------------------------------------------ converting


def as_native(state: dict[str, Any], folder: Path) -> Path:
    save(state, checkpoint_id=folder / "native")
    return folder / "native"


def as_dcp(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def as_torch_save(state: dict[str, Any], folder: Path) -> Path:
    torch.save(state, folder / "a.pt")
    return folder / "a.pt"


@pytest.mark.parametrize("to", ["native", "dcp", "torch_save"])
@pytest.mark.parametrize("make", [as_native, as_dcp, as_torch_save])
def test_every_way_between_formats(make: Any, to: str, tmp_path: Path) -> None:
    expected = sample()
    source = make(expected, tmp_path)
    copied: dict[str, int] = {}

    def progress(name: str, nbytes: int) -> None:
        copied[name] = copied.get(name, 0) + nbytes

    target = tmp_path / "target"
    convert(source, target, to, progress=progress)
    assert detect(target) == to
    assert copied["wide"] == 600_000 and copied["half"] == 36
    state = blank(expected)
    load(state, checkpoint_id=target)
    assert_same(state, expected)
    convert(target, tmp_path / "back.pt", "torch_save")
    assert_same(torch.load(tmp_path / "back.pt", weights_only=True), expected)
    with pytest.raises(CheckpointExistsError):
        convert(source, target, to)
    convert(source, target, to, overwrite=True)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def save_sharded(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    state = {"w": distribute_tensor(torch.arange(63.0).reshape(9, 7), mesh, [Shard(1)]), "step": 3}
    save(state, checkpoint_id=folder / "native")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder / "dcp")


def test_what_four_ranks_wrote_becomes_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(4, save_sharded, tmp_path)
    monkeypatch.setattr("terrazzo.checkpoint.formats.source._PIECE", 40)  # smaller than a row and a half
    for kind in ("native", "dcp"):
        convert(tmp_path / kind, tmp_path / f"{kind}.pt", "torch_save")
        back = torch.load(tmp_path / f"{kind}.pt")
        assert torch.equal(back["w"], torch.arange(63.0).reshape(9, 7)) and back["step"] == 3


def test_large_chunks_are_copied_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrazzo.checkpoint.formats.source._CHUNK", 100)
    whole = torch.arange(200.0).reshape(20, 10)
    torch.save({"w": whole}, tmp_path / "a.pt")
    for to in ("native", "dcp"):
        convert(tmp_path / "a.pt", tmp_path / to, to)
        state = {"w": torch.zeros(20, 10)}
        load(state, checkpoint_id=tmp_path / to)
        assert torch.equal(state["w"], whole)
    state = {"w": torch.zeros(20, 10)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(state["w"], whole)


def test_values_without_a_typed_form_need_leave(tmp_path: Path) -> None:
    torch.save({"args": np.dtype("f4"), "w": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedValueError, match=r"args.*numpy.dtype"):
        convert(tmp_path / "a.pt", tmp_path / "native", "native")
    assert detect(tmp_path / "native") is None
    convert(tmp_path / "a.pt", tmp_path / "native", "native", allow_pickle=True)
    state = {"args": None}
    load(state, checkpoint_id=tmp_path / "native", planner=DefaultLoadPlanner(allow_pickle=True))
    assert state["args"] == np.dtype("f4")


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    damaged = bytearray((tmp_path / "a.pt").read_bytes())
    damaged[len(damaged) - 3000] ^= 1
    (tmp_path / "a.pt").write_bytes(damaged)
    torch.save({"old": 1}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="not the bytes that were written"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", "torch_save", overwrite=True)
    assert torch.load(tmp_path / "b.pt") == {"old": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt"]
    with pytest.raises(CheckpointFormatError, match="not a checkpoint of a training engine"):
        convert(tmp_path / "b.pt", tmp_path / "c", "deepspeed")
    assert not (tmp_path / "c").exists()


def test_like_torchs_own_functions(tmp_path: Path) -> None:
    expected = sample()
    source = as_dcp(expected, tmp_path)
    dcp_to_torch_save(source, tmp_path / "ours.pt")
    torch_utils.dcp_to_torch_save(source, tmp_path / "theirs.pt")
    ours, theirs = (torch.load(tmp_path / name, weights_only=False) for name in ("ours.pt", "theirs.pt"))
    assert_same(ours, expected)
    assert_same(ours["model"], theirs["model"])

    torch_save_to_dcp(tmp_path / "ours.pt", tmp_path / "again")
    state = blank(expected)
    dcp.load(state, checkpoint_id=tmp_path / "again", no_dist=True)
    assert_same(state, expected)


@pytest.mark.long
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """A file of 160 MB passes through; the peak of resident memory rises by a few tensors (5 MB) and a piece."""
    program = """
import sys, torch
from terrazzo.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
import torch.distributed.checkpoint.metadata, torch.distributed.checkpoint.filesystem

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) >> 10

folder = sys.argv[1]
torch.save({"warm": torch.zeros(1)}, f"{folder}/w.pt")
torch_save_to_dcp(f"{folder}/w.pt", f"{folder}/w"); dcp_to_torch_save(f"{folder}/w", f"{folder}/w.pt")
before = peak()
torch_save_to_dcp(f"{folder}/a.pt", f"{folder}/dcp")
dcp_to_torch_save(f"{folder}/dcp", f"{folder}/b.pt")
print(peak() - before)
"""
    tensors = {f"t{i}": torch.full((5 << 18,), float(i)) for i in range(32)}
    torch.save(tensors, tmp_path / "a.pt")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout.strip().splitlines()[-1]) < 80
    back = torch.load(tmp_path / "b.pt", mmap=True)
    assert all(torch.equal(back[name][::1000], tensors[name][::1000]) for name in tensors)


@pytest.mark.parametrize("make", [as_native, as_dcp, as_torch_save, lambda s, f: save(s, storage_writer=DCPWriter(f))])
def test_numbers_as_keys_stay_numbers_where_the_checkpoint_has_them(make: Any, tmp_path: Path) -> None:
    state = {"state": {0: {"w": torch.ones(1)}, 5: {"w": torch.ones(2)}}, "list": [torch.ones(3)]}
    source = make(state, tmp_path)
    convert(source if isinstance(source, Path) else tmp_path, tmp_path / "ours.pt", "torch_save")
    torch_save_to_dcp(as_torch_save(state, tmp_path), tmp_path / "theirs")
    torch_utils.dcp_to_torch_save(tmp_path / "theirs", tmp_path / "theirs.pt")
    ours, theirs = (torch.load(tmp_path / name) for name in ("ours.pt", "theirs.pt"))
    five = 5 if make in (as_native, as_torch_save) else "5"
    assert set(theirs["state"]) == {"0", "5"} and set(ours["state"]) == {type(five)(0), five}
    assert torch.equal(ours["state"][five]["w"], torch.ones(2))
    assert torch.equal(ours["list"][0], torch.ones(3))


# ------------------------------------------------------------------ the command line


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = sample()
    source = as_torch_save(expected, tmp_path)
    assert main(["torch_to_dcp", str(source), str(tmp_path / "dcp")]) == 0
    assert main(["dcp_to_torch", str(tmp_path / "dcp"), str(tmp_path / "b.pt")]) == 0
    assert_same(torch.load(tmp_path / "b.pt", weights_only=True), expected)
    assert main(["dcp_to_torch", str(tmp_path / "nothing"), str(tmp_path / "c.pt")]) == 1
    assert "nothing was not converted" in capsys.readouterr().err and not (tmp_path / "c.pt").exists()
    with pytest.raises(SystemExit):
        main(["sideways", "a", "b"])
