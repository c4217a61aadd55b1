"""Storage classes built on PyTorch's work with our `save` and `load`; and every public name has PyTorch's signature."""

from __future__ import annotations

import importlib
import inspect
import io
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _fsspec_filesystem as their_fsspec
from torch.distributed.checkpoint import hf_storage as their_hf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.futures import Future

import terrazzo.checkpoint
from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, async_save, load, save, verify
from terrazzo.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from terrazzo.errors import CheckpointException


class Writer(dcp.FileSystemWriter):
    """A user's own, as it was written for PyTorch."""

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        assert all(type(plan) is dcp.SavePlan for plan in plans)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert all(type(item.index) is dcp.metadata.MetadataIndex for item in plan.items)
        return super().write_data(plan, planner)


class Reader(dcp.FileSystemReader):
    pass


def state() -> dict[str, Any]:
    return {"w": torch.arange(30.0).reshape(5, 6), "m": {"b": torch.ones(3), "n": [1, 2]}, "step": 3}


def empty() -> dict[str, Any]:
    return {"w": torch.zeros(5, 6), "m": {"b": torch.zeros(3), "n": [0, 0]}, "step": 0}


def same(found: dict[str, Any]) -> bool:
    expected = state()
    tensors = torch.equal(found["w"], expected["w"]) and torch.equal(found["m"]["b"], expected["m"]["b"])
    return tensors and found["m"]["n"] == [1, 2] and found["step"] == 3


@pytest.mark.parametrize("kinds", [(Writer, Reader), (their_fsspec.FsspecWriter, their_fsspec.FsspecReader)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_classes_built_on_pytorchs(tmp_path: Path, kinds: tuple[Any, Any], asynchronous: bool) -> None:
    writer, reader = kinds
    if asynchronous:
        async_save(state(), storage_writer=writer(str(tmp_path)), no_dist=True).result()
    else:
        metadata = save(state(), storage_writer=writer(str(tmp_path)), no_dist=True)
        assert type(metadata.state_dict_metadata["w"]) is terrazzo.checkpoint.TensorStorageMetadata
    for load_it in (load, dcp.load):
        target = empty()
        load_it(target, storage_reader=reader(str(tmp_path)), no_dist=True)
        assert same(target)
    assert torch.equal(Checkpoint(reader(str(tmp_path)))["w"][1:3], state()["w"][1:3])  # type: ignore[arg-type]
    assert Checkpoint(tmp_path)["step"] == 3  # it is PyTorch's format


def test_pytorchs_hugging_face_storage(tmp_path: Path) -> None:
    flat = {"w": torch.randn(4, 3), "b": torch.ones(2).bfloat16()}
    save(dict(flat), storage_writer=their_hf.HuggingFaceStorageWriter(str(tmp_path)), no_dist=True)
    target = {name: torch.zeros_like(tensor) for name, tensor in flat.items()}
    load(target, storage_reader=their_hf.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(torch.equal(target[name], flat[name]) for name in flat)


def on_ranks(path: str) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(35.0).reshape(7, 5)
    placed = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "same": torch.ones(3)}
    save(placed, storage_writer=Writer(path))
    target = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]), "same": torch.zeros(3)}
    load(target, storage_reader=Reader(path))
    return torch.equal(target["w"].full_tensor(), whole) and target["same"].eq(1).all().item()


def test_on_several_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, on_ranks, str(tmp_path)) == [True, True]
    target = {"w": torch.zeros(7, 5)}
    dcp.load(target, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(target["w"], torch.arange(35.0).reshape(7, 5))


class InMemory(dcp.StorageWriter, dcp.StorageReader):
    """Built on the abstract classes alone."""

    def __init__(self, *, broken: bool = False) -> None:
        self.files: dict[Any, Any] = {}
        self.broken = broken
        self.calls: list[str] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        self.calls.append("reset")

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        self.calls.append("set_up")

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
        assert metadata is self.metadata

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.broken:
            raise OSError(28, "no room")
        results = []
        for item in plan.items:
            data = planner.resolve_data(item)
            self.files[item.index] = data.clone() if isinstance(data, torch.Tensor) else data.getvalue()
            results.append(dcp.storage.WriteResult(item.index, 1, "here"))
        done: Future[Any] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Any, results: Any) -> None:
        assert type(metadata) is dcp.Metadata and {r.index for part in results for r in part} == set(self.files)
        self.metadata = metadata

    def read_metadata(self) -> Any:
        return self.metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            stored = self.files[item.storage_index]
            if item.type is dcp.planner.LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(stored))
            else:
                target = planner.resolve_tensor(item).detach()
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    stored = stored.narrow(dim, start, length)
                planner.commit_tensor(item, target.copy_(stored))
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def test_classes_built_on_the_abstract_ones() -> None:
    storage = InMemory()
    save(state(), storage_writer=storage, no_dist=True)
    assert storage.calls == ["reset", "set_up"]
    target = empty()
    load(target, storage_reader=storage, no_dist=True)
    assert same(target)
    with pytest.raises(CheckpointException, match="no room"):
        save(state(), storage_writer=InMemory(broken=True), no_dist=True)


