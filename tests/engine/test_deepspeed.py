"""The real DeepSpeed trains and saves; the engine resumes with its losses, and reads its weights as it does."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.deepspeed_cases import (
    BEFORE,
    CASES,
    PIPELINE,
    STEPS,
    UNIVERSAL,
    deepspeed_is_installed,
    parsed,
    pipeline_layers,
)
from engine.runs import config, make_model, param_groups, train, weights
from ranks import fresh_values, run_ranks
from terrazzo.checkpoint import Checkpoint, PerRank
from terrazzo.checkpoint.formats import detect
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.tools.compare import compare
from terrazzo.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from terrazzo.engine import initialize
from terrazzo.errors import CheckpointError, EngineError, RankError

needs_deepspeed = pytest.mark.skipif(
    not deepspeed_is_installed(),
    reason="DeepSpeed is not installed: run make deepspeed, or pip install --no-build-isolation 'terrazzo[deepspeed]'",
)


def deepspeed_runs(out: str, cases: list[str]) -> dict[str, list[float]]:
    """Let the real DeepSpeed run the cases."""
    tools = str(Path(sys.executable).parent)  # it looks for ninja
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PATH": f"{tools}:{os.environ['PATH']}"}
    from engine import deepspeed_runs

    return deepspeed_runs.run_all(Path(out), cases)


def engine_like(case: str, **model: int):
    stage, precision, option = parsed(case)
    made = make_model(**model)
    optimizer = torch.optim.AdamW(param_groups(made), lr=0.01, weight_decay=0.1)
    options = config(stage)
    del options["optimizer"]
    options["zero_optimization"] |= {"small": {"sub_group_size": 60}, "robin": {"round_robin_gradients": True}}.get(
        option, {}
    )
    if precision != "fp32":
        options[precision] = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
    return initialize(made, optimizer, config=options)


def resume(folder: str, saved_as: str | None, resumed_as: str) -> list[float]:
    engine = engine_like(resumed_as, seed=4)
    path, client = engine.load_checkpoint(folder, saved_as)
    assert path is not None and client["mine"] == [1, 2]
    assert (engine.global_steps, engine.global_samples) == (BEFORE, BEFORE * 8)
    assert engine.lr_scheduler.last_batch_iteration == BEFORE - 1
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.0]
    if engine.fp16_enabled():
        assert engine.loss_scale.value == 256 and engine.loss_scale.steps == BEFORE
    return train(engine, STEPS - BEFORE, start=BEFORE)


def save_for_deepspeed(folder: str, case: str) -> list[float]:
    """Save in DeepSpeed's layout and in the native format, and go on."""
    engine = engine_like(case)
    train(engine, BEFORE)
    engine.save_checkpoint(folder, f"ours-{case}", {"mine": [1, 2]}, layout="deepspeed")
    engine.save_checkpoint(folder, f"native-{case}", {"mine": [1, 2]})
    return train(engine, STEPS - BEFORE, start=BEFORE)


@dataclass(frozen=True)
class Runs:
    """Checkpoints: DeepSpeed's under its case's name, the engine's under names that begin with `ours` or `native`.

    Attributes:
        losses: those that DeepSpeed went on to, by case; after the engine's checkpoint, by `case@tag`.
        expected: those that the engine went on to, by case.
    """

    folder: Path
    losses: dict[str, list[float]]
    expected: dict[str, list[float]]


# Saved in the native format on 4 ranks, converted for DeepSpeed on 2, in another stage.
CONVERTED = {"2-fp32-robin": "3-fp32", "3-bf16": "2-bf16"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("deepspeed")
    expected = {case: run_ranks(2, save_for_deepspeed, str(folder), case)[0] for case in CASES}
    assert (folder / "latest").read_text() == f"native-{CASES[-1]}"
    resumed = [f"{case}@ours-{case}" for case in CASES]
    for saved_as, case in CONVERTED.items():
        expected[case + "@"] = run_ranks(4, save_for_deepspeed, str(folder / "wide"), saved_as)[0]
        tag = f"converted-{case}"
        convert(folder / "wide" / f"native-{saved_as}", folder / tag, "deepspeed", stage=int(case[0]), ranks=2)
        resumed.append(f"{case}@{tag}")
    # In ranks of its own, which are killed after it: what it leaves behind can abort an interpreter that ends.
    first, _ = fresh_values(2, deepspeed_runs, str(folder), [*CASES, *resumed, PIPELINE], timeout=600)
    return Runs(folder, first, expected)


def assert_close(found: list[float], expected: list[float], case: str) -> None:
    """Equal, as far as the precision of the case allows."""
    tolerance = 1e-5 if "fp32" in case else 2e-2
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance)


