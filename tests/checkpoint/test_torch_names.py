"""What PyTorch's callers pass and import: other argument orders, stagers with futures, plans as functions."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner as theirs
from torch.distributed.checkpoint import planner_helpers as their_helpers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import terrazzo.checkpoint
from ranks import device_type, run_ranks
from terrazzo.checkpoint import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    CheckpointException,
    DefaultLoadPlanner,
    DefaultStager,
    FileSystemReader,
    FileSystemWriter,
    PerRank,
    StagingOptions,
    async_save,
    load,
    save,
)
from terrazzo.checkpoint import default_planner as ours
from terrazzo.checkpoint.api import CheckpointException as SameException
from terrazzo.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from terrazzo.checkpoint.planner_helpers import create_read_items_for_chunk_list
from terrazzo.checkpoint.state_dict_loader import _load_state_dict_from_keys
from terrazzo.checkpoint.stores import MemoryStore
from terrazzo.checkpoint.utils import find_state_dict_object, find_tensor_shard
from terrazzo.errors import CheckpointError, CheckpointMismatchError

pytestmark = pytest.mark.on_late(elsewhere=True)


def test_the_storage_may_come_second(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="storage_writer="):
        save({"w": torch.ones(2)}, FileSystemWriter(tmp_path))
    target = {"w": torch.zeros(2)}
    with pytest.warns(FutureWarning, match="storage_reader="):
        load(target, FileSystemReader(tmp_path))
    assert target["w"].eq(1).all()
    with pytest.raises(TypeError):
        save({}, FileSystemWriter(tmp_path), "more")
    assert SameException is CheckpointException


def test_a_path_or_a_store_as_the_second_argument_says_what_to_pass(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    for given, right in (
        (tmp_path / "x", "checkpoint_id="),
        (str(tmp_path / "x"), "checkpoint_id="),
        (MemoryStore(), "store="),
    ):
        for function, keyword in ((save, "storage_writer"), (async_save, "storage_writer"), (load, "storage_reader")):
            for arguments, options in (((state, given), {}), ((state,), {keyword: given})):
                with pytest.raises(TypeError, match=f"{keyword}.*pass {right}"):
                    function(*arguments, **options)
    assert not (tmp_path / "x").exists()


@pytest.mark.on_late
def test_values_and_targets_that_pytorch_takes(tmp_path: Path) -> None:
    state = {"raw": io.BytesIO(b"abc"), "w": torch.arange(6.0).reshape(2, 3), "sched": {"last": 3}}
    save(state, checkpoint_id=tmp_path)
    with torch.device("meta"):
        layer = torch.empty(2, 3)
    target: dict[str, Any] = {"raw": io.BytesIO(), "inner": {}, "sched": {}, "w": layer}
    load(target, checkpoint_id=tmp_path)
    assert target["raw"].getvalue() == b"abc" and target["inner"] == {} and target["sched"] == {}
    assert target["w"].device.type == device_type() and torch.equal(target["w"].cpu(), state["w"].cpu())
    flat = {"w": torch.empty(2, 3, device="meta")}
    load(flat, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert torch.equal(flat["w"].cpu(), state["w"].cpu())
    with pytest.raises(CheckpointMismatchError, match="other"):
        load({"other": {"x": 1}}, checkpoint_id=tmp_path)


def meta_on_ranks(path: str) -> bool:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    whole = torch.arange(14.0).reshape(7, 2)
    save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=path)
    target = {"w": distribute_tensor(whole, mesh, [Shard(1)]).to("meta")}
    load(target, checkpoint_id=path)
    return torch.equal(target["w"].full_tensor().cpu(), whole.cpu())


def test_distributed_tensors_without_memory_get_some(tmp_path: Path) -> None:
    assert run_ranks(2, meta_on_ranks, str(tmp_path)) == [True, True]


def own_value(path: str, writing: bool) -> int:
    state = {"seed": PerRank(dist.get_rank() if writing else 100), "w": torch.zeros(1)}
    (save if writing else load)(state, checkpoint_id=path)
    return state["seed"].value


def test_ranks_that_saved_no_value_of_their_own_keep_theirs(tmp_path: Path) -> None:
    run_ranks(2, own_value, str(tmp_path), True)
    assert run_ranks(4, own_value, str(tmp_path), False) == [0, 1, 100, 100]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.on_late
def test_a_stager_that_gives_a_future(tmp_path: Path, asynchronous: bool) -> None:
    stager = DefaultStager(StagingOptions(use_async_staging=asynchronous))
    for step in range(3):
        weight = torch.full((1000,), float(step))
        response = async_save({"w": weight, "step": step}, checkpoint_id=tmp_path / str(step), async_stager=stager)
        assert isinstance(response, AsyncSaveResponse) == asynchronous
        if isinstance(response, AsyncSaveResponse):
            response.staging_completion.result()
            assert response.upload_completion is response
        weight += 10
    response.result()
    stager.close()
    for step in range(3):
        target = {"w": torch.zeros(1000), "step": None}
        load(target, checkpoint_id=tmp_path / str(step))
        assert target["w"].eq(step).all() and target["step"] == step


class Holding(FileSystemWriter):
    """A writer that has a tensor of the caller's."""

    tensor: torch.Tensor


