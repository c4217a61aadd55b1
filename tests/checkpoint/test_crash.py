"""Crashes and failures at every file operation of a save: afterwards the old checkpoint or the new, never a mixture."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import terrazzo
from ranks import run_fresh, run_ranks
from terrazzo.checkpoint import FileSystemReader, async_save, load, save
from terrazzo.checkpoint.stores import LocalStore
from terrazzo.errors import CheckpointError, CheckpointException, CheckpointNotFoundError, CommError
from warm_python import warm_python

sys.path.insert(0, str(Path(__file__).parent))
from faults import FaultySystem, FaultyWriter

MANY = 10_000  # more operations than a save has
LIMIT = timedelta(seconds=20)


def whole_state(generation: int) -> dict:
    value = float(generation)
    return {"half": torch.full((6, 4), value), "replicated": torch.full((10,), value), "object": generation}


def state(generation: int) -> dict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = whole_state(generation)
    return whole | {"half": distribute_tensor(whole["half"], mesh, [Shard(0)], src_data_rank=None)}


def generation_at(path: Path) -> int:
    """Which generation lies there; fails if it is a mixture or damaged."""
    target = whole_state(-1)
    load(target, checkpoint_id=path)
    values = {*target["half"].reshape(-1).tolist(), *target["replicated"].tolist(), float(target["object"])}
    assert len(values) == 1, f"a mixture: {values}"
    return int(values.pop())


def save_generation(path: str, generation: int, rank: int = -1, at: int = MANY, fault: str = "EIO") -> int:
    """Save; on `rank` operation number `at` suffers the fault.  Returns how many operations there were."""
    system = FaultySystem(at if dist.get_rank() == rank else MANY, fault)
    save(state(generation), storage_writer=FaultyWriter(path, system), timeout=LIMIT)
    return system.count


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("old")
    run_ranks(2, save_generation, str(path), 1)
    return path


def run_crash_lab(old: str, folder: Path) -> list[dict]:
    program = Path(__file__).parent / "crash_lab.py"
    source = Path(terrazzo.__file__).parents[1]
    done = subprocess.run(
        [warm_python(), str(program), old, str(folder)],
        env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("overwriting", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_rank_is_killed_at_every_operation(old: Path, tmp_path: Path, overwriting: bool) -> None:
    trials = run_crash_lab(str(old) if overwriting else "-", tmp_path)
    assert {trial["victim"] for trial in trials} == {0, 1} and len(trials) > 20
    for trial in trials:
        path, victim, ends = Path(trial["path"]), trial["victim"], trial["ends"]
        if ends == [0, 0] and not overwriting:  # the other rank made the folder, so there was less to do
            continue
        assert ends[victim] == -signal.SIGKILL, trial
        # The survivor raises, or, if it knew of the commit before the other died, has succeeded.
        assert ends[1 - victim] in (0, 7), trial
        if not overwriting and not (path / "manifest.terrazzo").exists():
            assert ends[1 - victim] == 7
            with pytest.raises(CheckpointNotFoundError):
                generation_at(path)
        else:
            generation = generation_at(path)
            assert generation in ({1, 2} if overwriting else {2}), trial
            assert generation == 2 or ends[1 - victim] == 7, trial
        save(whole_state(0), checkpoint_id=path)  # the next save works, and removes what was left
        assert generation_at(path) == 0
        assert len(os.listdir(path)) == 2, os.listdir(path)


def fail_everywhere(old: str, folder: str, rank: int, fault: str) -> list[str]:
    """A save with the fault at each operation in turn; every rank raises the same, or none does."""
    problems = []
    at = 0
    while True:
        path = f"{folder}/{rank}-{fault}-{at}"
        if dist.get_rank() == 0:
            shutil.copytree(old, path)
        dist.barrier()
        system = FaultySystem(at if dist.get_rank() == rank else MANY, fault)
        error: CheckpointException | None = None
        try:
            save(state(2), storage_writer=FaultyWriter(path, system), timeout=LIMIT)
        except CheckpointException as caught:
            error = caught
        errors: list = [None] * 2
        dist.all_gather_object(errors, None if error is None else told(error))
        happened: list = [None] * 2
        dist.all_gather_object(happened, system.happened)
        if happened[rank] is None:
            return problems
        if errors[0] != errors[1]:
            problems.append(f"{at} {happened[rank]}: ranks disagree: {errors}")
        if errors[0] is not None and (f"rank {rank}" not in errors[0][0] or fault not in _names(errors[0][0])):
            problems.append(f"{at} {happened[rank]}: the error does not say enough: {errors[0][0]}")
        dist.barrier()
        if dist.get_rank() == 0:
            generation = generation_at(Path(path))
            leftovers = len([n for n in os.listdir(path) if n.startswith("data-")]) - 2
            if errors[0] is None and generation != 2:
                problems.append(f"{at} {happened[rank]}: reported success and left generation {generation}")
            if errors[0] is not None and leftovers and generation == 1 and happened[rank] != "unlink":
                problems.append(f"{at} {happened[rank]}: left {leftovers} files behind")
        dist.barrier()
        at += 1


def told(error: CheckpointException) -> tuple:
    """What ranks have to agree on."""
    failures = {rank: (repr(wrapped), [f.lineno for f in stack]) for rank, (wrapped, stack) in error.failures.items()}
    return str(error), failures, type(error).__name__


def _names(text: str) -> set[str]:
    import errno

    return {name for name in ("EIO", "ENOSPC") if os.strerror(getattr(errno, name)) in text}


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
def test_every_operation_fails_in_turn(old: Path, tmp_path: Path, fault: str) -> None:
    for rank in (0, 1):
        problems = run_ranks(2, fail_everywhere, str(old), str(tmp_path), rank, fault)
        assert problems == [[], []]


@pytest.mark.parametrize("fault", ["short", "slow"])
def test_short_writes_and_slow_disks_are_no_failure(tmp_path: Path, fault: str) -> None:
    run_ranks(2, save_generation, str(tmp_path), 3, 0, MANY, fault)
    assert generation_at(tmp_path) == 3
    reader = FileSystemReader(tmp_path)
    reader.store = LocalStore(tmp_path, FaultySystem(MANY, fault))
    target = whole_state(-1)
    load(target, storage_reader=reader)
    assert target["half"].eq(3).all()


def save_without_rank_one(path: str) -> tuple[str, float]:
    if dist.get_rank() == 1:
        time.sleep(5)
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(CommError) as caught:
        save({"w": torch.zeros(2)}, checkpoint_id=path, timeout=timedelta(seconds=2))
    return str(caught.value), time.monotonic() - start


def test_a_rank_that_never_arrives(tmp_path: Path) -> None:
    first, _ = run_fresh(2, save_without_rank_one, str(tmp_path), timeout=60)
    assert first.ok, str(first)
    message, seconds = first.value
    assert "[1]" in message and seconds < 20
    assert not list(tmp_path.glob("data-*"))


class Explosive:
    """A stateful object whose state cannot be had on one rank."""

    def state_dict(self) -> dict:
        if dist.get_rank() == 1:
            raise ValueError("the data loader is gone")
        return {"n": 1}

    def load_state_dict(self, state_dict: dict) -> None:
        raise AssertionError


def save_explosive(path: str) -> list[str]:
    messages = []
    for attempt in (save, async_save):
        try:
            outcome = attempt({"loader": Explosive(), "w": torch.zeros(2)}, checkpoint_id=path, timeout=LIMIT)
            outcome.result()
        except (CheckpointError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_a_state_that_cannot_be_had_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    for messages in run_ranks(2, save_explosive, str(tmp_path)):
        assert len(messages) == 2 and all("the data loader is gone" in message for message in messages)
