"""Dicts of a state dict come back as they were: with their keys, not the keys' texts, and of their class."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, DefaultSavePlanner, PerRank, async_save, save
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.tools.compare import compare


class Mode(Enum):
    TRAIN = 1
    TEST = 2


def filled(size: int) -> torch.Tensor:
    return torch.arange(1.0, size + 1)


def odd_dicts() -> dict[Any, Any]:
    """Dicts whose keys are not text, or whose class is not dict, with tensors in them, so that they are flattened."""
    ordered = OrderedDict({"z": 1, "a": filled(2), "m": 2})
    kept = {1: filled(2), (2, "x"): {None: 3, "None_": [{0: filled(1)}, defaultdict(int, {True: 4})]}, b"k": {}}
    return {
        "optim": {"state": {0: {"step": filled(1)}, 10: {"step": filled(1)}}, "param_groups": [{"params": [0, 10]}]},
        "ordered": ordered,
        "counts": Counter({3: 2, "x": 1}),
        "kept": kept,
        "twice": [ordered, {"plain": ordered}],
        7: {"model": OrderedDict(b=filled(1), a=filled(1)), "empty": OrderedDict()},
    }


def same_dicts(one: Any, other: Any) -> bool:
    """Whether they have the same classes, keys in the same order if they are ordered, and values."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        if getattr(one, "default_factory", 0) != getattr(other, "default_factory", 0):
            return False
        kinds = {key: type(key) for key in one} == {key: type(key) for key in other}
        ordered = isinstance(one, OrderedDict) and not all(isinstance(value, torch.Tensor) for value in one.values())
        in_order = list(one) == list(other) if ordered else one.keys() == other.keys()
        return kinds and in_order and all(same_dicts(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_dicts, one, other))
    return one == other


def check_odd_dicts(folder: str) -> None:
    state = odd_dicts() | ({"own": PerRank({1: dist.get_rank()})} if dist.get_world_size() > 1 else {})
    save(state, checkpoint_id=f"{folder}/now")
    async_save(state, checkpoint_id=f"{folder}/later").result()
    save(state, checkpoint_id=f"{folder}/planner", planner=OwnPlan())
    rank = dist.get_rank()
    apart = {"stages": {rank: filled(1), (rank, "x"): rank}, "named": OrderedDict({f"layer{rank}": filled(1)})}
    save(apart, checkpoint_id=f"{folder}/apart")
    save(apart, checkpoint_id=f"{folder}/apart-planner", planner=OwnPlan())


class OwnPlan(DefaultSavePlanner):
    """Has a global step of its own, so ranks send their plans to the coordinator."""

    def create_global_plan(self, all_plans):
        return super().create_global_plan(all_plans)


@pytest.mark.parametrize("world", [1, 2])
def test_dicts_come_back_with_their_keys_and_classes(tmp_path: Path, world: int) -> None:
    run_ranks(world, check_odd_dicts, str(tmp_path))
    for name in ("now", "later", "planner"):
        back = Checkpoint(tmp_path / name).state_dict()
        if world > 1:
            assert [back.pop(f"own@{rank}") for rank in range(2)] == [{1: 0}, {1: 1}]
        assert same_dicts(odd_dicts(), back), (name, back)
        assert Checkpoint(tmp_path / name)["optim.state.10.step"][...] == filled(1)  # names are PyTorch's
        part = Checkpoint(tmp_path / name).state_dict(lambda name: name.startswith("kept.1"))
        assert part.keys() == {"kept"} and part["kept"].keys() == {1}
    stages = {key: value for rank in range(world) for key, value in ((rank, filled(1)), ((rank, "x"), rank))}
    names = OrderedDict({f"layer{rank}": filled(1) for rank in range(world)})
    for name in ("apart", "apart-planner"):  # ranks have different keys of one dict
        assert same_dicts({"stages": stages, "named": names}, Checkpoint(tmp_path / name).state_dict())
    convert(tmp_path / "now", tmp_path / "file.pt", "torch_save")
    by_torch = torch.load(tmp_path / "file.pt", weights_only=False)
    convert(tmp_path / "file.pt", tmp_path / "again", "native")
    for back in (by_torch, Checkpoint(tmp_path / "file.pt").state_dict(), Checkpoint(tmp_path / "again").state_dict()):
        assert same_dicts(odd_dicts(), {key: value for key, value in back.items() if not str(key).startswith("own@")})


def test_what_of_a_dict_cannot_be_kept_is_said(tmp_path: Path) -> None:
    class Key:
        def __str__(self) -> str:
            return "key"

    with pytest.warns(UserWarning, match=r"\['a'\] comes back with text as keys"):
        save({"a": {Key(): filled(1)}}, checkpoint_id=tmp_path / "keys")
    with pytest.warns(UserWarning, match="the defaultdict at .* comes back as a dict"):
        save({"b": defaultdict(lambda: 0, {1: filled(1)})}, checkpoint_id=tmp_path / "factory")
    assert Checkpoint(tmp_path / "keys").state_dict() == {"a": {"key": filled(1)}}
    assert Checkpoint(tmp_path / "factory").state_dict() == {"b": {1: filled(1)}}


def test_keys_of_an_enum_that_is_not_there_are_read_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"a": {Mode.TRAIN: filled(1)}, "b": {1: filled(1)}}, checkpoint_id=tmp_path)
    assert Checkpoint(tmp_path).state_dict() == {"a": {Mode.TRAIN: filled(1)}, "b": {1: filled(1)}}
    for name, mode in ("x", Mode.TRAIN), ("y", Mode.TEST):
        save({"n": 1, "mode": mode}, checkpoint_id=tmp_path / name)
    monkeypatch.delattr(sys.modules[__name__], "Mode")
    x, y = Checkpoint(tmp_path / "x"), Checkpoint(tmp_path / "y")
    assert list(compare(x, x)) == []
    ((name, what),) = [(each.name, each.what) for each in compare(x, y)]
    assert name == "mode" and "the bytes differ; " in what and "import it before you load" in what
    with pytest.warns(UserWarning, match=r"\['a'\] is read as a plain one with text as keys: .*import it before"):
        assert Checkpoint(tmp_path).state_dict() == {"a": {"Mode.TRAIN": filled(1)}, "b": {1: filled(1)}}