@needs_deepspeed
@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_engine_goes_on_with_deepspeeds_losses(runs, case):
    precision = parsed(case)[1]
    for place, world in enumerate((1, 2, 4)):  # over all cases, each world has every stage
        stage = (CASES.index(case) + place) % 4
        for losses in run_ranks(world, resume, str(runs.folder), case, f"{stage}-{precision}"):
            assert_close(losses, runs.losses[case][BEFORE:], case)


@needs_deepspeed
@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_deepspeed_goes_on_with_the_engines_losses(runs, case):
    assert_close(runs.losses[f"{case}@ours-{case}"], runs.expected[case], case)
    assert_weights_of_zero_to_fp32(runs.folder, f"ours-{case}", int(case[0]))
    # Its own layout is what another number of ranks of the engine goes on from, too.
    for losses in run_ranks(1, resume, str(runs.folder), f"ours-{case}", f"{3 - int(case[0])}-{parsed(case)[1]}"):
        assert_close(losses, runs.expected[case], case)


@needs_deepspeed
@pytest.mark.long
@pytest.mark.parametrize("case", CONVERTED.values())
def test_deepspeed_goes_on_from_what_was_converted(runs, case):
    assert_close(runs.losses[f"{case}@converted-{case}"], runs.expected[case + "@"], case)
    assert_weights_of_zero_to_fp32(runs.folder, f"converted-{case}", int(case[0]))


def assert_weights_of_zero_to_fp32(folder: Path, tag: str, stage: int) -> None:
    if not (folder / f"{tag}.pt").exists():
        return
    theirs = torch.load(folder / f"{tag}.pt", weights_only=False)
    ours = Checkpoint(folder / tag)
    names = {name.removeprefix("module.") for name in ours if name.startswith("module.")}
    # In stage 1 its conversion loses what was not trained.
    frozen = {"blocks.1.up.weight", "blocks.1.up.bias"} if stage == 1 else set()
    assert names == theirs.keys() - {"again.weight"} | frozen
    assert torch.equal(theirs["again.weight"], theirs["mix.weight"])
    model = torch.load(next((folder / tag).glob("*mp_rank_00_model_states.pt")), weights_only=False)["module"]
    for name in frozen:
        assert torch.equal(ours[f"module.{name}"][...], model[name])
    for name in names - frozen:
        assert torch.equal(ours[f"module.{name}"][...].float(), theirs[name].float()), name
    state = get_fp32_state_dict_from_zero_checkpoint(folder, tag)
    assert state.keys() == names | {"again.weight"}
    for name in theirs:
        assert torch.equal(state[name].float(), theirs[name].float()), name


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert not list(compare(one, other))


@needs_deepspeed
@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_zero_to_fp32(runs, case, tmp_path):
    assert_weights_of_zero_to_fp32(runs.folder, case, int(case[0]))
    convert(runs.folder / case, tmp_path / "native", "native")
    assert_same(Checkpoint(tmp_path / "native"), Checkpoint(runs.folder / case))
    part = Checkpoint(runs.folder / case)["module.blocks.2.down.weight"]
    assert torch.equal(part[2:5, 3:], part[...][2:5, 3:])


