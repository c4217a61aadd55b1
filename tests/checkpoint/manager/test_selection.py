"""Which steps are saved and which checkpoints are kept, beside what is worked out by hand or by counting."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
import torch

from terrazzo.checkpoint.manager import Best, CheckpointManager, Keep, Record, Save
from terrazzo.checkpoint.manager.records import checked_metrics, checked_step
from terrazzo.checkpoint.manager.selection import reasons_to_keep
from terrazzo.errors import CheckpointManagerError


def steps_saved(save: Save, last: int | None = None) -> list[int]:
    saved = []
    for step in range(1, 31):
        if save.selects(step, last) or save.is_due(7.0 * (step - (last or 0))):
            saved.append(step)
            last = step
    return saved


def test_which_steps_are_saved():
    assert steps_saved(Save(steps=10)) == [10, 20, 30]
    assert steps_saved(Save(at=[3, 4, 99])) == steps_saved(Save(at={99, 4, 3})) == [3, 4]
    assert steps_saved(Save(seconds=50)) == [8, 16, 24]
    assert steps_saved(Save(first=True)) == [1] and steps_saved(Save(first=True), last=0) == []
    assert steps_saved(Save(first=True, steps=10, at=(7,))) == [1, 7, 10, 20, 30]
    assert steps_saved(Save(steps=10, seconds=50)) == [8, 10, 18, 20, 28, 30]
    assert Save(at=[7, 3]) == Save(at=(3, 7)) and len({Save(at=[7, 3]), Save(at=(3, 7)), Save(steps=1)}) == 2


def records(*losses: float) -> list[Record]:
    return [Record(10 * n, 100.0 + n, {"loss": loss}) for n, loss in enumerate(losses, 1)]


def test_which_are_kept():
    five = records(3.0, 1.0, math.nan, 2.0, 1.0)
    assert set(Keep(last=2).reasons(five)) == {40, 50} and set(Keep(last=9).reasons(five)) == {10, 20, 30, 40, 50}
    by_loss = Best("loss")
    assert [record.step for record in by_loss.order(five)] == [50, 20, 40, 10]  # of equal ones the newest; NaN is none
    assert set(Keep(best=3).reasons(five, by_loss)) == {50, 20, 40}
    assert set(Keep(best=9).reasons(five, by_loss)) == {10, 20, 40, 50}
    assert set(Keep(best=2).reasons(five, Best("loss", "max"))) == {10, 40, 50}  # the newest always
    assert set(Keep(best=1).reasons(five, Best("accuracy"))) == {50}
    assert set(Keep(steps=20).reasons(five)) == {20, 40, 50}
    assert set(Keep(seconds=2).reasons(five)) == {10, 30, 50}
    assert set(Keep(last=1, best=1, steps=30).reasons(five, by_loss)) == {30, 50}


def test_why_they_are_kept():
    five = records(3.0, 1.0, 5.0, 2.0, 4.0)
    assert Keep(last=2, best=2).reasons(five, Best("loss")) == {
        20: ["best 2 by loss", "best by loss"],
        40: ["last 2", "best 2 by loss"],
        50: ["last 2", "newest"],
    }
    assert len(reasons_to_keep(None, five, None)) == 5
    assert Keep(last=1).reasons([]) == {}


@pytest.mark.parametrize("seed", range(20))
def test_what_was_kept_does_not_change_when_the_others_are_gone(seed: int):
    """Removed after every save or once at the end, the same checkpoints are left; the newest is always one of them."""
    draw = random.Random(seed)
    fields = {"last": draw.choice([None, 2]), "best": 3, "steps": draw.choice([None, 4]), "seconds": 25}
    keep, best = Keep(**fields), Best("loss")
    everything: list[Record] = []
    kept: list[Record] = []
    now = 0.0
    for step in range(1, 60):
        now += draw.expovariate(0.2)
        record = Record(step, now, {"loss": draw.random()})
        everything.append(record)
        kept.append(record)
        kept = [each for each in kept if each.step in keep.reasons(kept, best)]
        assert kept[-1] is record
    assert [each.step for each in kept] == sorted(keep.reasons(everything, best))


def test_what_is_refused():
    for make, said in (
        (lambda: Save(), "set steps, seconds, at or first"),
        (lambda: Save(steps=0), "Save: `steps` must be an integer of at least 1, not 0"),
        (lambda: Save(at=7), "`at` must be a list of steps, not 7"),
        (lambda: Save(at=[1.5]), "must be an integer, not 1.5"),
        (lambda: Keep(), "set last, best, steps or seconds"),
        (lambda: Keep(seconds=-1), "`seconds` must be a number above 0, not -1"),
        (lambda: Keep(seconds=math.nan), "not nan"),
        (lambda: Keep(last=0), "Keep: `last` must be an integer of at least 1, not 0"),
        (lambda: Keep(best=1.5), "`best` must be an integer"),
        (lambda: Best("loss", "smallest"), "'min' or 'max'"),
        (lambda: Best(lambda metrics: 1.0), "the name of a metric"),
        (lambda: Keep(best=1).reasons([]), "`best` needs a metric"),
        (lambda: checked_step(-1), "from 0"),
        (lambda: checked_step(1.0), "must be an integer"),
        (lambda: checked_metrics({"loss": torch.zeros(2)}), "must be a number"),
        (lambda: checked_metrics({1: 1.0}), "must be text"),
        (lambda: checked_metrics({"loss": "low"}), "must be a number"),
    ):
        with pytest.raises(CheckpointManagerError, match=said):
            make()
    assert checked_metrics({"loss": torch.tensor(0.5)}) == {"loss": 0.5} and checked_step(torch.tensor(3)) == 3
    with pytest.raises(AttributeError):
        Keep(last=1).last = 2


def test_arguments_of_the_manager(tmp_path):
    for arguments, said in (
        ({"keep": 0}, "`last` must be an integer of at least 1, not 0"),
        ({"keep": True}, "`keep` must be an integer, a Keep or None, not True"),
        ({"keep": Save(steps=1)}, "`keep` must be"),
        ({"keep_local": "two"}, "`keep_local` must be an integer, a Keep or None, not 'two'"),
        ({"save": Keep(last=1)}, "`save` must be an integer, a Save or None"),
        ({"save": 0.5}, "`save` must be"),
        ({"best": 3}, "`best` must be the name of a metric, a Best or None, not 3"),
        ({"keep": Keep(best=2)}, "Keep: `best` needs a metric: pass the manager best="),
        ({"keep_local": Keep(best=2)}, "Keep: `best` needs a metric: pass the manager best="),
    ):
        with pytest.raises(CheckpointManagerError, match=said):
            CheckpointManager(tmp_path, **arguments)


def test_they_are_what_a_file_says():
    assert msgspec.convert({"steps": 4, "at": [2]}, Save) == Save(steps=4, at={2})
    assert msgspec.convert({"last": 3, "seconds": 60}, Keep) == Keep(last=3, seconds=60.0)
    for wrong in ({}, {"last": 0}, {"newest": 3}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, Keep)
