"""A run that is saved and resumed, anywhere, goes on as if nothing had happened."""

from __future__ import annotations

import argparse
import enum
import logging
import os
import random
import shutil
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from torch.utils.data import TensorDataset

import terrazzo
from engine.runs import averaged, batches, config, engine_of, loss_of, make_model, train, train_plainly, weights
from ranks import device_type, run_ranks
from terrazzo.checkpoint import Checkpoint, CheckpointManager, PerRank, verify
from terrazzo.engine import initialize
from terrazzo.engine.content import content
from terrazzo.errors import (
    CheckpointError,
    CheckpointException,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DivergentValueError,
    EngineError,
    StateNameError,
    UnfinishedError,
)

pytestmark = pytest.mark.on_late

STEPS = 6
BEFORE = 3


def save_halfway(folder: str, stage: int) -> None:
    engine = engine_of(stage)
    train(engine, BEFORE)
    engine.save_checkpoint(
        folder, client_state={"epoch": 3, "best": torch.arange(3.0), "own": PerRank(dist.get_rank())}
    )


def resume(folder: str, stage: int, **options: object) -> list[float]:
    engine = engine_of(stage, make_model(seed=5), **options)
    path, client = engine.load_checkpoint(folder)
    assert path == str(Path(folder) / f"global_step{BEFORE}")
    assert (
        client["epoch"] == 3
        and client.get("own", dist.get_rank()) == dist.get_rank()
        and client["best"].tolist() == [0, 1, 2]
    )
    assert (engine.global_steps, engine.global_samples) == (BEFORE, BEFORE * 8)
    assert engine.lr_scheduler.last_batch_iteration == BEFORE - 1
    return train(engine, STEPS - BEFORE, start=BEFORE)


def test_resuming_in_other_stages_and_on_other_worlds(tmp_path):
    expected = train_plainly(STEPS)[0][BEFORE:]
    for world, stage in ((2, 3), (4, 1), (1, 2), (2, 0)):
        folder = tmp_path / f"{world}-{stage}"
        run_ranks(world, save_halfway, str(folder), stage)
        assert (folder / "latest").read_text() == f"global_step{BEFORE}"
        verify(folder / f"global_step{BEFORE}")
        for other, next_stage in ((2, 2), (4, 3), (1, 0), (2, 1)):
            for losses in run_ranks(other, resume, str(folder), next_stage):
                torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def run_with_manager(folder: str, stage: int, last: int) -> tuple[list[float], list[int], int]:
    """Steps up to `last`, of which a manager saves the even ones; how often the state was made."""
    engine = engine_of(stage, make_model(seed=0 if last == BEFORE else 5))
    made = 0

    def counted(*arguments: object, **options: object) -> dict:
        nonlocal made
        made += 1
        return content(*arguments, **options)

    losses = []
    with (
        CheckpointManager(folder, save=2, keep=1, best="loss") as manager,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("terrazzo.engine.saving.content", counted)
        step, client = engine.load_step(manager)
        assert (step, client) == ((None, {}) if last == BEFORE else (2, {"epoch": 2}))
        start = engine.global_steps
        for _ in range(last - start):
            losses += train(engine, 1, start=engine.global_steps)
            engine.save_step(manager, {"loss": float(engine.global_steps)}, client_state={"epoch": engine.global_steps})
        with pytest.raises(StateNameError):
            engine.save_step(manager, client_state={"global_steps": 1})
    return losses, manager.steps(), made


def test_a_manager_saves_what_its_policy_wants(tmp_path):
    """On other ranks and in another stage, the losses are those of a run that nobody stopped."""
    expected = train_plainly(STEPS)[0]
    for losses, steps, made in run_ranks(2, run_with_manager, str(tmp_path), 3, BEFORE):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[:BEFORE]), rtol=1e-5, atol=1e-5)
        assert (steps, made) == ([2], 1), "the state is made for the step that is saved"
    for losses, steps, made in run_ranks(1, run_with_manager, str(tmp_path), 1, STEPS):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[2:]), rtol=1e-5, atol=1e-5)
        assert (steps, made) == ([2, 6], 2), "the newest, and the best by loss"
    assert Checkpoint(tmp_path)["global_steps"] == 6


