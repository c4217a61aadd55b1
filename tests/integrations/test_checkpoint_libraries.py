"""Storage classes, planners and tensors as libraries for PyTorch write them, under `terrazzo.install()`.

Each test says a pattern in our own words; its name says which libraries have it.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import terrazzo
from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, CheckpointableTensor
from terrazzo.checkpoint import FileSystemWriter as NativeFileSystemWriter
from terrazzo.checkpoint.formats import DCPWriter
from terrazzo.checkpoint.stores import MemoryStore
from terrazzo.errors import CheckpointExistsError, ConflictError, DivergentValueError, DivergentValueWarning
from terrazzo.integrations.installing import InstallWarning


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstallWarning)
        terrazzo.install()
    yield
    terrazzo.uninstall()


def state() -> dict[str, Any]:
    return {"w": torch.arange(30.0).reshape(5, 6), "m": {"b": torch.ones(3)}, "step": 3}


def loaded(path: str | Path, **how: Any) -> bool:
    target = {"w": torch.zeros(5, 6), "m": {"b": torch.zeros(3)}, "step": 0}
    dcp.load(target, no_dist=True, **(how or {"checkpoint_id": path}))
    return is_state(target)


def is_state(found: dict[str, Any]) -> bool:
    return torch.equal(found["w"], state()["w"]) and found["m"]["b"].tolist() == [1, 1, 1] and found["step"] == 3


@dataclasses.dataclass
class Prefix:
    """What a writer puts into plans for itself."""

    prefix: str


def test_a_writer_that_places_files_itself_and_a_reader_that_sorts_by_offset(tmp_path: Path) -> None:
    """The S3 connector's."""

    class Writer(dcp.FileSystemWriter):
        def __init__(self, path: str, thread_count: int = 1) -> None:
            super().__init__(path=path, sync_files=False, thread_count=thread_count)
            self.path = path

        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            return [dataclasses.replace(plan, storage_data=Prefix(f"part-{n}-")) for n, plan in enumerate(plans)]

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return True

    class Reader(dcp.FileSystemReader):
        def prepare_local_plan(self, plan: Any) -> Any:
            plan.items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            for item in plan.items:
                at = self.storage_data[item.storage_index]
                ranges.append((at.relative_path, at.offset, at.length))
            return plan

    ranges: list[tuple[str, int, int]] = []
    folder = str(tmp_path)
    dcp.save(state(), storage_writer=Writer(folder, 2), no_dist=True)
    assert loaded(folder, storage_reader=Reader(folder)) and len(ranges) == 3
    files = sorted(path.name for path in tmp_path.iterdir())
    assert {path for path, _, _ in ranges} <= {*files} and files == [".metadata", "part-0-0.distcp", "part-0-1.distcp"]
    read = [torch.load(io.BytesIO((tmp_path / path).read_bytes()[start:][:size])) for path, start, size in ranges]
    assert any(torch.is_tensor(value) and torch.equal(value, state()["w"]) for value in read)


def save_as_the_s3_connector(folder: str) -> None:
    warnings.simplefilter("ignore", InstallWarning)
    terrazzo.install()
    try:

        class Writer(dcp.FileSystemWriter):
            def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
                return [dataclasses.replace(plan, storage_data=Prefix(f"{n}/")) for n, plan in enumerate(plans)]

        rank = torch.distributed.get_rank()
        dcp.save({f"w{rank}": torch.full((3,), float(rank)), "both": torch.ones(2)}, storage_writer=Writer(folder))
    finally:
        terrazzo.uninstall()


def save_what_differs(folder: str) -> list[str]:
    state = {"rng": torch.tensor([torch.distributed.get_rank()] * 5), "seen": [torch.distributed.get_rank()], "step": 7}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        terrazzo.install()
        try:
            for _ in range(2):
                dcp.save(state, checkpoint_id=folder)
            dcp.async_save(state, checkpoint_id=folder).result()
        finally:
            terrazzo.uninstall()
    with pytest.raises(DivergentValueError, match="'rng', 'seen'"):
        terrazzo.checkpoint.save(state, checkpoint_id=folder)
    return [str(each.message) for each in told if each.category is DivergentValueWarning]


