"""Torch DCP checkpoints: read without running them, resharded; written so that torch's own load takes them."""

from __future__ import annotations

import dataclasses
import enum
import io
import os
import pickle
import warnings
from collections import deque
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from checkpoint.fuzz import VALUES, asked_for_too_much, bounded
from ranks import run_ranks
from terrazzo.checkpoint import (
    Checkpoint,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
    load,
    save,
)
from terrazzo.checkpoint import TensorStorageMetadata as Described
from terrazzo.checkpoint._fsspec_filesystem import FsspecReader
from terrazzo.checkpoint.formats import DCPReader, DCPWriter, detect
from terrazzo.checkpoint.formats.dcp_metadata import METADATA
from terrazzo.checkpoint.formats.torch_archive import value_of
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DivergentValueError,
    TerrazzoError,
    UnsafePickleError,
    UnsupportedValueError,
)


def torch_save(state: dict[str, Any], path: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(str(path), **options), no_dist=not dist.is_initialized())


def torch_load(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(path), no_dist=not dist.is_initialized())


def values(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "w": torch.randn(7, 5, generator=generator),
            "half": torch.randn(3, generator=generator).bfloat16(),
            "transposed": torch.randn(4, 6, generator=generator).t(),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 4),
            "eight": torch.randn(3, generator=generator).to(torch.float8_e4m3fn),
        },
        "list": [1, torch.ones(2)],
        "step": 3,
        "none": None,
        "betas": (0.9, 0.99),
        "text": "x",
        "wide": torch.randn(300, 200, generator=generator),
    }


def blank(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state, memory_format=torch.contiguous_format)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(value) for value in state] if isinstance(state, list) else "replaced"


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual.float(), expected.float()), where
    elif isinstance(expected, dict):
        assert set(actual) == set(expected)
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{where}.{i}")
    else:
        assert actual == expected and type(actual) is type(expected), where


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize("serialization", list(SerializationFormat))
@pytest.mark.parametrize("one_file", [True, False])
def test_what_torch_wrote_is_loaded(serialization: SerializationFormat, one_file: bool, tmp_path: Path) -> None:
    expected = values()
    if serialization is SerializationFormat.SAFETENSORS:
        del expected["model"]["transposed"]  # safetensors refuses what is not contiguous
    torch_save(expected, tmp_path, serialization_format=serialization, single_file_per_rank=one_file)
    state = blank(expected)
    load(state, checkpoint_id=tmp_path)
    assert_same(state, expected)


def check_named_readers(folder: str) -> None:
    """Under `install()` a program for PyTorch has these readers, and may have saved with PyTorch before."""
    own = type("Own", (FileSystemReader,), {})
    for name in ("theirs", "ours"):
        place = Path(folder, name)
        readers = [FileSystemReader(place), own(place), FsspecReader(f"file://{place}")]
        for reader in readers:
            for no_dist in (False, True):
                state = blank(values())
                load(state, storage_reader=reader, no_dist=no_dist)
                assert_same(state, values())
        state = blank(values())
        load(state, storage_reader=FileSystemReader(folder), checkpoint_id=place)
        assert_same(state, values())
        described = FileSystemReader(place).read_metadata().state_dict_metadata
        assert Checkpoint(own(place)).keys() == described.keys()
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        FileSystemReader(folder).read_metadata()
    reader = FileSystemReader(Path(folder, "theirs"))
    with mock.patch.object(DCPReader, "_described", autospec=True, side_effect=DCPReader._described) as described_by:
        load(blank(values()), storage_reader=reader, read="once_per_node")
    assert described_by.call_count == 1, "also on the rank that looked for a root first"


def test_programs_that_name_a_reader_load_what_torch_wrote(tmp_path: Path) -> None:
    torch_save(values(), tmp_path / "theirs")
    save(values(), checkpoint_id=tmp_path / "ours")
    run_ranks(2, check_named_readers, str(tmp_path))


def test_what_is_written_torch_loads(tmp_path: Path) -> None:
    expected = values()
    save(expected, storage_writer=DCPWriter(tmp_path))
    assert detect(tmp_path) == "dcp"
    for load_it in (torch_load, lambda state, path: load(state, checkpoint_id=path)):
        state = blank(expected)
        load_it(state, tmp_path)
        assert_same(state, expected)