def check_content(folder: str) -> None:
    engine = engine_of(3)
    train(engine, 2)
    engine.save_checkpoint(folder, "named", {"mine": [1, 2]})


def test_what_a_checkpoint_holds(tmp_path):
    run_ranks(2, check_content, str(tmp_path))
    stored = Checkpoint(tmp_path / "named").state_dict()
    model = make_model()
    assert stored["module"].keys() == model.state_dict().keys() - {"again.weight"}
    assert stored["buffer_names"] == ["shift"]
    trainable = [[n, list(p.shape)] for n, p in model.named_parameters() if p.requires_grad]
    assert stored["param_shapes"] == [trainable]
    assert stored["optimizer"]["state"].keys() == {name for name, _ in trainable}
    assert stored["frozen_param_shapes"] == [["blocks.1.up.weight", [10, 7]], ["blocks.1.up.bias", [10]]]
    assert stored["frozen_param_fragments"] == [["blocks.1.up.weight", 0, [5, 5]], ["blocks.1.up.bias", 0, [5, 5]]]
    assert stored["shared_params"] == {"again.weight": "mix.weight"}
    assert stored["lr_scheduler"] == {"last_batch_iteration": 1}
    assert stored["data_sampler"] is None
    assert [stored[k] for k in ("skipped_steps", "global_steps", "global_samples")] == [0, 2, 16]
    assert (stored["dp_world_size"], stored["mp_world_size"]) == (2, 1)
    assert stored["ds_config"]["zero_optimization"]["stage"] == 3
    assert stored["version"] == terrazzo.__version__ and stored["mine"] == [1, 2]
    assert "rng@0" in stored and "rng@1" in stored


def check_unfinished(folder: str) -> list[float]:
    engine = engine_of(2)
    train(engine, BEFORE)
    engine.save_checkpoint(folder, "good")
    step = engine.optimizer.step

    def broken() -> None:
        step()
        if dist.get_rank() == 1:
            raise OSError("no more memory")

    engine.optimizer.step = broken
    rank = dist.get_rank()
    x, y = (each.chunk(2)[rank] for each in next(batches(1, BEFORE)))
    engine.backward(loss_of(engine, x, y))
    try:
        engine.step()
    except OSError:
        assert rank == 1 and engine.unfinished == f"step {BEFORE + 1}" and engine.global_steps == BEFORE
    else:
        assert rank == 0 and engine.unfinished is None
    engine.optimizer.step = step
    with pytest.raises(CheckpointException, match="UnfinishedError: save_checkpoint: step 4 failed on rank 1 when"):
        engine.save_checkpoint(folder, "bad")
    if rank == 1:
        with pytest.raises(UnfinishedError, match="step: step 4 failed on rank 1"):
            engine.step()
        with CheckpointManager(os.path.join(folder, "managed"), save=1) as manager, pytest.raises(UnfinishedError):
            engine.save_step(manager)
    else:
        CheckpointManager(os.path.join(folder, "managed"), save=1).close()
    engine.load_checkpoint(folder, "good", load_optimizer_states=False)
    assert (engine.unfinished is None) is (rank == 0)  # its optimizer has still done a step too many

    # A load that fails after it has begun to read is the same; one that finds that nothing fits is not.
    engine.load_checkpoint(folder, "good")
    assert engine.unfinished is None
    if rank == 0:
        shutil.copytree(os.path.join(folder, "good"), os.path.join(folder, "damaged"))
        for file in Path(folder, "damaged").glob("data-*"):
            data = bytearray(file.read_bytes())
            data[4096:] = bytes(len(data) - 4096)
            file.write_bytes(data)
    dist.barrier()
    other = initialize(torch.nn.Linear(2, 3), config=config(2))
    with pytest.raises(CheckpointMismatchError):
        other.load_checkpoint(folder, "good")
    assert other.unfinished is None
    with pytest.raises((CheckpointError, CheckpointException)):
        engine.load_checkpoint(folder, "damaged")
    assert engine.unfinished == f"loading {folder}/damaged"
    with pytest.raises(CheckpointException, match="loading .*damaged failed on rank"):
        engine.save_checkpoint(folder, "bad")
    assert engine.load_checkpoint(folder, "good")[0] is not None and engine.unfinished is None
    losses = train(engine, STEPS - BEFORE, start=BEFORE)
    engine.save_checkpoint(folder, "after")
    # Gradients that have been accumulated are not those of the parameters that are loaded.
    engine = engine_of(1, gradient_accumulation_steps=2)
    engine.backward(loss_of(engine, x[:2], y[:2]))
    engine.step()
    assert not engine.between_steps
    engine.load_checkpoint(folder, "good")
    assert engine.between_steps
    return losses + train(engine, STEPS - BEFORE, start=BEFORE)


