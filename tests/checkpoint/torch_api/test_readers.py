"""What a planner or a reader of one's own does is done, whatever it is built on."""

from __future__ import annotations

from typing import Any

import torch

from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, load, save
from terrazzo.checkpoint.planner import LoadPlanner, SavePlanner


def passing(kind: type, inner: Any, own: dict[str, Any]) -> Any:
    """A planner that has a few methods of its own, and hands all other calls to another one."""

    def pass_on(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(inner, name)(*args, **kwargs)

    methods = {name: pass_on(name) for name in kind.__abstractmethods__}  # type: ignore[attr-defined]  # of an ABC
    methods["__getattr__"] = lambda self, name: getattr(inner, name)
    return type("Passing", (kind,), {**methods, **own})()


def check_delegation(path: str) -> None:
    inner = DefaultSavePlanner()
    planner = passing(SavePlanner, inner, {"resolve_data": lambda self, item: inner.resolve_data(item) + 1})
    assert planner.plans_alone, "it seems so, for what it lacks is the other one's"
    save({"w": torch.arange(4.0)}, checkpoint_id=path, planner=planner)
    assert Checkpoint(path)["w"][...].tolist() == [1, 2, 3, 4]

    loading = DefaultLoadPlanner()
    committed: list[str] = []
    own = {"commit_tensor": lambda self, item, tensor: committed.append(item.dest_index.fqn)}
    planner = passing(LoadPlanner, loading, own)
    for read in ("each", "once_per_node"):
        state = {"w": torch.zeros(4)}
        load(state, checkpoint_id=path, planner=planner, read=read)  # type: ignore[arg-type]  # a literal
        assert state["w"].tolist() == [1, 2, 3, 4]
    assert committed == ["w", "w"], "what such a planner is to commit is not passed on between ranks behind its back"


def test_a_planner_that_delegates(tmp_path: Any) -> None:
    for ranks in (1, 2):
        run_ranks(ranks, check_delegation, str(tmp_path / str(ranks)))


class Unset(FileSystemReader):
    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
        """Nothing."""


def test_a_reader_that_is_set_up_in_its_own_way(tmp_path: Any) -> None:
    save({"w": torch.arange(4.0), "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": torch.zeros(4), "step": 0}
    load(state, storage_reader=Unset(tmp_path), no_dist=True)
    assert state["w"].tolist() == [0, 1, 2, 3] and state["step"] == 3
    assert Checkpoint(Unset(tmp_path))["w"][1:3].tolist() == [1, 2]


class Doubling(DefaultLoadPlanner):
    """Changes what was read."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


def check_inheritance(path: str) -> None:
    save({"w": torch.arange(4.0)}, checkpoint_id=path)
    state = {"w": torch.zeros(4)}
    load(state, checkpoint_id=path, planner=Doubling(), read="once_per_node")
    assert state["w"].tolist() == [0, 2, 4, 6]


def test_a_planner_that_inherits(tmp_path: Any) -> None:
    run_ranks(2, check_inheritance, str(tmp_path))