def test_torch_rebuilds_the_nested_dict_from_what_is_written(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    save(values(), storage_writer=DCPWriter(tmp_path / "c"))
    dcp_to_torch_save(tmp_path / "c", tmp_path / "x.pt")
    assert_same(torch.load(tmp_path / "x.pt", weights_only=False), values())


class TuplesPlanner(DefaultSavePlanner):
    """Makes metadata of its own, whose chunks are a tuple."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        entries: dict[str, Any] = {
            name: dataclasses.replace(entry, chunks=tuple(entry.chunks)) if isinstance(entry, Described) else entry
            for name, entry in metadata.state_dict_metadata.items()
        }
        return plans, dataclasses.replace(metadata, state_dict_metadata=entries)


def test_torch_loads_what_a_planner_has_described_by_other_sequences(tmp_path: Path) -> None:
    expected = values()
    save(expected, storage_writer=DCPWriter(tmp_path), planner=TuplesPlanner())
    assert b"terrazzo.layout" not in (tmp_path / METADATA).read_bytes(), "a class that PyTorch may not have"
    state = blank(expected)
    torch_load(state, tmp_path)
    assert_same(state, expected)


class PinnedPlanner(DefaultSavePlanner):
    """Describes tensors as they are on its machine."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, Described):
                entry.properties = dataclasses.replace(entry.properties, pin_memory=True)
        return plans, metadata


def test_of_the_properties_of_tensors_those_are_written_that_are_no_machines(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, storage_writer=DCPWriter(tmp_path), planner=PinnedPlanner())
    written = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["w"].properties
    assert written.dtype is torch.float32 and not written.pin_memory


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    torch_save({"a": torch.randn(1000, 1000), "b": torch.ones(3)}, tmp_path)
    reader = DCPReader(tmp_path)
    state = {"b": torch.zeros(3)}
    load(state, storage_reader=reader)
    assert torch.equal(state["b"], torch.ones(3)) and reader.bytes_read < 10_000


def test_saving_again_replaces_the_checkpoint_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(values(0), storage_writer=DCPWriter(tmp_path))
    with pytest.raises(CheckpointExistsError):
        save(values(1), storage_writer=DCPWriter(tmp_path, overwrite=False))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("terrazzo.checkpoint.stores.local.LocalStore.put", fail)
        with pytest.raises(CheckpointError, match="No space left"):
            save(values(1), storage_writer=DCPWriter(tmp_path))
    state = blank(values())
    torch_load(state, tmp_path)
    assert_same(state, values(0))

    save(values(2), storage_writer=DCPWriter(tmp_path))
    state = blank(values())
    torch_load(state, tmp_path)
    assert_same(state, values(2))
    assert len(os.listdir(tmp_path)) == 2


def test_all_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    torch_save({"a": torch.zeros(2), "b": torch.zeros(3)}, tmp_path)
    state = {"a": torch.zeros(5), "b": torch.zeros(3, dtype=torch.int8), "c": torch.zeros(1)}
    with pytest.raises(CheckpointMismatchError) as caught:
        load(state, checkpoint_id=tmp_path)
    assert caught.value.missing == ("c",) and len(caught.value.mismatched) == 2


# ------------------------------------------------------------------ ranks

LAYOUTS: dict[int, list[tuple[tuple[int, ...], list[Placement]]]] = {
    1: [((1,), [Replicate()])],
    2: [((2,), [Shard(0)]), ((2,), [Shard(1)]), ((2,), [Replicate()])],
    4: [((4,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)]), ((2, 2), [Replicate(), Shard(0)])],
}


