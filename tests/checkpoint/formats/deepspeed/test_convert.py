"""Between DeepSpeed's layout and every other format: nothing is lost, and what cannot be is a typed error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from checkpoint.formats.deepspeed.made import FROZEN, SHAPES, plain, state_of, write, write_universal
from terrazzo.checkpoint import Checkpoint, save
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.cli import app
from terrazzo.errors import CheckpointExistsError, CheckpointFormatError, UnsupportedValueError


def differences(one: Path, other: Path) -> set[str]:
    """The top-level names, and the model's and the optimizer's own, under which two checkpoints differ."""
    a, b = ({**state.pop("module"), **state.pop("optimizer"), **state} for state in map(loaded, (one, other)))
    return {name for name in a.keys() | b.keys() if name not in a or name not in b or not equal(a[name], b[name])}


def loaded(path: Path) -> dict[str, Any]:
    return Checkpoint(path).state_dict()


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("kind", ("2", "3", "universal"))
def test_from_deepspeed(tmp_path, kind):
    write_universal(tmp_path, 2) if kind == "universal" else write(tmp_path, int(kind))
    for to in ("native", "dcp", "torch_save"):
        convert(tmp_path / "tag", tmp_path / f"as_{to}", to)
        assert not differences(tmp_path / "tag", tmp_path / f"as_{to}"), to


def test_from_deepspeed_to_other_stages_and_ranks(tmp_path):
    write(tmp_path, 3, 4)
    for stage, ranks in ((1, 2), (2, 3), (3, 1)):
        target = tmp_path / f"{stage}-{ranks}"
        convert(tmp_path / "tag", target, "deepspeed", stage=stage, ranks=ranks)
        changed = {"ds_config", "dp_world_size", "frozen_param_shapes"}
        assert differences(tmp_path / "tag", target) <= changed
        assert len(list(target.glob("*_optim_states.pt"))) == ranks
        assert plain(next(target.glob("*_optim_states.pt")))["optimizer_state_dict"]["zero_stage"] == stage
    convert(tmp_path / "tag", tmp_path / "as_saved", "deepspeed")
    assert not differences(tmp_path / "tag", tmp_path / "as_saved")


def test_on_the_command_line(tmp_path):
    write(tmp_path, 2, 2)
    command = ["convert", str(tmp_path / "native"), str(tmp_path / "new"), "--format", "deepspeed"]
    done = CliRunner().invoke(app, [*command, "--stage", "3", "--ranks", "2"])
    assert done.exit_code == 0, done.output
    names = [f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (0, 1) for kind in ("model", "optim")]
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == names
    added = {"ds_config", "ds_version", "loss_scaler", "param_groups", "data_sampler", "random_ltd"}
    assert differences(tmp_path / "new", tmp_path / "native") <= added


def save_state(folder: Path, **changes: Any) -> Path:
    save({**state_of(SHAPES, FROZEN), **changes}, checkpoint_id=folder / "source", no_dist=True)
    return folder / "source"


def test_precision_and_loss_scale(tmp_path):
    config = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "loss_scale_window": 50, "hysteresis": 3}}
    scaler = {"cur_scale": 512.0, "cur_hysteresis": 1, "cur_iter": 9, "last_overflow_iter": 4}
    convert(save_state(tmp_path, ds_config=config, loss_scaler=scaler), tmp_path / "tag", "deepspeed")
    optimizer = plain(tmp_path / "tag" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert optimizer["dynamic_loss_scale"] is True
    assert {key: optimizer["loss_scaler"][key] for key in scaler} == scaler
    assert (optimizer["loss_scaler"]["scale_window"], optimizer["loss_scaler"]["delayed_shift"]) == (50, 3)
    module = plain(tmp_path / "tag" / "mp_rank_00_model_states.pt")["module"]
    assert module["a.weight"].dtype is module["f"].dtype is torch.float16 and module["running"].dtype is torch.int64
    assert torch.equal(module["again"], module["a.weight"])


def test_what_cannot_be_converted(tmp_path):
    source = save_state(tmp_path)
    with pytest.raises(CheckpointFormatError, match="not a checkpoint of a training engine.*param_shapes"):
        torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "model.pt")
        convert(tmp_path / "model.pt", tmp_path / "new", "deepspeed")
    with pytest.raises(UnsupportedValueError, match="stage 4 on 2"):
        convert(source, tmp_path / "new", "deepspeed", stage=4)
    with pytest.raises(CheckpointFormatError, match="native does not use ranks=2, which is for deepspeed"):
        convert(source, tmp_path / "new", "native", ranks=2)
    with pytest.raises(CheckpointExistsError, match="cannot replace another"):
        convert(source, source, "deepspeed", overwrite=True)
    optimizer = state_of(SHAPES, FROZEN)["optimizer"]
    optimizer["state"]["a.weight"]["row"] = torch.ones(5)
    with pytest.raises(UnsupportedValueError, match="a.weight: the optimizer.s row"):
        save({**state_of(SHAPES, FROZEN), "optimizer": optimizer}, checkpoint_id=tmp_path / "factored", no_dist=True)
        convert(tmp_path / "factored", tmp_path / "new", "deepspeed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["factored", "model.pt", "source"]


@pytest.mark.parametrize(
    "changes",
    [
        {"dp_world_size": 1 << 40},
        {"dp_world_size": []},
        {"param_shapes": [["a.weight", None]]},
        {"param_shapes": 7},
        {"ds_config": [1]},
        {"loss_scaler": {"cur_scale": torch.zeros(3)}},
        {"shared_params": {"again": {}}},
        {"optimizer": {"state": {"a.bias": "x"}, "param_groups": [{"params": ["a.bias"]}]}},
    ],
)
def test_engines_checkpoints_with_values_of_other_kinds(tmp_path, changes):
    source = save_state(tmp_path, **changes)
    with pytest.raises((CheckpointFormatError, UnsupportedValueError), match="training engine's|at least one rank"):
        convert(source, tmp_path / "new", "deepspeed")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_nothing_is_removed_or_written_through_a_link(tmp_path):
    """Neither through one that has the name of the unfinished folder, nor over one that leads nowhere."""
    write(tmp_path, 2)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    (tmp_path / ".new.0123456789ab.tmp").symlink_to(mine)
    convert(tmp_path / "tag", tmp_path / "new", "deepspeed")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    with pytest.raises(CheckpointExistsError, match="nowhere exists"):
        convert(tmp_path / "tag", tmp_path / "nowhere", "deepspeed")
    assert [path.name for path in mine.iterdir()] == ["notes.txt"] and not (tmp_path / "absent").exists()
    assert (tmp_path / "nowhere").is_symlink() and (tmp_path / ".new.0123456789ab.tmp").is_symlink()