def test_a_run_that_failed_halfway_is_neither_saved_nor_continued(tmp_path):
    expected = train_plainly(STEPS)[0][BEFORE:]
    for losses in run_ranks(2, check_unfinished, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected * 2), rtol=1e-5, atol=1e-5)
    assert {path.parent.name for path in tmp_path.glob("*/manifest.terrazzo")} == {"good", "damaged", "after"}


class Kind(enum.Enum):
    A = 1


def client_state(rank: int) -> dict[str, Any]:
    """What programs for DeepSpeed put there, of Megatron's kinds too."""
    args = argparse.Namespace(lr=0.1, dtype=torch.bfloat16, kind=Kind.A, inner=argparse.Namespace(path=Path("/x")))
    return {
        "args": args,
        "by_number": {1: 2, None: {(1, b"k"): [3]}},
        "counts": defaultdict(int, {"a": 1}),
        "tensors": {0: torch.arange(3.0), 10: OrderedDict({"b": torch.ones(1), "a": {2: 3}})},
        "own": PerRank({rank: 1}),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        "lr_scheduler": {1: 0.5},
        "optimizer": None,
        "module": "a name",
        "rng": PerRank([rank]),
        "version": 3,
    }


def check_client_state(folder: str, layout: str) -> None:
    engine = engine_of(1 if layout == "deepspeed" else 3)
    train(engine, 2)
    rank, left_out = dist.get_rank(), ("lr_scheduler", "optimizer", "module", "rng", "version")
    given = client_state(rank)
    if layout == "deepspeed":
        with pytest.raises(StateNameError, match="uses lr_scheduler, module, optimizer, rng, version"):
            engine.save_checkpoint(folder, "a", given, layout="deepspeed")
        given = {name: value for name, value in given.items() if name not in left_out}
    engine.save_checkpoint(folder, "a", given, layout=layout)
    tags = ["a"]
    if layout == "native":
        engine.save_checkpoint(folder, "b", given, async_op=True).result()
        tags.append("b")
    rate, seen = engine.get_lr(), torch.get_rng_state()
    for tag in tags:
        engine = engine_of(1, make_model(seed=5))
        found = engine.load_checkpoint(folder, tag)[1]
        expected = {name: value.value if isinstance(value, PerRank) else value for name, value in given.items()}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            value = tree_map_only(torch.Tensor, torch.Tensor.cpu, value)  # tensors come to the host, as DeepSpeed's do
            assert repr(found[name]) == repr(value) and type(found[name]) is type(value), name
        assert engine.get_lr() == rate and (layout == "deepspeed" or torch.equal(torch.get_rng_state(), seen))


def check_client_state_under_install(folder: str) -> None:
    terrazzo.install()  # under which torch.distributed.checkpoint.save writes PyTorch's format
    try:
        check_client_state(folder, "native")
    finally:
        terrazzo.uninstall()


@pytest.mark.filterwarnings("ignore::terrazzo.integrations.installing.InstallWarning")  # of other tests' modules
def test_client_state_comes_back_as_it_was(tmp_path):
    for layout in ("native", "deepspeed"):
        run_ranks(2, check_client_state, str(tmp_path / layout), layout)
    run_ranks(2, check_client_state_under_install, str(tmp_path / "install"))


