"""The planners that PyTorch documents, as written there with the import changed; and somebody else's storage."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.futures import Future

from ranks import device_type, run_ranks
from terrazzo.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    Metadata,
    PerRank,
    SavePlan,
    StorageMeta,
    StorageReader,
    StorageWriter,
    WriteItemType,
    WriteResult,
    load,
    save,
)
from terrazzo.checkpoint.default_planner import _flatten_sharded_tensors, flatten_state_dict
from terrazzo.checkpoint.format_utils import BroadcastingTorchSaveReader
from terrazzo.checkpoint.metadata import STATE_DICT_TYPE
from terrazzo.checkpoint.plan.flatten import walking
from terrazzo.checkpoint.planner import LoadItemType, ReadItem
from terrazzo.errors import CheckpointError, CheckpointException, UnsupportedValueError

pytestmark = pytest.mark.on_late(elsewhere=True)

# ------------------------------------------------------------------ the documented examples


class RenameOnSave(DefaultSavePlanner):
    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: Optional[StorageMeta],  # noqa: UP045
        is_coordinator: bool,
    ) -> None:
        # prefix all keys with `foo_``
        super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, storage_meta, is_coordinator)


class RenameOnSaveOld(DefaultSavePlanner):
    def set_up_planner(self, state_dict, is_coordinator):
        # prefix all keys with `foo_``
        super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, is_coordinator)


class RenameOnLoad(DefaultLoadPlanner):
    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata,
        is_coordinator: bool,
    ) -> None:
        self.original_state_dict = state_dict
        state_dict = {"foo_" + k: v for k, v in state_dict.items()}

        if self.flatten_sharded_tensors:
            state_dict = _flatten_sharded_tensors(state_dict)

        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)

        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def load_bytes(self, read_item, value):
        # Remove the "foo_" prefix
        self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)


class FP16Planner(DefaultSavePlanner):
    def create_local_plan(self):
        plan = super().create_local_plan()
        for p in plan:
            if p.tensor_data is not None:
                p.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item):
        item = super().resolve_data(write_item)
        return item if write_item.type == WriteItemType.BYTE_IO else item.to(torch.float16)


class DDPLoadBalancingPlanner(DefaultSavePlanner):
    # This uses the default local plan behavior of having all non-sharded writes in rank 0
    # This sample doesn't handle ShardedTensors
    def create_global_plan(self, all_plans):
        iters = [iter(all_plans[0].items)] * len(all_plans)
        items_per_rank = [
            [item for item in items if item is not None] for items in zip(*zip_longest(*iters), strict=True)
        ]
        all_plans = [replace(plan, items=items) for plan, items in zip(all_plans, items_per_rank, strict=True)]
        return super().create_global_plan(all_plans)


class SaveExtraDataPlanner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, planner_data="per-rank-data")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        global_plan, metadata = super().create_global_plan(all_plans)
        merged_data = [p.planner_data for p in global_plan]
        metadata = replace(metadata, planner_data=merged_data)
        return global_plan, metadata


class MetaModelMaterialize(DefaultLoadPlanner):
    def resolve_tensor(self, read_item):
        tensor = super().resolve_tensor(read_item)
        return torch.empty_like(tensor, device="cpu")

    def commit_tensor(self, read_item, tensor):
        self.state_dict[read_item.dest_index.fqn] = tensor


def plain_state() -> dict:
    return {f"w{i}": torch.arange(4.0 + i) for i in range(5)} | {"step": 3}


@pytest.mark.parametrize("planner", [RenameOnSave, RenameOnSaveOld])
@pytest.mark.on_late
def test_rename(tmp_path: Path, planner: type) -> None:
    metadata = save(plain_state(), checkpoint_id=tmp_path, planner=planner())
    assert all(name.startswith("foo_") for name in metadata.state_dict_metadata)
    target = {name: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for name, v in plain_state().items()}
    load(target, checkpoint_id=tmp_path, planner=RenameOnLoad())
    assert torch.equal(target["w4"], torch.arange(8.0)) and target["step"] == 3


@pytest.mark.on_late
def test_half_precision(tmp_path: Path) -> None:
    state = plain_state()
    metadata = save(state, checkpoint_id=tmp_path, planner=FP16Planner())
    assert metadata.state_dict_metadata["w0"].properties.dtype == torch.float16
    assert state["w0"].dtype == torch.float32
    target = {"w0": torch.zeros(4), "step": 0}
    load(target, checkpoint_id=tmp_path)
    assert target["w0"].tolist() == [0, 1, 2, 3] and target["step"] == 3


def test_a_planner_that_breaks_its_promise_is_told(tmp_path: Path) -> None:
    class OnlyHalf(DefaultSavePlanner):
        def resolve_data(self, write_item):
            item = super().resolve_data(write_item)
            return item if write_item.type == WriteItemType.BYTE_IO else item.to(torch.float16)

    with pytest.raises(CheckpointError, match=r"'w0'.*float32.*float16"):
        save(plain_state(), checkpoint_id=tmp_path, planner=OnlyHalf())


@pytest.mark.on_late
def test_meta_tensors_materialise(tmp_path: Path) -> None:
    save(plain_state(), checkpoint_id=tmp_path)
    for planner in (None, MetaModelMaterialize()):
        nested = {"w0": torch.empty(4, device="meta"), "w1": torch.empty(5, device="meta")}
        load(nested, checkpoint_id=tmp_path, planner=planner)
        assert nested["w1"].tolist() == [0, 1, 2, 3, 4]


def save_balanced(path: str) -> None:
    save(plain_state(), checkpoint_id=path + "/ddp", planner=DDPLoadBalancingPlanner())
    metadata = save(plain_state(), checkpoint_id=path + "/extra", planner=SaveExtraDataPlanner())
    assert metadata.planner_data == ["per-rank-data"] * 2


class Keeping(DefaultLoadPlanner):
    """Keeps the target between its two calls, and post-processes what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.open: str | None = None
        self.seen: list[str] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert self.open is None, f"{self.open} has not been committed"
        self.open = read_item.dest_index.fqn
        self.seen.append(self.open)
        self.target = super().resolve_tensor(read_item)
        self.given = torch.empty(self.target.shape, dtype=torch.float64)
        return self.given

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert self.open == read_item.dest_index.fqn and tensor.data_ptr() == self.given.data_ptr()
        self.open = None
        self.target.copy_(tensor * 2)


