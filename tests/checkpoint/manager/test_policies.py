"""What policies say, alone and together, beside what is worked out by hand or by counting."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path

import pytest
import torch

from ranks import run_ranks
from terrazzo.checkpoint.manager import (
    Best,
    CheckpointManager,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepUntilCopied,
    KeepWhen,
    Moment,
    Record,
    SaveAny,
    SaveAt,
    SaveEvery,
    SaveFirst,
    SavePolicy,
)
from terrazzo.checkpoint.manager.policies import reasons_to_keep, settled
from terrazzo.checkpoint.manager.records import checked_metrics, checked_step
from terrazzo.errors import CheckpointManagerError


def steps_saved(policy: SavePolicy, last: int | None = None) -> list[int]:
    saved = []
    for step in range(1, 31):
        if policy.wants(Moment(step, last, 7.0 * (step - (last or 0)))):
            saved.append(step)
            last = step
    return saved


def test_which_steps_are_saved():
    assert steps_saved(SaveEvery(10)) == [10, 20, 30]
    assert steps_saved(SaveAt([3, 4, 99])) == [3, 4]
    assert steps_saved(SaveEvery(seconds=50)) == [8, 16, 24]
    assert steps_saved(SaveFirst()) == [1] and steps_saved(SaveFirst(), last=0) == []
    both = SaveFirst() | SaveEvery(10) | SaveAt((7,))
    assert steps_saved(both) == [1, 7, 10, 20, 30]
    assert isinstance(both, SaveAny) and len(both.policies) == 3
    assert hash(both) == hash(SaveFirst() | (SaveEvery(10) | SaveAt((7,))))


def records(*losses: float) -> list[Record]:
    return [Record(10 * n, 100.0 + n, {"loss": loss}) for n, loss in enumerate(losses, 1)]


def test_which_are_kept():
    five = records(3.0, 1.0, math.nan, 2.0, 1.0)
    assert set(KeepLast(2).keeps(five)) == {40, 50} and set(KeepLast(9).keeps(five)) == {10, 20, 30, 40, 50}
    assert list(KeepBest(3, "loss").keeps(five)) == [50, 20, 40]  # of equal ones the newest
    assert set(KeepBest(2, Best("loss", "max")).keeps(five)) == {10, 40}
    assert set(KeepBest(9, "loss").keeps(five)) == {10, 20, 40, 50}  # what is no number is not good
    assert KeepBest(1, "accuracy").keeps(five) == {}
    assert set(KeepBest(1, Best(lambda metrics: -metrics["loss"])).keeps(five)) == {10}
    assert set(KeepEvery(20).keeps(five)) == {20, 40}
    assert set(KeepEvery(seconds=2).keeps(five)) == {10, 30, 50}
    assert KeepWhen(lambda record: record.step == 30, "odd").keeps(five) == {30: "odd"}
    assert set((KeepLast(1) | KeepBest(1, "loss") | KeepEvery(30)).keeps(five)) == {30, 50}


def test_why_they_are_kept():
    five = records(3.0, 1.0, 5.0, 2.0, 4.0)
    policy = settled(KeepLast(2) | KeepBest(2), Best("loss"))
    assert reasons_to_keep(policy, Best("loss"), five) == {
        20: ["best 2 by loss", "best by loss"],
        40: ["last 2", "best 2 by loss"],
        50: ["last 2", "newest"],
    }
    assert list(reasons_to_keep(KeepWhen(lambda record: False), None, five)) == [50]
    assert len(reasons_to_keep(None, None, five)) == 5
    assert reasons_to_keep(KeepLast(1), None, []) == {}


@pytest.mark.parametrize("seed", range(20))
def test_what_was_kept_does_not_change_when_the_others_are_gone(seed: int):
    """A policy that is asked again after every removal keeps what it would have kept had nothing been removed."""
    draw = random.Random(seed)
    policy = settled(KeepLast(2) | KeepBest(3) | KeepEvery(4) | KeepEvery(seconds=25), Best("loss"))
    everything: list[Record] = []
    kept: list[Record] = []
    now = 0.0
    for step in range(1, 60):
        now += draw.expovariate(0.2)
        record = Record(step, now, {"loss": draw.random()})
        everything.append(record)
        kept.append(record)
        kept = [each for each in kept if each.step in reasons_to_keep(policy, None, kept)]
    assert [each.step for each in kept] == sorted(reasons_to_keep(policy, None, everything))


def test_what_is_refused():
    for make in (
        lambda: SaveEvery(),
        lambda: SaveEvery(10, 5.0),
        lambda: SaveEvery(0),
        lambda: KeepEvery(seconds=-1),
        lambda: KeepLast(0),
        lambda: KeepBest(1.5, "loss"),
        lambda: Best("loss", "smallest"),
        lambda: settled(KeepAny((KeepLast(1), KeepBest(1))), None),
        lambda: checked_step(-1),
        lambda: checked_step(1.0),
        lambda: checked_metrics({"loss": torch.zeros(2)}),
        lambda: checked_metrics({1: 1.0}),
        lambda: checked_metrics({"loss": "low"}),
    ):
        with pytest.raises(CheckpointManagerError):
            make()
    assert checked_metrics({"loss": torch.tensor(0.5)}) == {"loss": 0.5} and checked_step(torch.tensor(3)) == 3
    with pytest.raises(TypeError):
        SaveEvery(10) | KeepLast(1)


def raise_once(root: str) -> None:
    wrong = [KeyError("loss"), SystemExit(3)]

    def judge(record: Record) -> bool:
        if wrong and record.step == 2:
            raise wrong.pop()
        return False

    with CheckpointManager(root, keep=KeepWhen(judge) | KeepLast(1)) as manager:
        manager.save(1, {"w": torch.ones(2)})
        manager.save(2, {"w": torch.ones(2)})
        with pytest.raises(CheckpointManagerError, match="no checkpoint was removed.*raised SystemExit: 3"):
            manager.wait()
        assert {"global_step1", "global_step2"} <= set(os.listdir(root))
        manager.wait()  # it is raised once
        assert manager.steps() == [1, 2]
        manager.save(3, {"w": torch.ones(2)})
        while not manager._house.idle(1.0):
            pass
        with pytest.raises(CheckpointManagerError, match="raised KeyError: 'loss'"):
            manager.save(4, {"w": torch.ones(2)})
        manager.save(5, {"w": torch.ones(2)})  # step 4 was not saved, and removals go on
    assert manager.steps() == [5]


def test_a_policy_that_raises_is_heard(tmp_path: Path):
    run_ranks(2, raise_once, str(tmp_path))
    manager = CheckpointManager(tmp_path, best=Best(lambda metrics: 1 / metrics["loss"]))
    manager.restore("latest", {"w": torch.zeros(2)})
    manager.save(6, {"w": torch.ones(2)}, {"loss": 0.0})
    with pytest.raises(CheckpointManagerError, match="raised ZeroDivisionError"):
        manager.close()
    manager = CheckpointManager(tmp_path)
    assert manager.steps() == [5, 6]
    manager.close()


def test_where_copies_go_that_cannot_be_reached(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "copies").write_text("not a folder")
    with CheckpointManager(tmp_path / "run", keep=KeepLast(1) | KeepUntilCopied(tmp_path / "copies")) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.ones(2)})
    assert manager.steps() == [1, 2, 3] and "all checkpoints are kept" in caplog.text
