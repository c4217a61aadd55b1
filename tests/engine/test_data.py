"""The order of the data, and random layer-token dropping: exact, resumable, independent of the ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from engine.deepspeed_cases import deepspeed_is_installed
from engine.runs import config
from ranks import run_ranks
from terrazzo.engine import Curriculum, ResumableSampler, initialize
from terrazzo.engine.config import Batch, ScheduleConfig
from terrazzo.engine.curriculum import Ramp, Staircase, difficulty_schedule
from terrazzo.errors import EngineConfigError, EngineError


def steps_of(samplers, count):
    """The samples of each step, in the order of the micro-batches and ranks."""
    iterators = [iter(sampler) for sampler in samplers]
    accumulation = samplers[0]._batch.accumulation
    steps = []
    for _ in range(count):
        steps.append([i for _ in range(accumulation) for iterator in iterators for i in next(iterator)])
        for sampler in samplers:
            sampler.end_step()
    return steps


def samplers_of(ranks, accumulation=1, curriculum=None, samples=50, seed=3):
    batch = Batch(8, 8 // ranks // accumulation, accumulation)
    return [
        ResumableSampler(samples, batch, rank=r, ranks=ranks, seed=seed, curriculum=curriculum) for r in range(ranks)
    ]


def curriculum():
    difficulties = torch.arange(50) % 10
    return Curriculum({"length": difficulties}, {"length": Ramp(2, 9, steps=10, multiple=1)})


@pytest.mark.parametrize("make", [lambda: None, curriculum])
def test_one_order_on_any_ranks_and_from_any_step(make):
    whole = steps_of(samplers_of(1, curriculum=make()), 20)
    for ranks, accumulation in ((2, 1), (2, 2), (4, 1)):
        assert steps_of(samplers_of(ranks, accumulation, make()), 20) == whole
    for stop in (1, 6, 7, 13):
        first = samplers_of(2, curriculum=make())
        assert steps_of(first, stop) == whole[:stop]
        again = samplers_of(4, 2, curriculum=make(), seed=9)
        for sampler in again:
            sampler.load_state_dict(first[0].state_dict())
        assert steps_of(again, 20 - stop) == whole[stop:]


def test_every_pass_is_a_permutation_of_its_own():
    drawn = [i for step in steps_of(samplers_of(1), 25) for i in step]
    passes = [drawn[n * 50 : n * 50 + 50] for n in range(4)]
    assert all(sorted(one) == list(range(50)) for one in passes)
    assert len({tuple(one) for one in passes}) == 4
    plain = ResumableSampler(5, Batch(3, 3, 1), rank=0, ranks=1, seed=0, shuffle=False)
    assert steps_of([plain], 3) == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_a_curriculum_begins_with_what_is_easy():
    rule = curriculum()
    for step, samples in enumerate(steps_of(samplers_of(1, curriculum=rule), 14)):
        assert max(i % 10 for i in samples) <= rule.limits(step)["length"]
    first_pass = [i for step in steps_of(samplers_of(1, curriculum=curriculum()), 6) for i in step][:48]
    assert len(set(first_pass)) < 48  # the easy ones ran out, and came again
    with pytest.raises(EngineConfigError, match="leave no sample"):
        rule = Curriculum({"d": torch.full((50,), 5)}, {"d": Staircase((1, 9), (100,))})
        steps_of(samplers_of(1, curriculum=rule), 1)
    with pytest.raises(EngineConfigError, match="50 samples"):
        samplers_of(1, curriculum=Curriculum({"d": torch.ones(3)}, {"d": Staircase((1,), ())}))
    with pytest.raises(EngineConfigError, match="uses the metrics d"):
        Curriculum({}, {"d": Staircase((1,), ())})
    with pytest.raises(EngineError, match="50 in the checkpoint"):
        samplers_of(1, samples=49)[0].load_state_dict(samplers_of(1)[0].state_dict())


SCHEDULES = [
    ("fixed_linear", {"total_curriculum_step": 17, "difficulty_step": 4}),
    ("fixed_root", {"total_curriculum_step": 20, "difficulty_step": 8, "root_degree": 2}),
    ("fixed_discrete", {"difficulty": [6, 10, 41], "max_step": [5, 12]}),
]


@pytest.mark.skipif(not deepspeed_is_installed(), reason="DeepSpeed is not installed")
@pytest.mark.parametrize(("kind", "how"), SCHEDULES)
def test_deepspeeds_own_difficulties_agree(kind, how):
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    given = {"min_difficulty": 6, "max_difficulty": 41, "schedule_type": kind, "schedule_config": how}
    theirs = CurriculumScheduler({**given, "schedule_config": dict(how)})
    ours = difficulty_schedule("length", ScheduleConfig(**given))
    curriculum = Curriculum({"length": torch.zeros(1)}, {"length": ours})
    # DeepSpeed's sampler has counted a step before it asks.
    assert [curriculum.limits(step)["length"] for step in range(25)] == [
        theirs.update_difficulty(step + 1) for step in range(25)
    ]


class Tokens(nn.Module):
    """Layers that count the tokens that they see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True) for _ in range(3)])
        self.seen: list[int] = []
        for layer in self.layers:
            layer.linear1.register_forward_pre_hook(lambda _, args: self.seen.append(args[0].shape[1]))

    def forward(self, x):
        self.seen.clear()
        for layer in self.layers:
            x = layer(x)
        return x


