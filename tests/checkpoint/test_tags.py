"""Tags are names of folders, whatever white space they begin and end with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from terrazzo.checkpoint import Checkpoint, load, save
from terrazzo.checkpoint.native.names import name_as_latest
from terrazzo.checkpoint.stores import Place
from terrazzo.engine import initialize

TAGS = [" a", "a ", "\ta b\t", "a\n", "\n", "  ", "\n\na\n\n", "\u00a0a\u2003"]


def engine_of(value: float):
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, value)
    return initialize(model, config={"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})


@pytest.mark.parametrize("tag", TAGS)
def test_a_run_is_resumed_from_any_tag(tmp_path: Path, tag: str) -> None:
    engine_of(1.0).save_checkpoint(tmp_path, "other")
    engine_of(7.0).save_checkpoint(tmp_path, tag)
    for asked in (None, tag):
        engine = engine_of(0.0)
        path, _ = engine.load_checkpoint(tmp_path, asked)
        assert path is not None and Path(path) == tmp_path / tag
        assert all(weight.eq(7.0).all() for name, weight in engine.module.named_parameters() if name == "weight")


@pytest.mark.parametrize("written", ["{}\n", " {} ", "{}\r\n", "{}"])
def test_what_others_have_written_around_a_name_is_none_of_it(tmp_path: Path, written: str) -> None:
    save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step 1")
    (tmp_path / "latest").write_bytes(written.format("step 1").encode())
    assert Checkpoint(tmp_path)["w"][...].eq(1).all()


def test_a_folder_of_exactly_that_name_comes_first(tmp_path: Path) -> None:
    for value, name in enumerate(("a", "a ", " a ")):
        save({"w": torch.full((2,), float(value))}, checkpoint_id=tmp_path / name)
    for value, name in enumerate(("a", "a ", " a ")):
        name_as_latest(Place(tmp_path), name)
        target = {"w": torch.zeros(2)}
        load(target, checkpoint_id=tmp_path)
        assert target["w"].eq(value).all()
