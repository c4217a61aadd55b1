"""Native saves and loads carry out plans in the library's own form; PyTorch's items are for those who see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks
from terrazzo.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    PerRank,
    load,
    save,
)
from terrazzo.checkpoint.plan import load_planner, save_planner
from terrazzo.errors import CheckpointException
from terrazzo.tensor import Replicate, Shard, distribute_tensor

_WHOLE = torch.arange(40.0).reshape(8, 5)


def state(fill: float | None = None) -> dict[str, Any]:
    """Sharded, replicated (in parts), tied and plain tensors, objects and values per rank; or targets for them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = _WHOLE if fill is None else torch.full_like(_WHOLE, fill)
    tied = torch.nn.Parameter(whole + 1)
    return {
        "rows": distribute_tensor(whole.clone(), mesh, [Shard(0)]),
        "columns": distribute_tensor(whole.clone(), mesh, [Shard(1)]),
        "replicated": distribute_tensor(whole.clone(), mesh, [Replicate()]),
        "nested": {"tied": [tied, tied], "step": 3 if fill is None else 0, "half": whole.bfloat16()},
        "rng": PerRank(dist.get_rank() if fill is None else None),
        "empty": torch.empty(0, 3),
    }


def check(loaded: dict[str, Any]) -> None:
    for name in ("rows", "columns", "replicated"):
        assert torch.equal(loaded[name].full_tensor(), _WHOLE), name
    first, second = loaded["nested"]["tied"]
    assert torch.equal(first, _WHOLE + 1) and torch.equal(second, _WHOLE + 1)
    assert torch.equal(loaded["nested"]["half"], _WHOLE.bfloat16())
    assert loaded["nested"]["step"] == 3 and loaded["rng"].value == dist.get_rank()


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("an item of PyTorch's was made")


def without_items(path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module, names in ((save_planner, ["item_of", "rows_of"]), (load_planner, ["ReadItem", "MetadataIndex"])):
            for name in names:
                patch.setattr(module, name, refused)
        save(state(), checkpoint_id=path, planner=DefaultSavePlanner(split_from=16))
        for options in ({}, {"together": True}, {"read": "once_per_node"}):
            target = state(0.0)
            load(target, checkpoint_id=path, **options)
            check(target)
        with pytest.raises(CheckpointException, match="item"):
            save(state(), storage_writer=SeeingWriter(path))


class SeeingWriter(FileSystemWriter):
    def prepare_local_plan(self, plan: Any) -> Any:
        return plan


class SeeingReader(FileSystemReader):
    def read_data(self, plan: Any, planner: Any) -> Any:
        assert len(plan.items) >= 7
        return super().read_data(plan, planner)


class ChangingPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item)


class GlobalPlanner(DefaultSavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        assert all(len(plan.items) >= 6 for plan in all_plans)
        return super().create_global_plan(all_plans)


class ChangingLoader(DefaultLoadPlanner):
    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor += 100


@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_items_are_made(tmp_path: Path, world: int) -> None:
    run_ranks(world, without_items, str(tmp_path))


def mixed(path: str) -> None:
    """Some ranks see items and others do not: with a planner that changes data, or one that has a global step."""
    for number, special in enumerate((ChangingPlanner, GlobalPlanner, None)):
        place = f"{path}/{number}"
        planner = special() if special is not None and dist.get_rank() == 1 else DefaultSavePlanner()
        writer = (SeeingWriter if special is None and dist.get_rank() == 0 else FileSystemWriter)(place)
        save(state(), storage_writer=writer, planner=planner)
        target = state(0.0)
        reader = (SeeingReader if dist.get_rank() == 0 else FileSystemReader)(place)
        load(target, storage_reader=reader, together=True, read="once_per_node")
        check(target)
        target = {"rows": state(0.0)["rows"]}
        load(target, checkpoint_id=place, planner=ChangingLoader())
        assert torch.equal(target["rows"].full_tensor(), _WHOLE + 100)


def test_ranks_with_and_without_items_save_together(tmp_path: Path) -> None:
    run_ranks(2, mixed, str(tmp_path))


def test_a_planner_that_is_changed_where_it_stands_sees_items(tmp_path: Path) -> None:
    planner, seen = DefaultSavePlanner(), []
    original = planner.resolve_data
    planner.resolve_data = lambda item: seen.append(item.index.fqn) or original(item)  # type: ignore[method-assign]
    save({"w": torch.ones(3)}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert seen == ["w"]