def test_our_classes_of_pytorchs_names_for_fsspec() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    save(state(), storage_writer=FsspecWriter(url), no_dist=True)
    target = empty()
    load(target, storage_reader=FsspecReader(url), no_dist=True)
    assert same(target) and verify(url) == []
    save(state(), storage_writer=FsspecWriter(url), checkpoint_id=f"{url}/other", no_dist=True)
    assert Checkpoint(f"{url}/other")["step"] == 3
    assert FsspecWriter.validate_checkpoint_id(url) and not FsspecReader.validate_checkpoint_id("nonsense-scheme://x")
    assert not FsspecWriter.validate_checkpoint_id(Path("/tmp"))


def test_paths_of_storages_are_of_pytorchs_types(tmp_path: Path) -> None:
    ours = (terrazzo.checkpoint.FileSystemWriter, terrazzo.checkpoint.FileSystemReader, FsspecWriter, FsspecReader)
    theirs = (dcp.FileSystemWriter, dcp.FileSystemReader, their_fsspec.FsspecWriter, their_fsspec.FsspecReader)
    for mine, other in zip(ours, theirs, strict=True):
        mine, other = mine(str(tmp_path)), other(str(tmp_path))
        assert isinstance(mine.path, type(other.path)) and str(mine.path) == str(tmp_path), mine
        mine.reset(str(tmp_path / "next"))
        other.reset(str(tmp_path / "next"))
        assert isinstance(mine.path, type(other.path)) and str(mine.path) == str(other.path), mine


# ------------------------------------------------------------------ names and signatures

MODULES = (
    "", "api", "default_planner", "filesystem", "format_utils", "metadata", "planner", "planner_helpers",
    "_fsspec_filesystem", "staging", "state_dict", "state_dict_loader", "state_dict_saver", "stateful", "storage",
    "utils",
)  # fmt: skip

# What differs from PyTorch 2.13 and 2.14 by choice, or is not there.
ABSENT = {
    "HuggingFaceStorageReader": "PyTorch's own works with our save and load",
    "HuggingFaceStorageWriter": "the same",
    "QuantizedHuggingFaceStorageReader": "the same",
    "load_sharded_optimizer_state_dict": "of FSDP1's ShardedTensors",
    "FileSystem": "PyTorch's streams; a place is a Store here",
    "FileSystemBase": "the same",
    "SerializationFormat": "there is one",
    "AsyncStager.close": "stagers need not have it",
    "FQNS_T": "of types only",
    "PrimitiveType": "the same",
    "DictValueType": "the same",
    "ListDictValueType": "the same",
}
OTHER_PARAMETERS = {
    "FileSystemWriter": {"serialization_format"},
    "FsspecWriter": {"serialization_format"},
    "async_save": {"use_collectives"},  # ranks always agree over our own connections
    "save": {"use_collectives"},
    "AsyncSaveResponse": {"upload_completion"},  # may be left out: then it is the future itself
    "DefaultStager.stage": {"kwargs"},
    "FileSystemReader.read_metadata": {"args", "kwargs"},
    "FileSystemReader.set_up_storage_reader": {"args", "kwargs"},
    "StorageReader.read_metadata": {"args", "kwargs"},
    "StorageReader.set_up_storage_reader": {"args", "kwargs"},
    "StorageWriter.set_up_storage_writer": {"args", "kwargs"},
    "DefaultLoadPlanner.finish_plan": {"new_plan"},  # named as in the abstract class
    "BroadcastingTorchSaveReader.prepare_global_plan": {"global_plan"},
    "CheckpointException": {"msg"},
    "DefaultStager": {"config"},  # another default of the same meaning
}


def parameters(function: Any) -> dict[str, tuple[Any, str]]:
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {name: (p.kind, repr(p.default)) for name, p in found.items() if name != "self"}


@pytest.mark.parametrize("name", MODULES)
def test_names_and_signatures_are_those_of_pytorch(name: str) -> None:
    theirs = importlib.import_module("torch.distributed.checkpoint" + (f".{name}" if name else ""))
    ours = importlib.import_module("terrazzo.checkpoint" + (f".{name}" if name else ""))
    public = getattr(theirs, "__all__", None) or [
        key
        for key, value in vars(theirs).items()
        if not key.startswith("_") and callable(value) and (not name or value.__module__ == theirs.__name__)
    ]
    compared = 0
    for key in public:
        theirs_is, ours_is = getattr(theirs, key), getattr(ours, key, None)
        if not callable(theirs_is) or not inspect.isroutine(theirs_is) and not inspect.isclass(theirs_is):
            continue
        if ours_is is None:
            assert key in ABSENT, f"{name}.{key} is missing"
            continue
        pairs = {key: (theirs_is, ours_is)}
        if inspect.isclass(theirs_is):
            for method, value in vars(theirs_is).items():
                if not method.startswith("_") and inspect.isroutine(value):
                    full = f"{key}.{method}"
                    assert hasattr(ours_is, method) or full in ABSENT, f"{name}.{full} is missing"
                    if hasattr(ours_is, method):
                        pairs[full] = (getattr(theirs_is, method), getattr(ours_is, method))
        for full, (one, other) in pairs.items():
            mine, chosen = parameters(other), OTHER_PARAMETERS.get(full, set())
            for parameter, what in parameters(one).items():
                assert parameter in chosen or mine.get(parameter) == what, f"{name}.{full}: {parameter}"
            compared += 1
    assert compared > 0 or name == ""