def _in_dcp(state: dict, path: Path) -> Path:
    # From the CPU: PyTorch copies wrongly from other devices than the current one.
    dcp.save({name: value.cpu() for name, value in state.items()}, checkpoint_id=path, no_dist=True)
    return path


def _in_safetensors(state: dict, path: Path) -> Path:
    path.mkdir()
    save_file(state, path / "model.safetensors")
    return path


def _in_torch_save(state: dict, path: Path) -> Path:
    torch.save(state, path)
    return path


def _in_our_own(state: dict, path: Path) -> Path:
    save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("stored", [_in_our_own, _in_dcp, _in_safetensors, _in_torch_save])
@pytest.mark.on_late
def test_the_two_calls_for_a_tensor_follow_each_other(stored: Callable[[dict, Path], Path], tmp_path: Path) -> None:
    """However many tensors are read at once."""
    state = {f"t{n}": torch.randn(3 + n, 5) for n in range(40)} | {"large": torch.randn(3000, 3000)}
    planner = Keeping()
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    path = stored(state, tmp_path / "it")
    load(target, checkpoint_id=path, planner=planner, no_dist=True)
    assert sorted(planner.seen) == sorted(state) and planner.open is None
    assert all(torch.equal(target[name], value * 2) for name, value in state.items())
    if stored is _in_torch_save:
        target, planner = {name: torch.zeros_like(value) for name, value in state.items()}, Keeping()
        load(target, storage_reader=BroadcastingTorchSaveReader(path), planner=planner, no_dist=True)
        assert all(torch.equal(target[name], value * 2) for name, value in state.items())


def test_what_is_read_for_items_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are read into memory together, a large one into the planner's own."""
    state = {f"t{n}": torch.randn(4) for n in range(5)} | {"large": torch.randn(20)}
    save(state, checkpoint_id=tmp_path, no_dist=True)
    target, groups = {name: torch.zeros_like(value) for name, value in state.items()}, []

    class Recording(FileSystemReader):
        def fill(self, targets):
            groups.append([each.tensor for each in targets])
            super().fill(targets)

    class SeeingItems(DefaultLoadPlanner):
        def create_local_plan(self):
            return super().create_local_plan()

    monkeypatch.setattr(Recording, "_at_once", 40)
    load(target, storage_reader=Recording(tmp_path), planner=SeeingItems(), no_dist=True)
    assert all(torch.equal(target[name], value) for name, value in state.items())
    own = [group for group in groups if any(each.data_ptr() == target["large"].data_ptr() for each in group)]
    assert [len(group) for group in own] == [1] and sum(map(len, groups)) == 6
    assert all(sum(each.nbytes for each in group) <= 40 for group in groups if group is not own[0])