def test_a_saving_process_leaves_the_callers_tensors_where_they_are(tmp_path: Path) -> None:
    writer = Holding(tmp_path)
    writer.tensor = torch.ones(3)
    state = {"w": torch.ones(3), "t": (torch.ones(2), 1)}
    async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result(90)
    assert not any(tensor.is_shared() for tensor in (writer.tensor, state["w"], state["t"][0]))
    from terrazzo.checkpoint.run.background import background_of

    background_of(None, False).close()


def test_keys_of_a_checkpoint(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2), "w2": torch.zeros(1)}, "step": 7}, checkpoint_id=tmp_path)
    assert list(_load_state_dict_from_keys("model", checkpoint_id=tmp_path)["model"]) == ["w", "w2"]
    assert list(_load_state_dict_from_keys({"model.w"}, checkpoint_id=tmp_path)["model"]) == ["w"]
    assert _load_state_dict_from_keys(checkpoint_id=tmp_path)["step"] == 7


def test_plans_as_functions_are_those_of_pytorch() -> None:
    state = {"w": torch.ones(4, 2), "step": 3}
    mine, yours = (m.create_default_local_save_plan(state, True) for m in (ours, theirs))
    assert [(i.index.fqn, i.type.name) for i in mine.items] == [(i.index.fqn, i.type.name) for i in yours.items]
    (plans, metadata), (their_plans, their_metadata) = (
        m.create_default_global_save_plan([plan]) for m, plan in ((ours, mine), (theirs, yours))
    )
    assert list(metadata.state_dict_metadata) == list(their_metadata.state_dict_metadata)
    for plan, other in zip(plans, their_plans, strict=True):
        assert [i.index.index for i in plan.items] == [i.index.index for i in other.items]
    loading = ours.create_default_local_load_plan({"w": torch.zeros(4, 2), "step": 0}, metadata)
    assert {item.dest_index.fqn for item in loading.items} == {"w", "step"}
    with pytest.raises(RuntimeError, match="other"):
        ours.create_default_local_load_plan({"other": torch.zeros(1)}, metadata)
    assert ours.create_default_local_load_plan({"other": torch.zeros(1)}, metadata, strict=False).items == []
    assert ours.create_default_global_load_plan([loading]) == [loading]


