"""The real DeepSpeed trains and saves; the engine resumes with its losses, and reads its weights as it does."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.deepspeed_cases import BEFORE, CASES, STEPS, UNIVERSAL, parsed
from engine.runs import config, make_model, param_groups, train
from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint
from terrazzo.checkpoint.compare import compare
from terrazzo.checkpoint.formats import Format, detect
from terrazzo.engine import initialize
from terrazzo.errors import CheckpointError

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install --no-build-isolation 'terrazzo[deepspeed]'",
)


def deepspeed_runs(out: Path, cases: list[str], ranks: int = 2) -> None:
    """Let DeepSpeed run the cases."""
    script = Path(__file__).with_name("deepspeed_runs.py")
    tools = str(Path(sys.executable).parent)  # DeepSpeed looks for ninja
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PATH"] = tools + os.pathsep + environment.get("PATH", "")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launch, str(script), str(out), *cases], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of DeepSpeed, and the losses that it went on to."""
    out = tmp_path_factory.mktemp("deepspeed")
    deepspeed_runs(out, list(CASES))
    return out


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


@needs_deepspeed
@pytest.mark.parametrize("case", CASES)
def test_the_engine_goes_on_with_deepspeeds_losses(saved, case):
    expected = torch.tensor(json.loads((saved / "losses.json").read_text())[case])[BEFORE:]
    precision = case.split("-")[1]
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    for world, stage in ((2, case[0]), (4, "3"), (1, "0")):
        for losses in run_ranks(world, resume, str(saved), case, f"{stage}-{precision}"):
            torch.testing.assert_close(torch.tensor(losses), expected, rtol=tolerance, atol=tolerance)


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


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert not list(compare(one, other))


@needs_deepspeed
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_zero_to_fp32(saved, case):
    assert_weights_of_zero_to_fp32(saved, case, int(case[0]))
    part = Checkpoint(saved / case)["module.blocks.2.down.weight"]
    assert torch.equal(part[2:5, 3:], part[...][2:5, 3:])


@needs_deepspeed
@pytest.mark.parametrize("case", UNIVERSAL)
def test_universal_checkpoints(saved, case, tmp_path):
    assert_same(Checkpoint(saved / case), Checkpoint(saved / f"{case}-universal"))
    (tmp_path / "made").symlink_to(saved / f"{case}-universal")
    (tmp_path / "latest_universal").write_text("made")
    assert detect(tmp_path) is detect(tmp_path / "made") is Format.DEEPSPEED
    assert_same(Checkpoint(tmp_path), Checkpoint(saved / case))
    losses = run_ranks(4, resume, str(tmp_path), None, f"3-{case.split('-')[1]}")[0]
    expected = json.loads((saved / "losses.json").read_text())[case][BEFORE:]
    tolerance = 1e-5 if "fp32" in case else 2e-2
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)


@needs_deepspeed
def test_a_checkpoint_that_lacks_a_file(saved, tmp_path):
    source = saved / next(iter(CASES))
    for file in source.iterdir():
        if "rank_0_mp" not in file.name or "optim" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match="data-parallel rank"):
        list(Checkpoint(tmp_path))


def save_for_deepspeed(folder: str, case: str) -> list[float]:
    engine = engine_like(case)
    train(engine, BEFORE)
    engine.save_checkpoint(folder, f"ours-{case}", {"mine": [1, 2]}, layout="deepspeed")
    return train(engine, STEPS - BEFORE, start=BEFORE)


@needs_deepspeed
def test_deepspeed_goes_on_with_the_engines_losses(tmp_path):
    expected = {case: run_ranks(2, save_for_deepspeed, str(tmp_path), case)[0] for case in CASES}
    assert (tmp_path / "latest").read_text() == f"ours-{CASES[-1]}"
    deepspeed_runs(tmp_path, [f"{case}@ours-{case}" for case in CASES])
    losses = json.loads((tmp_path / "losses-resumed.json").read_text())
    for case in CASES:
        found, tolerance = torch.tensor(losses[f"{case}@ours-{case}"]), 1e-5 if "fp32" in case else 2e-2
        torch.testing.assert_close(found, torch.tensor(expected[case]), rtol=tolerance, atol=tolerance)
        assert_weights_of_zero_to_fp32(tmp_path, f"ours-{case}", int(case[0]))
        if case in UNIVERSAL:
            assert_same(Checkpoint(tmp_path / f"ours-{case}"), Checkpoint(tmp_path / f"ours-{case}-universal"))
    for case in ("1-bf16-master", "3-fp32-small"):
        again = run_ranks(4, resume, str(tmp_path), f"ours-{case}", case)[0]
        torch.testing.assert_close(torch.tensor(again), torch.tensor(expected[case]), rtol=2e-2, atol=2e-2)
