"""Loaders that know their own place: a run that is resumed in the middle of a pass sees what it would have seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from engine.runs import INPUTS, TOTAL, config
from ranks import run_ranks
from terrazzo.engine import Engine, initialize
from terrazzo.errors import EngineConfigError, EngineError

SAMPLES, STEPS, BEFORE = 5 * TOTAL, 9, 3  # five steps are a pass


class Loader:
    """Numbers in another order in each pass; this rank's part of each step's."""

    def __init__(self, alike: bool = True) -> None:
        self.place = torch.zeros(2, dtype=torch.int64)  # passes, and steps of this one
        self.alike = alike

    def __iter__(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        while True:
            passes, steps = self.place.tolist()
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(passes))
            self.place += torch.tensor([1, -steps] if steps == SAMPLES // TOTAL - 1 else [0, 1])
            yield order[steps * TOTAL : (steps + 1) * TOTAL].chunk(world)[rank]
            if not self.place[1]:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "rank": None if self.alike else dist.get_rank()}  # what goes on to change

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.alike or state["rank"] == dist.get_rank()
        self.place = state["place"].clone()


def engine_with(loader: Any) -> Engine:
    torch.manual_seed(0)
    options = {key: value for key, value in config(2).items() if key != "scheduler"}
    return initialize(nn.Linear(INPUTS, 1), training_dataloader=loader, config=options)


def train(engine: Engine, steps: int, save: str | None = None) -> list[tuple[list[int], float]]:
    """The samples of each step and its loss, over all ranks; after BEFORE steps the run is saved."""
    seen: list[tuple[list[int], float]] = []
    while len(seen) < steps:
        for samples in engine.training_dataloader:
            x = torch.sin(samples[:, None] + torch.arange(INPUTS))
            loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
            engine.backward(loss)
            engine.step()
            parts = [torch.zeros(len(samples) + 1) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, torch.cat([samples.float(), loss.detach()[None]]))
            of_all = torch.stack(parts)
            seen.append(([int(n) for n in of_all[:, :-1].flatten()], of_all[:, -1].mean().item()))
            if save is not None and len(seen) == BEFORE:
                saved = engine.save_checkpoint(save, async_op=True)
            if len(seen) == steps:
                break
    if save is not None:
        saved.result()
    return seen


def whole_run(folder: str, alike: bool) -> list[Any]:
    return train(engine_with(Loader(alike)), STEPS, folder)


def rest_of_run(folder: str, alike: bool) -> list[Any]:
    engine = engine_with(Loader(alike))
    engine.load_checkpoint(folder)
    return train(engine, STEPS - BEFORE)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert [sorted(samples) for samples, _ in found] == [sorted(samples) for samples, _ in expected]
    losses = [torch.tensor([loss for _, loss in run]) for run in (found, expected)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def test_a_run_goes_on_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    whole = run_ranks(2, whole_run, str(tmp_path), True)[0]
    assert sorted(n for samples, _ in whole[:5] for n in samples) == list(range(SAMPLES))
    assert whole[:5] != whole[5:]  # other orders
    for world in (1, 2, 4):  # the place is counted in steps of all ranks
        for rest in run_ranks(world, rest_of_run, str(tmp_path), True):
            assert_same(rest, whole[BEFORE:])


def check_other_ranks(folder: str) -> None:
    engine = engine_with(Loader(alike=False))
    before = engine.module.weight.full_tensor()
    with pytest.raises(EngineError, match="position for each of 2 data-parallel ranks"):
        engine.load_checkpoint(folder)
    assert torch.equal(engine.module.weight.full_tensor(), before) and engine.global_steps == 0
    engine.load_checkpoint(folder, load_module_only=True)
    assert not torch.equal(engine.module.weight.full_tensor(), before)
    without = engine_with(None)
    without.load_checkpoint(folder)
    assert without.global_steps == BEFORE


def test_places_of_each_rank_s_own(tmp_path: Path) -> None:
    whole = run_ranks(2, whole_run, str(tmp_path), False)[0]
    assert_same(run_ranks(2, rest_of_run, str(tmp_path), False)[0], whole[BEFORE:])
    run_ranks(4, check_other_ranks, str(tmp_path))


def check_refused() -> None:
    with pytest.raises(EngineConfigError, match="DataLoader without state_dict"):
        engine_with(DataLoader(list(range(8))))
    with pytest.raises(EngineConfigError, match="pass one of them"):
        initialize(nn.Linear(2, 2), training_data=[1, 2], training_dataloader=Loader(), config=config(0))


def test_what_cannot_be_resumed_is_refused():
    run_ranks(1, check_refused)


class Numbers(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    """Knows its own place, as datasets may."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self):
        while self.next < SAMPLES:
            self.next += dist.get_world_size()
            yield self.next - dist.get_world_size() + dist.get_rank()
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def torchdata_runs(folder: str, streamed: bool) -> tuple[list[Any], list[Any]]:
    from torch.utils.data.distributed import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    def made() -> Engine:
        size = TOTAL // dist.get_world_size()
        if streamed:
            return engine_with(StatefulDataLoader(Stream(), batch_size=size))
        data = Numbers()
        sampler = DistributedSampler(data, shuffle=True, seed=4)
        return engine_with(StatefulDataLoader(data, batch_size=size, sampler=sampler))

    whole = train(made(), STEPS, folder)
    engine = made()
    engine.load_checkpoint(folder)
    return whole[BEFORE:], train(engine, STEPS - BEFORE)


@pytest.mark.parametrize("streamed", [False, True])
def test_torchdatas_loader(tmp_path: Path, streamed: bool) -> None:
    for expected, found in run_ranks(2, torchdata_runs, str(tmp_path), streamed):
        assert_same(found, expected)