def check_log(folder: str) -> None:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("terrazzo.engine")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        engine = engine_of(3)
        engine.save_checkpoint(folder, "all")
        there = (2, 0) if device_type() == "cpu" else (0, 2)
        assert logged == ["frozen parameters: {} on the CPU, {} on accelerators".format(*there)]
        engine.save_checkpoint(folder, "trained", exclude_frozen_parameters=True)
        assert len(logged) == 1
        engine.save_checkpoint(folder, "all")  # its own
        goes_on = engine_of(3)
        goes_on.load_checkpoint(folder, "all")
        goes_on.save_checkpoint(folder, "all")
        assert not any("replaces" in line for line in logged)
        forgot = engine_of(3)
        for tag in ("all", "all", "trained"):
            forgot.save_checkpoint(folder, tag)
        warned = [line for line in logged if "replaces" in line]
        assert len(warned) == (dist.get_rank() == 0) and all("call load_checkpoint before" in line for line in warned)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def test_what_is_logged_of_frozen_parameters_and_of_a_run_that_was_not_loaded(tmp_path):
    run_ranks(2, check_log, str(tmp_path))


def check_parts(folder: str) -> None:
    engine = engine_of(2)
    train(engine, 2)
    with pytest.raises(StateNameError, match="ds_config, global_steps"):
        engine.save_checkpoint(folder, client_state={"global_steps": 1, "ds_config": 2, "fine": 3})
    with pytest.raises(EngineError, match="cannot be used as the name"):
        engine.save_checkpoint(folder, "a/b")
    with pytest.raises(ValueError, match="ranks passed different tags"):
        engine.save_checkpoint(folder, f"rank{dist.get_rank()}")
    assert engine.load_checkpoint(folder) == (None, {})
    engine.save_checkpoint(folder, "first")
    engine.save_checkpoint(folder, "thin", save_latest=False, exclude_frozen_parameters=True)
    saved = weights(engine)
    with pytest.raises(CheckpointNotFoundError, match="has first, thin"):
        engine.load_checkpoint(folder, "absent")

    if dist.get_rank() == 0:
        os.symlink("first", os.path.join(folder, "best"))
    dist.barrier()
    with pytest.raises(CheckpointExistsError, match="best is a link or a mount point"):
        engine.save_checkpoint(folder, "best")

    other = engine_of(1, make_model(seed=9))
    before = weights(other)
    path, _ = other.load_checkpoint(folder, "thin")
    assert path == os.path.join(folder, "thin")
    for name, value in weights(other).items():
        frozen = name.startswith("blocks.1.up")
        assert torch.equal(value, before[name] if frozen else saved[name]), name

    only = engine_of(3, make_model(seed=9))
    only.load_checkpoint(folder, load_module_only=True)
    assert only.global_steps == 0 and not only.optimizer.state
    assert all(torch.equal(value, saved[name]) for name, value in weights(only).items())
    fresh = engine_of(3, make_model(seed=9))
    fresh.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert fresh.global_steps == 2 and not fresh.optimizer.state
    assert fresh.lr_scheduler.last_batch_iteration == -1

    bigger = make_model()
    bigger.extra = torch.nn.Linear(2, 2)
    del bigger.shift
    bigger.register_buffer("shift", torch.zeros(7), persistent=False)
    bigger = engine_of(1, bigger)
    with pytest.raises(CheckpointMismatchError) as caught:
        bigger.load_checkpoint(folder)
    assert "extra.weight: not in the checkpoint" in str(caught.value) and "shift: not in the model" in str(caught.value)
    bigger.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False)

    untied = make_model(seed=9)
    untied.again.weight = torch.nn.Parameter(torch.zeros(7, 7))
    untied = engine_of(1, untied)
    untied.load_checkpoint(folder, load_module_only=True)
    assert torch.equal(weights(untied)["again.weight"], saved["mix.weight"])

    # In the middle of a step: what is accumulated stays, and is not in the checkpoint.
    ends = []
    for saves in (False, True):
        accumulating = engine_of(1, gradient_accumulation_steps=2)
        before = weights(accumulating)
        for micro in range(2):
            accumulating.backward(accumulating(torch.full((2, 6), 1.0 + micro)).sum())
            accumulating.step()
            if saves and not micro:
                with pytest.warns(UserWarning, match="micro-batch 1 of 2"):
                    accumulating.save_checkpoint(folder, "middle")
        ends.append(weights(accumulating))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in before)
    resumed = engine_of(1, gradient_accumulation_steps=2)
    resumed.load_checkpoint(folder, "middle")
    assert all(torch.equal(weights(resumed)[name], before[name]) for name in before)


def test_tags_strictness_and_parts(tmp_path):
    run_ranks(2, check_parts, str(tmp_path))