def test_a_target_that_does_not_fit_what_is_read_is_an_error(tmp_path: Path) -> None:
    save({"w": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    for wrong, match in ((torch.zeros(3), "shape"), (torch.zeros(4, device="meta"), "meta device")):

        class Wrong(DefaultLoadPlanner):
            def resolve_tensor(self, read_item: ReadItem, wrong: torch.Tensor = wrong) -> torch.Tensor:
                return wrong

        with pytest.raises(CheckpointException, match=match):
            load({"w": torch.zeros(4)}, checkpoint_id=tmp_path, planner=Wrong(), no_dist=True)


def test_global_steps(tmp_path: Path) -> None:
    run_ranks(2, save_balanced, str(tmp_path))
    for name in ("ddp", "extra"):
        target = {f"w{i}": torch.zeros(4 + i) for i in range(5)} | {"step": None}
        load(target, checkpoint_id=tmp_path / name)
        assert target["step"] == 3 and torch.equal(target["w4"], torch.arange(8.0))
        assert len(list((tmp_path / name).glob("*.safetensors"))) == 2
    assert FileSystemReader(tmp_path / "extra").read_metadata().planner_data == ["per-rank-data"] * 2


# ------------------------------------------------------------------ somebody else's storage

CALLS: list[str] = []
MEMORY: dict[str, Any] = {}


class DictWriter(StorageWriter):
    """Keeps checkpoints in a dict (and, so that ranks share them, in pickle files): each value under its index."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def reset(self, checkpoint_id=None):
        CALLS.append("reset")

    def set_up_storage_writer(self, is_coordinator):
        CALLS.append("set_up_storage_writer")
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan):
        CALLS.append("prepare_local_plan")
        return replace(plan, storage_data="local")

    def prepare_global_plan(self, plans):
        CALLS.append("prepare_global_plan")
        return [replace(plan, storage_data=f"part{i}") for i, plan in enumerate(plans)]

    def write_data(self, plan, planner):
        CALLS.append("write_data")
        part, results = {}, []
        for item in plan.items:
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                part[item.index] = data.getvalue()
            else:
                part[item.index] = data.detach().clone()
                assert item.tensor_storage_size() == data.nbytes
            results.append(WriteResult(item.index, 1, plan.storage_data))
        torch.save(part, Path(self.folder, plan.storage_data))
        future: Future = Future()
        future.set_result(results)
        return future

    def finish(self, metadata, results):
        CALLS.append("finish")
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        Path(self.folder, "meta").write_bytes(pickle.dumps(metadata))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True

    def storage_meta(self):
        return StorageMeta(modules=["dict"])


class DictReader(StorageReader):
    """Reads what a `DictWriter` wrote."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def reset(self, checkpoint_id=None):
        CALLS.append("reset")

    def read_metadata(self):
        CALLS.append("read_metadata")
        return pickle.loads(Path(self.folder, "meta").read_bytes())

    def set_up_storage_reader(self, metadata, is_coordinator):
        CALLS.append("set_up_storage_reader")
        self.where = metadata.storage_data

    def prepare_local_plan(self, plan):
        CALLS.append("prepare_local_plan")
        return plan

    def prepare_global_plan(self, plans):
        CALLS.append("prepare_global_plan")
        return plans

    def read_data(self, plan, planner):
        CALLS.append("read_data")
        for item in plan.items:
            part = torch.load(Path(self.folder, self.where[item.storage_index]), weights_only=False)
            stored = part[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(stored))
            else:
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    stored = stored.narrow(dim, start, length)
                target = planner.resolve_tensor(item)
                target.copy_(stored)
                planner.commit_tensor(item, target)
        future: Future = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


def use_foreign_storage(path: str) -> list[list[str]]:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    whole = torch.arange(21.0).reshape(7, 3)
    state = {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
        "nested": {"plain": torch.ones(3), "value": (1, "two")},
    }
    CALLS.clear()
    metadata = save(state, storage_writer=DictWriter(path))
    assert sorted(metadata.state_dict_metadata) == ["nested.plain", "nested.value", "replicated", "sharded"]
    saving = list(CALLS)
    CALLS.clear()
    target = {
        "sharded": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(1)]),
        "replicated": torch.zeros(7, 3),
        "nested": {"plain": torch.zeros(3), "value": None},
    }
    load(target, storage_reader=DictReader(path))
    assert torch.equal(target["sharded"].full_tensor(), whole) and torch.equal(target["replicated"], whole)
    assert target["nested"]["value"] == (1, "two") and target["nested"]["plain"].eq(1).all()
    return [saving, list(CALLS)]


