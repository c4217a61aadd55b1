"""The rates of the schedules, against numbers worked out by hand and against DeepSpeed's."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch.optim import lr_scheduler as pytorchs

from engine.deepspeed_cases import deepspeed_is_installed
from ranks import run_ranks
from terrazzo.engine import initialize
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


def test_a_range_test_and_one_cycle():
    line = {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 4.0}
    assert rates("LRRangeTest", 5, **line) == [1, 3, 5, 7, 9]
    assert rates("LRRangeTest", 5, **line, lr_range_test_staircase=True) == [1, 1, 5, 5, 9]
    cycle = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2, "cycle_second_step_size": 4}
    assert rates("OneCycle", 9, **cycle)[:7] == [1, 2, 3, 2.5, 2, 1.5, 1]


CASES = {
    "WarmupLR": [{}, {"warmup_max_lr": 0.3, "warmup_num_steps": 7, "warmup_type": "linear"}],
    "WarmupDecayLR": [{"total_num_steps": 20, "warmup_num_steps": 6, "warmup_max_lr": 0.2}],
    "WarmupCosineLR": [{"total_num_steps": 20, "warmup_num_steps": 6, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}],
    "LRRangeTest": [{"lr_range_test_step_size": 3}, {"lr_range_test_staircase": True, "lr_range_test_step_size": 4}],
    "OneCycle": [
        {"cycle_first_step_size": 5},
        {"cycle_first_step_size": 4, "cycle_second_step_size": 8, "decay_step_size": 3, "decay_lr_rate": 0.5},
        {"cycle_first_step_size": 6, "cycle_first_stair_count": 3, "decay_step_size": 2, "decay_mom_rate": 0.01},
        {"cycle_first_step_size": 6, "cycle_second_stair_count": 2, "cycle_momentum": False},
        {"cycle_first_step_size": 4, "cycle_min_mom": 0.7, "cycle_max_mom": [0.8, 0.95]},
    ],
}


@pytest.mark.skipif(not deepspeed_is_installed(), reason="DeepSpeed is not installed")
@pytest.mark.parametrize(("kind", "params"), [(kind, params) for kind, cases in CASES.items() for params in cases])
def test_deepspeeds_own_schedules_agree(kind, params):
    import deepspeed.runtime.lr_schedules as theirs

    def optimizer() -> torch.optim.Optimizer:
        weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        return torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}], lr=0.25)

    if kind == "OneCycle":
        params = {"cycle_min_lr": [0.01, 0.02], "cycle_max_lr": 0.1, **params}
    one, other = optimizer(), optimizer()
    ours = make_scheduler(None, SchedulerConfig(type=kind, params=params), one)
    reference = getattr(theirs, kind)(other, **params)
    arguments = [inspect.signature(type(each)).parameters.values() for each in (ours, reference)]
    assert [(a.name, a.kind) for a in arguments[0]] == [(a.name, a.kind) for a in arguments[1]]
    names = ("max_lrs", "min_lrs", "warmup_num_steps", "total_num_steps")
    assert all(getattr(ours, n) == getattr(reference, n) for n in names if hasattr(reference, n))
    for step in range(26):
        for query in ("get_lr", "get_mom", "get_lr_ratio"):
            if hasattr(reference, query):
                found, wanted = (torch.tensor(getattr(each, query)() or 0.0) for each in (ours, reference))
                torch.testing.assert_close(found, wanted, msg=query)
        for group, expected in zip(one.param_groups, other.param_groups, strict=True):
            assert group["lr"] == pytest.approx(expected["lr"], rel=1e-12), step
            assert group["betas"] == pytest.approx(expected["betas"], rel=1e-12), step
        ours.step()
        reference.step()
    one = optimizer()
    resumed = make_scheduler(None, SchedulerConfig(type=kind, params=params), one)
    resumed.load_state_dict(reference.state_dict())
    reference.step(), resumed.step()
    assert one.param_groups[0]["lr"] == pytest.approx(other.param_groups[0]["lr"], rel=1e-12)


def test_what_is_refused():
    with pytest.raises(EngineConfigError, match="'TwoCycles' is not one of"):
        rates("TwoCycles", 1)
    with pytest.raises(EngineConfigError, match="do not fit OneCycle"):
        rates("OneCycle", 1, cycle_min_lr=0.1)
    with pytest.raises(EngineConfigError, match="cycle_first_step_size must be positive"):
        rates("OneCycle", 1, cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_step_size=0)
    with pytest.raises(EngineConfigError, match="lr_range_test_step_size must be a positive int"):
        rates("LRRangeTest", 1, lr_range_test_step_size=0)
    with pytest.raises(EngineConfigError, match="do not fit WarmupLR"):
        rates("WarmupLR", 1, warmup_steps=3)
    with pytest.raises(EngineConfigError, match="must be 0 or more"):
        rates("WarmupLR", 1, warmup_num_steps=-5)
    with pytest.raises(EngineConfigError, match="log or linear"):
        rates("WarmupLR", 1, warmup_type="square")
    with pytest.raises(EngineConfigError, match="2 values for 1 param groups"):
        rates("WarmupLR", 1, warmup_max_lr=[0.1, 0.2])


def engine_with(scheduler):
    torch.manual_seed(0)
    options = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    return initialize(torch.nn.Linear(2, 1), lr_scheduler=scheduler, config=options)


def step_rates(engine, steps):
    found = []
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 2)).square().mean())
        engine.step()
        found.append(engine.get_lr())
    return found


def in_sequence(optimizer):
    parts = [pytorchs.ConstantLR(optimizer, 0.5, 2), pytorchs.MultiStepLR(optimizer, [2, 4], 0.1)]
    return pytorchs.SequentialLR(optimizer, parts, [2])


def check_resumed_rates(folder):
    makers = {
        "milestones": lambda optimizer: pytorchs.MultiStepLR(optimizer, [2, 4, 5], 0.5),
        "sequence": in_sequence,
        "cycle": lambda optimizer: pytorchs.OneCycleLR(optimizer, 1.0, 10),
        "restarts": lambda optimizer: pytorchs.CosineAnnealingWarmRestarts(optimizer, 3),
    }
    for name, make in makers.items():
        engine = engine_with(make)
        step_rates(engine, 3)
        engine.save_checkpoint(folder, name)
        rest = step_rates(engine, 4)
        assert any(rates != rest[0] for rates in rest), name
        again = engine_with(make)
        again.load_checkpoint(folder, name)
        assert step_rates(again, 4) == rest, name


def test_param_groups_that_are_added_later():
    """Of every kind; one of the optimizer's own could not be found by a schedule that was made before."""
    needed = {"WarmupDecayLR": {"total_num_steps": 8}, "WarmupCosineLR": {"total_num_steps": 8}}
    needed["OneCycle"] = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}  # type: ignore[dict-item]  # other numbers
    for kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = make_scheduler(None, SchedulerConfig(type=kind, params=needed.get(kind, {})), optimizer)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5})
        with pytest.raises(EngineConfigError, match=f"{kind} was made for 1 param groups, and the optimizer has 2 now"):
            scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups][1] == 0.5


def test_pytorchs_schedulers_go_on_as_they_were(tmp_path):
    run_ranks(1, check_resumed_rates, str(tmp_path))