def ltd_engine(low: int = 4):
    schedule = {
        "min_value": low,
        "max_value": 12,
        "schedule_config": {"require_steps": 4, "seq_per_step": 2},
    }
    ltd = {"enabled": True, "random_ltd_layer_id": [1], "random_ltd_schedule": schedule}
    routing = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}}
    torch.manual_seed(0)
    return initialize(Tokens(), config=config(3, data_efficiency=routing))


def dropped(engine, steps, start=0):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses = []
    for step in range(start, start + steps):
        x = torch.randn(8, 12, 4, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        loss = engine(x).square().mul(torch.arange(12.0)[:, None]).mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def check_ltd(folder):
    engine = ltd_engine()
    counts = []
    for step in range(6):
        dropped(engine, 1, step)
        counts.append(list(engine.module.seen))
        if step == 2:
            engine.save_checkpoint(folder)
            consumed = engine.random_ltd.consumed_layer_tokens
    assert counts == [[12, 4, 12], [12, 6, 12], [12, 8, 12], [12, 10, 12], [12, 12, 12], [12, 12, 12]]
    assert consumed == 8 * (4 + 6 + 8)
    engine.eval()
    engine(torch.zeros(2, 12, 4))
    assert engine.module.seen == [12, 12, 12] or not engine.module.seen  # PyTorch's fast path skips linear1


def resumed_ltd(folder):
    engine = ltd_engine()
    engine.load_checkpoint(folder)
    assert engine.random_ltd.current_tokens == 10 and engine.random_ltd.consumed_layer_tokens == 8 * 18
    return dropped(engine, 3, 3)


def test_random_ltd(tmp_path):
    run_ranks(2, check_ltd, str(tmp_path))
    two, four = run_ranks(2, resumed_ltd, str(tmp_path))[0], run_ranks(4, resumed_ltd, str(tmp_path))[0]
    torch.testing.assert_close(torch.tensor(two), torch.tensor(four), rtol=1e-5, atol=1e-5)


def curriculum_engine():
    lengths = torch.arange(64) % 8 + 1
    schedule = {"total_curriculum_step": 6, "difficulty_step": 1}
    metric = {"min_difficulty": 3, "max_difficulty": 8, "schedule_type": "fixed_linear", "schedule_config": schedule}
    learning = {"enabled": True, "curriculum_metrics": {"seqlen": metric}}
    sampling = {"enabled": True, "curriculum_learning": learning}
    options = config(1, data_efficiency={"enabled": True, "data_sampling": sampling})
    data = TensorDataset(torch.randn(64, 6), lengths)
    return initialize(nn.Linear(6, 1), training_data=data, difficulties={"seqlen": lengths}, config=options)


def longest(engine, steps):
    """The limit of each step, and the longest sample that a rank then saw."""
    found = []
    batches = iter(engine.training_dataloader)
    for _ in range(steps):
        limit = engine.curriculum_limits()["seqlen"]
        x, lengths = next(batches)
        engine.backward(engine(x).square().mean())
        engine.step()
        found.append((limit, lengths.max().item()))
    return found


def check_curriculum(folder):
    engine = curriculum_engine()
    found = longest(engine, 3)
    engine.save_checkpoint(folder)
    rest = longest(engine, 5)
    assert [limit for limit, _ in found + rest] == [3, 4, 5, 6, 7, 8, 8, 8]
    assert all(seen <= limit for limit, seen in found + rest)
    again = curriculum_engine()
    again.load_checkpoint(folder)
    assert longest(again, 5) == rest


def test_an_engine_with_a_curriculum_goes_on_with_its_difficulty(tmp_path):
    run_ranks(2, check_curriculum, str(tmp_path))


class Seeds(Dataset):
    """What each worker process would draw."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.utils.data.get_worker_info().seed


def check_draws(folder):
    """A run that resumes drops what it would have dropped: to begin with the data takes no number of the program's."""
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 3))

    def losses(engine, count):
        found = []
        for x, y in engine.training_dataloader:
            loss = (engine(x) - y).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
            if len(found) == count:
                return found

    def begun():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3))
        return initialize(model, config=config(1, optimizer={"type": "SGD", "params": {"lr": 0.1}}), training_data=data)

    whole = losses(begun(), 7)
    engine = begun()
    found = losses(engine, 3)
    engine.save_checkpoint(folder)
    again = begun()
    again.load_checkpoint(folder)
    assert found + losses(again, 4) == whole


def test_a_run_that_resumes_draws_the_same_numbers(tmp_path):
    run_ranks(1, check_draws, str(tmp_path))


def check_workers():
    data_sampling = {"enabled": True, "num_workers": 1}
    options = config(1, data_efficiency={"enabled": True, "data_sampling": data_sampling})
    engine = initialize(nn.Linear(1, 1), config=options, training_data=Seeds())
    one, two = (next(iter(engine.training_dataloader))[0].item() for _ in range(2))
    engine.data_sampler.end_step()
    later = next(iter(engine.training_dataloader))[0].item()
    assert one == two != later


def test_workers_draw_others_in_other_steps():
    run_ranks(1, check_workers)