def check_ranks_that_see_otherwise(folder: str) -> None:
    """All ranks load the checkpoint that the first one calls the latest, or none does."""
    engine = engine_of(1)
    rank = dist.get_rank()
    engine.save_checkpoint(folder, "first")
    (Path(folder) / f"empty{rank}").mkdir()
    dist.barrier()
    empty = f"{folder}/empty{rank}"
    assert engine.load_checkpoint(empty) == (None, {})
    assert engine.load_checkpoint(empty if rank == 0 else folder) == (None, {})
    with pytest.raises(CheckpointNotFoundError, match=r"rank 1.*no checkpoint .*empty1/first"):
        engine.load_checkpoint(folder if rank == 0 else empty)
    with pytest.raises(DivergentValueError, match="rank 0 for 'first', rank 1 for None"):
        engine.load_checkpoint(folder, "first" if rank == 0 else None)
    assert engine.load_checkpoint(folder)[0] == f"{folder}/first"


def test_ranks_that_see_otherwise(tmp_path):
    run_ranks(2, check_ranks_that_see_otherwise, str(tmp_path))


def check_sixteen_bits(folder: str) -> None:
    precision = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}}
    engine = engine_of(2, **precision)
    train(engine, 4)
    engine.save_checkpoint(folder)
    scale, expected = engine.loss_scale.state_dict(), train(engine, 3, start=4)
    for stage in (1, 3):
        again = engine_of(stage, make_model(seed=3), **precision)
        again.load_checkpoint(folder)
        assert again.loss_scale.state_dict() == scale
        torch.testing.assert_close(torch.tensor(train(again, 3, start=4)), torch.tensor(expected), rtol=1e-3, atol=1e-3)


def test_float16_resumes_with_its_loss_scale(tmp_path):
    run_ranks(2, check_sixteen_bits, str(tmp_path))


def draws() -> tuple[float, float]:
    return torch.rand(()).item(), random.random()


def check_random(folder: str) -> None:
    engine = engine_of(1)
    torch.manual_seed(100 + dist.get_rank())
    random.seed(dist.get_rank())
    engine.save_checkpoint(folder)
    expected = draws()
    engine.load_checkpoint(folder)
    assert draws() == expected


def drawn(folder: str) -> tuple[float, float]:
    engine_of(1).load_checkpoint(folder)
    return draws()


def test_random_states_are_each_ranks_own(tmp_path):
    run_ranks(2, check_random, str(tmp_path))
    two, four = run_ranks(2, drawn, str(tmp_path)), run_ranks(4, drawn, str(tmp_path))
    assert four[:2] == two and len(set(four)) == 4
    assert run_ranks(4, drawn, str(tmp_path)) == four


def data_engine(stage: int = 1):
    data = TensorDataset(torch.arange(50.0)[:, None].repeat(1, 6), torch.arange(50))
    return initialize(make_model(), training_data=data, config=config(stage))


def seen(engine, steps: int) -> list[list[int]]:
    """The samples of each step, on all ranks."""
    found = []
    batches = iter(engine.training_dataloader)
    for _ in range(steps):
        x, index = next(batches)
        engine.backward(engine(x).square().mean())
        engine.step()
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, index.tolist())
        found.append(sorted(sum(parts, [])))
    return found


def save_with_data(folder: str) -> list[list[int]]:
    engine = data_engine()
    seen(engine, 4)
    engine.save_checkpoint(folder, async_op=True).result()
    return seen(engine, 9)


def load_with_data(folder: str) -> list[list[int]]:
    engine = data_engine()
    engine.load_checkpoint(folder)
    return seen(engine, 9)


def test_data_goes_on_where_it_was_on_any_world(tmp_path):
    expected = run_ranks(2, save_with_data, str(tmp_path))[0]
    assert expected[0] != expected[1]
    for world in (1, 2, 4):
        assert run_ranks(world, load_with_data, str(tmp_path))[0] == expected


def check_buffers(folder: str) -> None:
    engine = engine_of(1)
    engine.module.shift.fill_(dist.get_rank())  # statistics of each rank's own data
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    assert averaged(engine.module.shift.sum()) == 0.0


def test_buffers_that_differ_are_the_first_ranks(tmp_path):
    run_ranks(2, check_buffers, str(tmp_path))