def state_in(layout: tuple[tuple[int, ...], list[Placement]], fill: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", layout[0])
    whole = torch.arange(70.0).reshape(10, 7)
    half = torch.arange(15.0).reshape(3, 5).bfloat16()
    tensors = {"w": whole, "half": half, "plain": torch.arange(4)}
    if not fill:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    return {
        "w": distribute_tensor(tensors["w"], mesh, layout[1]),
        "nested": {"half": distribute_tensor(tensors["half"], mesh, layout[1])},
        "plain": tensors["plain"],
        "step": 3 if fill else 0,
    }


def check_loaded(state: dict[str, Any]) -> None:
    assert torch.equal(state["w"].full_tensor(), torch.arange(70.0).reshape(10, 7))
    assert torch.equal(state["nested"]["half"].full_tensor(), torch.arange(15.0).reshape(3, 5).bfloat16())
    assert torch.equal(state["plain"], torch.arange(4)) and state["step"] == 3


def save_with_torch(path: Path) -> None:
    for i, layout in enumerate(LAYOUTS[dist.get_world_size()]):
        torch_save(state_in(layout, fill=True), path / str(i))


def save_with_terrazzo(path: Path) -> None:
    for i, layout in enumerate(LAYOUTS[dist.get_world_size()]):
        save(state_in(layout, fill=True), storage_writer=DCPWriter(path / str(i)))


def load_all(paths: list[Path], with_torch: bool) -> None:
    for path in paths:
        for layout in LAYOUTS[dist.get_world_size()]:
            state = state_in(layout, fill=False)
            if with_torch:
                torch_load(state, path)
            else:
                load(state, checkpoint_id=path)
            check_loaded(state)
            assert isinstance(state["w"], DTensor)


def check_shares(path: Path) -> None:
    """Ranks agree on who writes what as in the native format: large values are split, and equal on all ranks."""
    rank, planner = dist.get_rank(), DefaultSavePlanner(split_from=64)
    save({"w": torch.arange(40.0), "step": 3}, storage_writer=DCPWriter(path), planner=planner)
    assert {name[:4] for name in os.listdir(path) if name != METADATA} == {"__0_", "__1_"}
    assert len(DCPReader(path).read_metadata().state_dict_metadata["w"].chunks) == 2
    state = {"w": torch.zeros(40), "step": 0}
    torch_load(state, path)
    assert state["w"].tolist() == list(range(40)) and state["step"] == 3
    with pytest.raises(DivergentValueError, match="'w'"):
        save({"w": torch.full((40,), rank), "step": 4}, storage_writer=DCPWriter(path))
    torch_load(state, path)
    assert state["step"] == 3


def test_ranks_share_what_is_written(tmp_path: Path) -> None:
    run_ranks(2, check_shares, tmp_path)


def test_torchs_checkpoints_are_loaded_by_other_ranks_in_other_layouts(tmp_path: Path) -> None:
    for world in LAYOUTS:
        run_ranks(world, save_with_torch, tmp_path / str(world))
    saved = [tmp_path / str(world) / str(i) for world in LAYOUTS for i in range(len(LAYOUTS[world]))]
    for world in LAYOUTS:
        run_ranks(world, load_all, saved, False)


def test_torch_loads_what_other_ranks_wrote_in_other_layouts(tmp_path: Path) -> None:
    for world in LAYOUTS:
        run_ranks(world, save_with_terrazzo, tmp_path / str(world))
    saved = [tmp_path / str(world) / str(i) for world in LAYOUTS for i in range(len(LAYOUTS[world]))]
    for world in LAYOUTS:
        run_ranks(world, load_all, saved, True)


def save_without_collectives(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]), "step": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(path), use_collectives=False)


def test_a_table_of_contents_per_rank_is_merged(tmp_path: Path) -> None:
    run_ranks(2, save_without_collectives, tmp_path)
    assert not (tmp_path / ".metadata").exists() and detect(tmp_path) == "dcp"
    state = {"w": torch.zeros(6), "step": 0}
    load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["w"], torch.arange(6.0)) and state["step"] == 3


# ------------------------------------------------------------------ malice and damage


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_malice_in_the_table_of_contents_runs_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    torch_save({"w": torch.zeros(2)}, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = {"w": Runs(tmp_path / "marker")}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafePickleError, match=r"\.metadata.*system"):
        load({"w": torch.zeros(2)}, checkpoint_id=folder)
    assert not (tmp_path / "marker").exists()