@needs_deepspeed
@pytest.mark.long
@pytest.mark.parametrize("case", UNIVERSAL)
def test_universal_checkpoints(runs, case, tmp_path):
    for tag in (case, f"ours-{case}"):
        assert_same(Checkpoint(runs.folder / tag), Checkpoint(runs.folder / f"{tag}-universal"))
    (tmp_path / "made").symlink_to(runs.folder / f"{case}-universal")
    (tmp_path / "latest_universal").write_text("made")
    assert detect(tmp_path) == detect(tmp_path / "made") == "deepspeed"
    assert_same(Checkpoint(tmp_path), Checkpoint(runs.folder / case))
    losses = run_ranks(4, resume, str(tmp_path), None, f"3-{parsed(case)[1]}")[0]
    assert_close(losses, runs.losses[case][BEFORE:], case)


def resume_pipeline(folder: str, stage: int) -> list[float]:
    first, twice, rest = pipeline_layers()
    engine = initialize(torch.nn.Sequential(first, twice, twice, *rest), config=config(stage))
    assert engine.load_checkpoint(folder, PIPELINE)[1]["mine"] == [1, 2]
    assert torch.equal(engine.module[3].shift, torch.linspace(-1, 1, 7)) and engine.global_steps == BEFORE
    return train(engine, STEPS - BEFORE, start=BEFORE)


@needs_deepspeed
@pytest.mark.long
def test_a_pipeline(runs, tmp_path):
    for world, stage in ((1, 0), (2, 2)):
        for losses in run_ranks(world, resume_pipeline, str(runs.folder), stage):
            assert_close(losses, runs.losses[PIPELINE][BEFORE:], "fp32")
    convert(runs.folder / PIPELINE, tmp_path / "native", "native")
    assert_same(Checkpoint(runs.folder / PIPELINE), Checkpoint(tmp_path / "native"))


@needs_deepspeed
@pytest.mark.long
def test_a_checkpoint_that_lacks_a_file(runs, tmp_path):
    source = runs.folder / next(iter(CASES))
    for file in source.iterdir():
        if "rank_0_mp" not in file.name or "optim" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match="data-parallel rank"):
        list(Checkpoint(tmp_path))


def check_saving(folder: str) -> None:
    rank = dist.get_rank()
    engine = engine_like("3-bf16")
    train(engine, 1)
    engine.save_checkpoint(folder, "all", {"own": PerRank([rank]), "mine": 1}, layout="deepspeed")
    engine.save_checkpoint(folder, "thin", layout="deepspeed", exclude_frozen_parameters=True, save_latest=False)
    assert (Path(folder) / "latest").read_text() == "all"
    other = engine_like("2-bf16", seed=5)
    assert other.load_checkpoint(folder)[1] == {"own": [rank], "mine": 1}
    saved, loaded = weights(engine), weights(other)
    for name, value in loaded.items():
        # Stage 3 keeps what is not trained in the precision of forward.
        frozen = name.startswith("blocks.1.up")
        assert torch.equal(value, saved[name].bfloat16().float() if frozen else saved[name]), name
    untrained = engine_like("1-bf16", seed=6)
    before = weights(untrained)
    untrained.load_checkpoint(folder, "thin")
    for name, value in weights(untrained).items():
        assert torch.equal(value, before[name] if name.startswith("blocks.1.up") else saved[name]), name
    with pytest.raises(CheckpointError, match="cannot replace another"):
        engine.save_checkpoint(folder, "all", layout="deepspeed")
    with pytest.raises(EngineError, match="cannot be written in the background"):
        engine.save_checkpoint(folder, "later", layout="deepspeed", async_op=True)
    with pytest.raises(EngineError, match="stage 0"):
        engine_like("0-fp32").save_checkpoint(folder, "whole", layout="deepspeed")
    assert sorted(path.name for path in Path(folder).iterdir()) == ["all", "latest", "thin"]
    apart = Path(f"{folder}-host{rank}")  # a disk of each host
    apart.mkdir()
    with pytest.raises(RankError, match="the folder must be the same for all ranks"):
        engine.save_checkpoint(str(apart), "tag", layout="deepspeed")
    assert not list(apart.iterdir())


def test_saving_in_deepspeeds_layout(tmp_path):
    run_ranks(2, check_saving, str(tmp_path))