def test_of_values_that_differ_between_ranks_one_is_saved_with_one_warning(tmp_path: Path) -> None:
    """PyTorch takes any rank's, silently: trainers have their generators' states and positions in the data there."""
    for told in run_ranks(2, save_what_differs, str(tmp_path)):
        (text,) = told
        assert "'rng', 'seen'" in text and "'step'" not in text
    found = Checkpoint(tmp_path)
    assert found["rng"][...].tolist() == [0] * 5 and found["seen"] == [0] and found["step"] == 7


def test_ranks_whose_writer_places_files_itself_write_apart(tmp_path: Path) -> None:
    run_ranks(2, save_as_the_s3_connector, str(tmp_path))
    found = Checkpoint(tmp_path)
    assert [found[f"w{rank}"][...].tolist() for rank in (0, 1)] == [[0] * 3, [1] * 3] and found["both"][0] == 1


def test_a_writer_whose_files_another_process_writes(tmp_path: Path) -> None:
    """nvidia-resiliency-ext's and Megatron's: they call planner and writer by themselves, and write PyTorch's files."""
    from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StoragePrefix, _write_item

    class Async(dcp.FileSystemWriter):
        def __init__(self, path: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(path, *args, **kwargs)
            self.checkpoint_dir = path
            if not self.single_file_per_rank:
                raise NotImplementedError

        def prepare_local_plan(self, plan: Any) -> Any:
            super().prepare_local_plan(plan)
            return plan

        def write(self, plan: Any, planner: Any) -> None:
            name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
            named = {"serialization_format": dcp.filesystem.SerializationFormat.TORCH_SAVE}
            taken = inspect.signature(_write_item).parameters
            first = [self.transforms] if "transforms" in taken else []
            with open(os.path.join(self.checkpoint_dir, name), "wb") as file:
                self.results = [
                    _write_item(
                        *first,
                        *(file, planner.resolve_data(item), item, name),
                        **{key: value for key, value in named.items() if key in taken},
                    )
                    for item in plan.items
                ]

        def write_data(self, plan: Any, planner: Any) -> Any:
            raise NotImplementedError

    folder = str(tmp_path / "c")
    with pytest.raises(NotImplementedError):
        Async(folder, single_file_per_rank=False)
    writer, planner = Async(folder, thread_count=2), dcp.DefaultSavePlanner()
    assert (writer.thread_count, writer.per_thread_copy_ahead, writer.sync_files) == (2, 10_000_000, True)
    writer.set_up_storage_writer(True)
    planner.set_up_planner(state(), writer.storage_meta(), True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    assert plan.storage_data == _StoragePrefix("__0_")
    writer.write(planner.finish_plan(plan), planner)
    writer.finish(metadata, [writer.results])
    assert sorted(os.listdir(folder)) == [".metadata", "__0_0.distcp"] and loaded(folder)
    terrazzo.uninstall()
    target = {"w": torch.zeros(5, 6)}
    dcp.load(target, checkpoint_id=folder, no_dist=True)  # PyTorch's own
    assert torch.equal(target["w"], state()["w"])
    terrazzo.install()
    terrazzo.checkpoint.save(state(), storage_writer=NativeFileSystemWriter(tmp_path / "ours"), no_dist=True)
    with pytest.raises(CheckpointExistsError, match="which would be read instead"):
        Async(str(tmp_path / "ours")).set_up_storage_writer(True)


def test_options_of_a_writer_can_be_set_afterwards(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path)
    writer.single_file_per_rank, writer.sync_files, writer.thread_count = False, False, 3
    dcp.save(state(), storage_writer=writer, no_dist=True)
    assert len(list(tmp_path.glob("__0_[012].distcp"))) == len(list(tmp_path.glob("*.distcp"))) == 3
    assert loaded(tmp_path)


def test_readers_that_keep_metadata_or_look_at_files_first(tmp_path: Path) -> None:
    """nvidia-resiliency-ext's and Megatron's; composer's, which fetches files before it reads them."""

    class Cached(dcp.FileSystemReader):
        kept: dict[str, Any] = {}

        def read_metadata(self) -> Any:
            if str(self.path) not in Cached.kept:
                Cached.kept[str(self.path)] = super().read_metadata()
            return Cached.kept[str(self.path)]

    class Fetching(dcp.FileSystemReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            fetched.update(self.storage_data[item.storage_index].relative_path for item in plan.items)
            return super().read_data(plan, planner)

    fetched: set[str] = set()
    dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    assert all(loaded(tmp_path, storage_reader=Cached(tmp_path)) for _ in range(2))
    assert loaded(tmp_path, storage_reader=Fetching(tmp_path))
    assert fetched and all((tmp_path / name).is_file() for name in fetched)


def test_the_whole_checkpoint_into_an_empty_state_dict(tmp_path: Path) -> None:
    """Lightning's consolidation and OLMo's, by PyTorch's private names."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    found: dict[str, Any] = {}
    reader = dcp.FileSystemReader(tmp_path)
    _load_state_dict(found, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert is_state(found)
    keys: list[Any] = [{"m"}, ["m"], ("m",)]  # PyTorch asks for a set, and OLMo gives a list
    for each in keys:
        found = {}
        _load_state_dict(found, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(each), no_dist=True)
        assert list(found) == ["m"] and found["m"]["b"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("compression", [False, True])
def test_metadata_says_where_everything_lies(compression: bool, tmp_path: Path) -> None:
    large = {"zeros": torch.zeros(3, 1 << 19), "n": 5}
    writer = NativeFileSystemWriter(tmp_path, compression=compression)
    dcp.save(large, storage_writer=writer, no_dist=True)
    places = pickle.loads(pickle.dumps(dcp.FileSystemReader(tmp_path).read_metadata())).storage_data
    assert {index.fqn for index in places} == {"zeros", "n"} and len(places) == 2 and places.get("other") is None
    at = places[dcp.metadata.MetadataIndex("zeros", torch.Size([0, 0]))]
    assert at.offset + at.length == (tmp_path / at.relative_path).stat().st_size
    assert (at.length == 3 << 21) == (not compression)


def test_phrases_of_pytorch_in_messages(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    sizes = "Size mismatch between saved torch.Size([5, 6]) and current: torch.Size([2, 2])"
    for name, tensor, said in (
        ("nope", torch.zeros(2), "Missing key in checkpoint state_dict: nope."),
        ("w", torch.zeros(2, 2), sizes),
    ):
        with pytest.raises(dcp.CheckpointException, match=re.escape(said)):
            dcp.load({name: tensor}, checkpoint_id=tmp_path, no_dist=True)


def test_the_response_of_an_asynchronous_save_is_a_dataclass(tmp_path: Path) -> None:
    """nvidia-resiliency-ext and torchtitan look at its two fields; others make one of futures of their own."""
    from torch.distributed.checkpoint.staging import DefaultStager
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

    names = [field.name for field in dataclasses.fields(AsyncSaveResponse)]
    assert names == ["staging_completion", "upload_completion"]
    response = dcp.async_save(state(), checkpoint_id=tmp_path, async_stager=DefaultStager(), no_dist=True)
    assert isinstance(response, AsyncSaveResponse) and response.upload_completion is response
    response.staging_completion.result(30)
    response.upload_completion.result(30)
    assert loaded(tmp_path) and repr(response) and {response}
    staged: Future[None] = Future()
    uploaded: Future[int] = Future()
    made = AsyncSaveResponse(staging_completion=staged, upload_completion=uploaded)
    assert made.upload_completion is uploaded and not made.done()
    uploaded.set_result(7)
    assert made.result(30) == 7


class Rows(torch.Tensor):
    """A tensor that says by PyTorch's methods which rows of a global one it has, and nothing else."""

    def __create_chunk_list__(self) -> list[Any]:
        return [dcp.metadata.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size(self.shape))]

    def __create_write_items__(self, name: str, obj: Any) -> list[Any]:
        raise AssertionError("planners of ours need chunks alone")

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_tensors_that_say_their_parts_by_methods(tmp_path: Path) -> None:
    dcp.save({"w": state()["w"].as_subclass(Rows)}, checkpoint_id=tmp_path, no_dist=True)
    target = {"w": torch.zeros(5, 6).as_subclass(Rows)}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(target["w"].as_subclass(torch.Tensor), state()["w"])


def part_of(whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Rank 0 has columns 0 and 3 of four, in a tensor with padding; rank 1 the two between."""
    if rank == 0:
        local = torch.full((4, 3), -1.0)
        local[:, 0], local[:, 2] = whole[:, 0], whole[:, 3]
        offsets, inside, sizes = ((0, 0), (0, 3)), ((0, 0), (0, 2)), ((4, 1), (4, 1))
    else:
        local, offsets, inside, sizes = whole[:, 1:3].clone(), ((0, 1),), ((),), ((4, 2),)  # type: ignore[assignment]
    local.global_shape, local.global_offsets = (4, 4), offsets  # type: ignore[attr-defined]
    local.local_offsets, local.local_sizes = inside, sizes  # type: ignore[attr-defined]
    assert isinstance(local, CheckpointableTensor)
    return local


def save_parts(folder: str) -> None:
    rank = torch.distributed.get_rank()
    whole = torch.arange(16.0).reshape(4, 4)
    for save in (terrazzo.checkpoint.save, lambda *a, **k: terrazzo.checkpoint.async_save(*a, **k).result()):
        save({"w": part_of(whole, rank)}, checkpoint_id=folder)
        target = part_of(torch.zeros(4, 4), 1 - rank)
        terrazzo.checkpoint.load({"w": target}, checkpoint_id=folder)
        assert torch.equal(target, part_of(whole, 1 - rank))
    wrong = part_of(whole, rank)
    wrong.local_sizes = ((9, 1), (4, 1)) if rank == 0 else ((9, 2),)  # type: ignore[attr-defined]
    with pytest.raises(terrazzo.errors.CheckpointException, match="correct its `local_offsets`"):
        terrazzo.checkpoint.save({"w": wrong}, checkpoint_id=f"{folder}/wrong")


def test_plain_tensors_that_say_their_parts_by_attributes(tmp_path: Path) -> None:
    """PyTorch 2.14's protocol, on every version."""
    run_ranks(2, save_parts, str(tmp_path))
    assert torch.equal(Checkpoint(tmp_path)["w"][...], torch.arange(16.0).reshape(4, 4))


def as_composer(folder: str) -> None:
    """Composer's: a rank asserts that its file is there, and uploads it; a reader fetches the files that it needs."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    rank, folder = torch.distributed.get_rank(), f"{folder}/run"

    class Reader(dcp.FileSystemReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            for item in plan.items:
                name = self.storage_data[item.storage_index].relative_path
                if not (Path(self.path) / name).exists():
                    shutil.copy(f"{folder}/uploaded/{name}", f"{self.path}/{name}")
            return super().read_data(plan, planner)

    def value(step: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,))
        first = {"rng": [step, 1]} if rank == 0 else {}
        return {"w": distribute_tensor(torch.arange(14.0).reshape(7, 2) + step, mesh, [Shard(0)]), **first}

    for step in range(3):  # over the last one, too, as when a run that was killed goes on
        writer, planner = (
            dcp.FileSystemWriter(f"{folder}/saved"),
            dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        )
        dcp.save(value(step), storage_writer=writer, planner=planner)
        mine = f"__{rank}_0.distcp"
        assert Path(f"{folder}/saved/{mine}").is_file()
        if step == 2:
            Path(f"{folder}/uploaded").mkdir(exist_ok=True)
            for name in (mine, ".metadata")[: 2 - rank]:
                shutil.copy(f"{folder}/saved/{name}", f"{folder}/uploaded/{name}")
        torch.distributed.barrier()
        assert sorted(os.listdir(f"{folder}/saved")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        torch.distributed.barrier()
    fetched = Path(f"{folder}/fetched {rank}")
    fetched.mkdir()
    shutil.copy(f"{folder}/uploaded/.metadata", fetched)
    target = {"w": torch.zeros(7, 2), "rng": [0, 0]}
    dcp.load(target, storage_reader=Reader(str(fetched)))
    assert torch.equal(target["w"], torch.arange(14.0).reshape(7, 2) + 2) and target["rng"] == [2, 1]


def check_composer(folder: str) -> None:
    warnings.simplefilter("ignore", InstallWarning)
    terrazzo.install()
    try:
        as_composer(folder)
    finally:
        terrazzo.uninstall()
    target = {"w": torch.zeros(7, 2)}
    dcp.load(target, checkpoint_id=f"{folder}/run/uploaded", no_dist=True)  # PyTorch's own
    assert torch.equal(target["w"], torch.arange(14.0).reshape(7, 2) + 2)


def test_ranks_that_upload_their_files(tmp_path: Path) -> None:
    run_ranks(2, check_composer, str(tmp_path))


def save_under_one_name(folder: str) -> None:
    warnings.simplefilter("ignore", InstallWarning)
    terrazzo.install()
    try:

        class Writer(dcp.FileSystemWriter):
            def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
                return [dataclasses.replace(plan, storage_data=Prefix("same-")) for plan in plans]

        rank = torch.distributed.get_rank()
        for _ in range(2):
            dcp.save({f"w{rank}": torch.full((3,), float(rank))}, storage_writer=Writer(folder))
            target = {f"w{n}": torch.full((3,), -1.0) for n in range(2)}
            dcp.load(target, checkpoint_id=folder)
            assert [value.tolist() for value in target.values()] == [[0] * 3, [1] * 3]
            torch.distributed.barrier()
    finally:
        terrazzo.uninstall()


def test_ranks_whose_writer_gives_them_one_name_do_not_lose_their_files(tmp_path: Path) -> None:
    run_ranks(2, save_under_one_name, str(tmp_path))


def save_apart(folder: str) -> None:
    rank = torch.distributed.get_rank()
    mine = {"w": torch.full((3,), float(rank)), "step": [rank, 7]}
    for _ in range(2):
        terrazzo.checkpoint.save(mine, checkpoint_id=folder, use_collectives=False)
    async_save = terrazzo.checkpoint.async_save
    async_save(mine, checkpoint_id=folder, use_collectives=False).result()
    assert {*os.listdir(folder)} == {"__0.metadata", "__0_0.distcp", "__1.metadata", "__1_0.distcp"}
    for load, reader in (
        (terrazzo.checkpoint.load, terrazzo.checkpoint.FileSystemReader),
        (dcp.load, dcp.FileSystemReader),
    ):
        for how in ({"checkpoint_id": folder}, {"storage_reader": reader(folder)}):
            target = {"w": torch.zeros(3), "step": None}
            load(target, **how)
            assert target["w"].tolist() == [rank] * 3 and target["step"] == [rank, 7]
    with pytest.raises(terrazzo.errors.CheckpointException, match="NativeWriter cannot"):
        terrazzo.checkpoint.save(mine, store=MemoryStore(), use_collectives=False)
    terrazzo.checkpoint.save({"w": torch.ones(2)}, storage_writer=DCPWriter(f"{folder}/together"))
    with pytest.raises(CheckpointExistsError, match="saved together"):
        terrazzo.checkpoint.save(mine, checkpoint_id=f"{folder}/together", use_collectives=False)


def test_ranks_that_save_by_themselves(tmp_path: Path) -> None:
    run_ranks(2, save_apart, str(tmp_path / "apart"))


def test_files_of_killed_saves_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    """A save that was killed has left a file of PyTorch's name; and another save commits while this one writes."""
    (tmp_path / "__0_0.distcp").write_bytes(b"of a save that was killed")
    dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    assert sorted(os.listdir(tmp_path)) == [".metadata", "__0_0.distcp"] and loaded(tmp_path)

    class Slow(dcp.FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            assert {"w", "m.b", "step"} == metadata.state_dict_metadata.keys()
            assert {each.storage_data.relative_path for part in results for each in part} == {"__0_0.distcp"}
            dcp.save(state(), checkpoint_id=self.path, no_dist=True)
            super().finish(metadata, results)

    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(ConflictError):
            dcp.save({**state(), "step": 4}, storage_writer=Slow(folder), no_dist=True)
        assert loaded(folder)
        left = {name for name in os.listdir(folder) if name.startswith("__")}
        assert left == {"__0_0.distcp"}, "what failed has left nothing"