def test_malice_in_a_value_runs_nothing(tmp_path: Path) -> None:
    torch_save({"x": Runs(tmp_path / "marker"), "w": torch.zeros(2)}, tmp_path / "c")
    state = {"w": torch.ones(2)}
    load(state, checkpoint_id=tmp_path / "c")
    assert not state["w"].any()
    with pytest.raises(UnsafePickleError, match="x: .*system"):
        load({"x": 0}, checkpoint_id=tmp_path / "c")
    assert not (tmp_path / "marker").exists()


@dataclasses.dataclass
class Settings:
    scale: torch.Tensor
    sizes: tuple[int, ...] = ()


class Kind(enum.Enum):
    DENSE = 1


class Outer:
    class Inner(enum.Enum):  # which the protocol of PyTorch's files names by a call
        A = 1


@pytest.mark.parametrize("whose", ["ours", "PyTorch's"])
def test_values_of_allowed_classes_and_sparse_tensors(whose: str, tmp_path: Path) -> None:
    """Also where a reader hands their bytes to the planner."""
    value = {Kind.DENSE: [Settings(torch.arange(3.0), (1, 2))], "sparse": (torch.eye(3).to_sparse(),)}
    value["compressed"] = [torch.eye(3).to_sparse_csr()]
    torch_save({"x": (value,)}, tmp_path)
    given: dict[str, Any] = {"checkpoint_id": tmp_path}
    if whose == "PyTorch's":
        given = {"storage_reader": dcp.FileSystemReader(tmp_path)}
    state: dict[str, Any] = {"x": None}
    with pytest.raises(TerrazzoError, match="Settings|Kind"):
        load(state, **given)
    with torch.serialization.safe_globals([Settings, (Kind, f"{__name__}.Kind")]):
        load(state, **given)
    (found,) = state["x"]
    assert found[Kind.DENSE][0].sizes == (1, 2) and found[Kind.DENSE][0].scale.tolist() == [0, 1, 2]
    sparse, compressed = found["sparse"][0], found["compressed"][0]
    assert sparse.is_coalesced() and torch.equal(sparse.to_dense(), torch.eye(3))
    assert compressed.layout is torch.sparse_csr and torch.equal(compressed.to_dense(), torch.eye(3))


def test_values_in_containers_come_back_and_what_would_not_is_refused_by_the_save(tmp_path: Path) -> None:
    losses = deque([torch.ones(2), np.float32(1.5), np.arange(2)], maxlen=5)
    value = {
        "losses": losses,
        "all": SimpleNamespace(recent=deque(losses), seen={np.int64(3)}),
        "taken": timedelta(seconds=3),
        "file": io.BytesIO(b"abc"),
        "kind": Kind.DENSE,
    }
    save({"x": value}, storage_writer=DCPWriter(tmp_path / "values"))
    found = Checkpoint(tmp_path / "values").state_dict()["x"]
    for each in (found["losses"], found["all"].recent):
        assert type(each) is deque and each[0].tolist() == [1, 1] and each[2].tolist() == [0, 1]
        assert type(each[1]) is np.float32 and each[1] == 1.5
    assert found["losses"].maxlen == 5 and [type(each) for each in found["all"].seen] == [np.int64]
    assert found["taken"] == timedelta(seconds=3) and found["file"].getvalue() == b"abc" and found["kind"] is Kind.DENSE

    with pytest.raises(TerrazzoError, match=r"x\.y: in PyTorch's format this \S*Inner would be a pickle"):
        save({"x": {"y": Outer.Inner.A}}, storage_writer=DCPWriter(tmp_path / "refused"))
    save({"x": {"y": Outer.Inner.A}}, checkpoint_id=tmp_path / "own")
    assert Checkpoint(tmp_path / "own")["x.y"] is Outer.Inner.A
    pickled = DefaultSavePlanner(allow_pickle=True)
    save({"x": Fraction(1, 2)}, storage_writer=DCPWriter(tmp_path / "pickled"), planner=pickled)
    state: dict[str, Any] = {"x": 0}
    torch_load(state, tmp_path / "pickled")
    assert state["x"] == Fraction(1, 2)


