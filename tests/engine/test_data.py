"""The order of the data: exact, resumable, independent of the ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from engine.runs import config
from ranks import run_ranks
from terrazzo.engine import ResumableSampler, initialize
from terrazzo.engine.config import Batch
from terrazzo.errors import EngineError


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


def samplers_of(ranks, accumulation=1, samples=50, seed=3):
    batch = Batch(8, 8 // ranks // accumulation, accumulation)
    return [ResumableSampler(samples, batch, rank=r, ranks=ranks, seed=seed) for r in range(ranks)]


def test_one_order_on_any_ranks_and_from_any_step():
    whole = steps_of(samplers_of(1), 20)
    for ranks, accumulation in ((2, 1), (2, 2), (4, 1)):
        assert steps_of(samplers_of(ranks, accumulation), 20) == whole
    for stop in (1, 6, 7, 13):
        first = samplers_of(2)
        assert steps_of(first, stop) == whole[:stop]
        again = samplers_of(4, 2, seed=9)
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


def test_another_number_of_samples_is_an_error():
    with pytest.raises(EngineError, match="50 in the checkpoint"):
        samplers_of(1, samples=49)[0].load_state_dict(samplers_of(1)[0].state_dict())


def test_positions_of_older_checkpoints(caplog):
    """Those have the growth of a pass, and may stand at the end of a pass."""
    whole = steps_of(samplers_of(1, samples=16), 6)
    older = {"step": 2, "passes": 0, "taken": 16, "growth": [{"taken": 0, "limits": {}}]}
    older |= {"samples": 16, "seed": 3, "shuffle": True, "train_batch_size": 8}
    again = samplers_of(2, samples=16, seed=9)
    for sampler in again:
        sampler.load_state_dict(older)
    assert steps_of(again, 4) == whole[2:] and not caplog.records
    with_curriculum = {**older, "taken": 5, "growth": [{"taken": 0, "limits": {"length": 2}}]}
    again[0].load_state_dict(with_curriculum)
    assert "begins a new pass" in caplog.text
    assert again[0].state_dict() == {key: older[key] for key in older if key != "growth"} | {"passes": 1, "taken": 0}


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
    options = config(1, data_efficiency={"data_sampling": {"enabled": True, "num_workers": 1}})
    engine = initialize(nn.Linear(1, 1), config=options, training_data=Seeds())
    one, two = (next(iter(engine.training_dataloader))[0].item() for _ in range(2))
    engine.data_sampler.end_step()
    later = next(iter(engine.training_dataloader))[0].item()
    assert one == two != later


def test_workers_draw_others_in_other_steps():
    run_ranks(1, check_workers)