def sharded_optimizer(path: str) -> None:
    from terrazzo import tensor

    mesh = init_device_mesh(device_type(), (2,))
    layer = torch.nn.Linear(3, 5)
    layer.weight = torch.nn.Parameter(tensor.distribute_tensor(layer.weight.detach(), mesh, [tensor.Shard(0)]))
    layer.bias = torch.nn.Parameter(tensor.distribute_tensor(layer.bias.detach(), mesh, [tensor.Replicate()]))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(tensor.distribute_tensor(torch.ones(2, 3), mesh, [tensor.Replicate()])).sum().backward()
    optimizer.step()
    model, state = terrazzo.checkpoint.state_dict.get_state_dict(layer, optimizer)
    save({"model": model, "optim": state}, checkpoint_id=path)
    reader = FileSystemReader(path)
    found = terrazzo.checkpoint.load_sharded_optimizer_state_dict(model, "optim", reader)["optim"]
    for name, values in state["state"].items():
        for key, value in values.items():
            mine = found["state"][name][key]
            if key == "step":
                assert mine == value
                continue
            assert mine.placements == model[name].placements == value.placements
            assert torch.equal(mine.full_tensor(), value.full_tensor())
    assert found["param_groups"][0]["lr"] == 0.1


def test_an_optimizers_state_is_placed_as_the_model(tmp_path: Path) -> None:
    run_ranks(2, sharded_optimizer, str(tmp_path))


def test_read_items_are_those_of_pytorch() -> None:
    def chunk(kind: Any, start: int, length: int) -> Any:
        return kind(torch.Size([start, 0]), torch.Size([length, 2]))

    def items(metadata: Any, kind: Any, make: Any) -> list[tuple[Any, ...]]:
        stored = metadata.TensorStorageMetadata(
            metadata.TensorProperties(), torch.Size([7, 2]), [chunk(kind, 0, 3), chunk(kind, 3, 4)]
        )
        wanted = [chunk(kind, 0, 2), chunk(kind, 2, 5)]
        return [
            (i.dest_index.offset, i.dest_offsets, i.storage_index.offset, i.storage_offsets, i.lengths)
            for i in make("w", stored, wanted)
        ]

    from terrazzo.checkpoint import metadata as our_metadata

    mine = items(our_metadata, ChunkStorageMetadata, create_read_items_for_chunk_list)
    yours = items(dcp.metadata, dcp.metadata.ChunkStorageMetadata, their_helpers.create_read_items_for_chunk_list)
    assert mine == yours


def find_shards(path: str) -> None:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    start = 2 * dist.get_rank()
    assert find_tensor_shard(tensor, MetadataIndex("w", (start,))).tolist() == [start, start + 1]
    with pytest.raises(ValueError, match="no chunk"):
        find_tensor_shard(tensor, MetadataIndex("w", (2 - start,)))
    assert find_state_dict_object({"w": tensor}, MetadataIndex("w", (start,))).shape == (2,)


def test_shards_are_found_by_index() -> None:
    run_ranks(2, find_shards, "")
    for state, index in (({}, "w"), ({"n": 1}, ("n", (0,))), ({"w": torch.ones(2)}, ("w", (1,)))):
        arguments = (index,) if isinstance(index, str) else index
        with pytest.raises(ValueError):
            find_state_dict_object(state, MetadataIndex(*arguments))


def test_the_exception_travels_with_its_failures(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        save({"x": object()}, checkpoint_id=tmp_path / "x")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and list(copy.failures) == [0] and isinstance(copy, CheckpointError)


# What PyTorch keeps to itself, and what depends on how its own formats are written.
NOT_OURS = {"state_dict_cache", "rank", "use_collectives", "transforms"}


@pytest.mark.parametrize("name", ["FileSystemReader", "FileSystemWriter", "DefaultLoadPlanner", "DefaultSavePlanner"])
def test_new_objects_have_what_those_of_pytorch_have(tmp_path: Path, name: str) -> None:
    """Classes built on them read it before anything is set up, as S3's reader does in `prepare_local_plan`."""
    place = [tmp_path] if name.startswith("File") else []
    modules = (dcp, terrazzo.checkpoint)
    they, we = (getattr(module, name)(*place) for module in modules)
    public = {each for each in vars(they) if not each.startswith("_")}
    assert {each for each in public if not hasattr(we, each)} <= NOT_OURS
    if name == "FileSystemReader":
        assert we.storage_data == they.storage_data == {}
        assert we.fs.exists(tmp_path)