@pytest.mark.parametrize("data", VALUES.values(), ids=VALUES.keys())
def test_bytes_that_a_reader_hands_over_take_no_more_memory_than_they_have(data: bytes) -> None:
    try:
        with bounded():
            assert value_of("x", io.BytesIO(data), False, "allow it").layout is torch.sparse_coo
    except UnsupportedValueError as error:
        assert not asked_for_too_much(error)


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b"])
def test_files_outside_of_the_folder_are_not_touched(path: str, tmp_path: Path) -> None:
    torch_save({"w": torch.zeros(2)}, tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for location in metadata.storage_data.values():
        location.relative_path = path
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointCorruptError, match="outside of its folder"):
        load({"w": torch.zeros(2)}, checkpoint_id=tmp_path)


def test_damage_names_tensor_and_file(tmp_path: Path) -> None:
    torch_save({"w": torch.randn(100, 100)}, tmp_path)
    data = tmp_path / "__0_0.distcp"
    whole = data.read_bytes()
    for position in (100, len(whole) // 2, len(whole) - 10_000):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        data.write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp.*w"):
            load({"w": torch.zeros(100, 100)}, checkpoint_id=tmp_path)
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp.*w"):
        load({"w": torch.zeros(100, 100)}, checkpoint_id=tmp_path)
    data.unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"__0_0\.distcp"):
        load({"w": torch.zeros(100, 100)}, checkpoint_id=tmp_path)


def test_a_table_of_contents_that_lies_is_found_out(tmp_path: Path) -> None:
    torch_save({"w": torch.zeros(4, 4), "v": torch.zeros(2), "x": 3}, tmp_path)
    path = tmp_path / ".metadata"
    whole = path.read_bytes()

    def lie(change: Any) -> None:
        metadata = pickle.loads(whole)
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    def swap(metadata: Any) -> None:
        a, b = (index for index in metadata.storage_data if index.fqn in "wv")
        storage = metadata.storage_data
        storage[a], storage[b] = storage[b], storage[a]

    def larger(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].size = torch.Size([8, 4])

    def without_place(metadata: Any) -> None:
        metadata.storage_data.clear()

    def negative(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].size = torch.Size([-4, 4])

    for change, sizes in ((swap, (4, 4)), (larger, (8, 4)), (without_place, (4, 4)), (negative, (4, 4))):
        lie(change)
        with pytest.raises(CheckpointError):
            load({"w": torch.zeros(sizes)}, checkpoint_id=tmp_path)
    for other in ({"not": "metadata"}, []):
        path.write_bytes(pickle.dumps(other))
        with pytest.raises(CheckpointFormatError):
            load({"w": torch.zeros(4, 4)}, checkpoint_id=tmp_path)


def test_stream_extensions_are_refused(tmp_path: Path) -> None:
    torch_save({"w": torch.zeros(4)}, tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for location in metadata.storage_data.values():
        location.transform_descriptors = ["stream.zstd/1"]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFormatError, match=r"w is stored through .*zstd"):
        load({"w": torch.zeros(4)}, checkpoint_id=tmp_path)


# ------------------------------------------------------------------ recognising


def test_what_lies_at_a_path(tmp_path: Path) -> None:
    assert detect(tmp_path) is None
    with pytest.raises(CheckpointNotFoundError):
        detect(tmp_path / "nothing")
    (tmp_path / "text").write_text("text")
    assert detect(tmp_path / "text") is None

    save({"w": torch.zeros(1)}, storage_writer=FileSystemWriter(tmp_path / "native"))
    torch_save({"w": torch.zeros(1)}, tmp_path / "dcp")
    for zipped in (True, False):
        torch.save({"w": torch.zeros(1)}, tmp_path / f"{zipped}.pt", _use_new_zipfile_serialization=zipped)
        assert detect(tmp_path / f"{zipped}.pt") == "torch_save"
    assert detect(tmp_path / "native") == "native"
    assert detect(tmp_path / "dcp") == "dcp"

    tag = tmp_path / "deepspeed" / "global_step3"
    tag.mkdir(parents=True)
    (tag / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "deepspeed" / "latest").write_text("global_step3")
    assert detect(tmp_path / "deepspeed") == detect(tag) == "deepspeed"
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states"):  # it is empty
        load({"w": torch.zeros(1)}, checkpoint_id=tmp_path / "deepspeed")
    (tmp_path / "deepspeed" / "latest").write_text("../elsewhere")
    assert detect(tmp_path / "deepspeed") is None