def test_a_storage_of_ones_own_sees_the_documented_calls(tmp_path: Path) -> None:
    coordinator, other = run_ranks(2, use_foreign_storage, str(tmp_path))
    before = ["reset", "set_up_storage_writer", "prepare_local_plan"]
    assert coordinator[0] == [*before, "prepare_global_plan", "write_data", "finish"]
    assert other[0] == [*before, "write_data"]
    before = ["reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan"]
    assert coordinator[1] == [*before, "prepare_global_plan", "read_data"]
    assert other[1] == [*before, "read_data"]


class Broken(DictWriter):
    def write_data(self, plan, planner):
        raise OSError("the tape is full")


def fail_in_foreign_storage(path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        save(plain_state(), storage_writer=(Broken if dist.get_rank() == 1 else DictWriter)(path))
    return str(caught.value)


def test_errors_of_a_storage_of_ones_own_reach_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, fail_in_foreign_storage, str(tmp_path))
    assert first == second and "rank 1" in first and "the tape is full" in first
    assert not (tmp_path / "meta").exists()


def with_planners_of_pytorch(path: str) -> None:
    class Own(dcp.DefaultLoadPlanner):
        pass

    class OwnSave(dcp.DefaultSavePlanner):
        pass

    for planner in (dcp.DefaultSavePlanner(), OwnSave()):
        with pytest.raises(
            CheckpointException, match="(?s)ranks 0-1: .*from terrazzo.checkpoint import DefaultSavePlanner"
        ):
            save({"w": torch.ones(3)}, checkpoint_id=f"{path}/a", planner=planner)
    save({"w": torch.ones(3)}, checkpoint_id=f"{path}/a")
    for planner in (dcp.DefaultLoadPlanner(), Own()):
        with pytest.raises(
            CheckpointException, match="(?s)ranks 0-1: .*from terrazzo.checkpoint import DefaultLoadPlanner"
        ):
            load({"w": torch.ones(3)}, checkpoint_id=f"{path}/a", planner=planner)
    load({"w": torch.ones(3)}, checkpoint_id=f"{path}/a")


def test_planners_of_pytorch_are_refused_with_the_import_to_change(tmp_path: Path) -> None:
    run_ranks(2, with_planners_of_pytorch, str(tmp_path))


def test_a_per_rank_in_a_list_of_plain_values(tmp_path: Path) -> None:
    for value in ([1, PerRank(2)], (1, [PerRank(2)])):
        with pytest.raises(CheckpointError, match=r"x: a PerRank in a list .* wrap the whole list"):
            save({"x": value}, checkpoint_id=tmp_path)
    save({"x": PerRank([1, 2])}, checkpoint_id=tmp_path)


def test_a_state_that_shares_much_is_walked_once_to_say_where_it_contains_itself() -> None:
    walked = 0

    class Counting(dict[str, Any]):
        def items(self) -> Any:
            nonlocal walked
            walked += 1
            return super().items()

    wide: Any = torch.ones(1)
    for _ in range(30):
        wide = Counting(a=wide, b=[wide, (wide,)])
    loop: dict[str, Any] = {"wide": wide}
    loop["again"] = [loop]
    with pytest.raises(UnsupportedValueError, match=r"\['again', 0\] contains itself"), walking(loop):
        raise RecursionError
    assert walked == 30


def test_lists_that_a_mapping_makes_for_each_look() -> None:
    class Making(dict[str, int]):
        def items(self) -> Any:
            return ((key, [torch.ones(1)] if n % 4 < 2 else [n, n]) for key, n in super().items())

    flat, paths = flatten_state_dict({"made": Making({str(n): n for n in range(50)})})
    assert set(flat) == {f"made.{n}.0" if n % 4 < 2 else f"made.{n}" for n in range(50)}
    assert paths["made.5.0"] == ("made", "5", 0) and flat["made.7"] == [7, 7]
