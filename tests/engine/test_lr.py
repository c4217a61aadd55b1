"""The rates of the schedules, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from terrazzo.engine.config import SchedulerConfig
from terrazzo.engine.lr import make_scheduler
from terrazzo.errors import EngineConfigError


def rates(kind: str, steps: int, **params: object) -> list[float]:
    """The rate of each step, beginning with the first."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_scheduler(None, SchedulerConfig(type=kind, params=params), optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return found


def test_warmup_then_constant_decay_or_cosine():
    line = {"warmup_num_steps": 4, "warmup_type": "linear"}
    assert rates("WarmupLR", 7, warmup_min_lr=1.0, warmup_max_lr=3.0, **line) == [1, 1, 1.5, 2, 2.5, 3, 3]
    logarithm = [0, 0, math.log(2) / math.log(4), math.log(3) / math.log(4), 1, 1]
    assert rates("WarmupLR", 6, warmup_max_lr=1.0, warmup_num_steps=4) == pytest.approx(logarithm)
    decayed = rates("WarmupDecayLR", 11, total_num_steps=8, warmup_max_lr=1.0, **line)
    assert decayed == [0, 0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0, 0]
    cosine = rates("WarmupCosineLR", 11, total_num_steps=8, cos_min_ratio=0.2, warmup_min_ratio=0.0, **line)
    fall = [0.2 + 0.4 * (1 + math.cos(math.pi * share)) for share in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)]
    assert cosine == pytest.approx([0, 0, 0.25, 0.5, 0.75, *fall])


def test_what_is_refused():
    with pytest.raises(EngineConfigError, match="'OneCycle' is none of"):
        rates("OneCycle", 1)
    with pytest.raises(EngineConfigError, match="do not fit WarmupLR"):
        rates("WarmupLR", 1, warmup_steps=3)
    with pytest.raises(EngineConfigError, match="log or linear"):
        rates("WarmupLR", 1, warmup_type="square")
    with pytest.raises(EngineConfigError, match="2 values for 1 param groups"):
        rates("WarmupLR", 1, warmup_max_lr=[0.1, 0.2])
