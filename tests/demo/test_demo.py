"""The main job, in short: `terrazzo demo` as a user starts it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from terrazzo.checkpoint import Checkpoint, verify
from terrazzo.demo.crash import half_saved
from terrazzo.demo.ending import TOLERANCE, compare
from terrazzo.demo.plan import plan_of
from terrazzo.demo.screen import Screen
from terrazzo.demo.story import _make_room
from terrazzo.errors import DemoError
from warm_python import warm_python

STEPS = 18


@pytest.mark.long
def test_a_run_that_is_killed_while_saving_ends_as_one_that_was_not(tmp_path):
    folder = tmp_path / "out"
    done = subprocess.run(
        [warm_python(), "-m", "terrazzo", "demo", "--steps", str(STEPS), "--out", str(folder), "--json"],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told, results = " ".join(done.stderr.split()), json.loads(done.stdout)
    assert results["same"] and results["steps"] == STEPS and results["resumed_from"] < results["killed_while_saving"]
    assert "ranks are killed (SIGKILL) while they save step" in told and "no manifest" in told
    assert "Resume from step" in told and "the same run" in told and "NOT" not in told
    assert "all as it was saved" in told and "[256:512, 0:128]" in told

    rows = list(csv.DictReader((folder / "loss.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    alone, first, second = (
        {int(row["step"]): float(row[name]) for row in rows if row[name]} for name in list(rows[0])[1:]
    )
    assert first.keys() | second.keys() == alone.keys() and max(first) < STEPS == max(second)
    assert first.keys() & second.keys(), "the second run does the steps again that the crash took"
    for part in (first, second):
        torch.testing.assert_close(list(part.values()), [alone[step] for step in part], rtol=0, atol=1e-5)
    assert alone[STEPS] < alone[1] - 1.5

    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    latest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text()
    assert latest.name == f"global_step{STEPS}" and verify(latest) == []
    exported = torch.load(folder / "model.pt", weights_only=True)
    assert exported["global_steps"] == STEPS and exported["dp_world_size"] == 1 and exported["mp_world_size"] == 2
    weight = Checkpoint(latest)["module.blocks.0.up.weight"][...]
    assert torch.equal(exported["module"]["blocks.0.up.weight"], weight)


def test_a_half_written_save_is_told_from_a_whole_one(tmp_path):
    assert half_saved(tmp_path / "absent") is None
    file = tmp_path / "data-0123456789ab-00000.safetensors"
    file.touch()
    assert half_saved(tmp_path) is None, "nothing has been written"
    file.write_bytes(b"12345")
    found = half_saved(tmp_path)
    assert found is not None and (found.files, found.nbytes) == (1, 5)
    (tmp_path / "manifest.terrazzo").touch()
    assert half_saved(tmp_path) is None


def test_only_what_a_demo_left_is_replaced(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "model.pt").touch()
    _make_room(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(DemoError, match="thesis.tex"):
        _make_room(Path(tmp_path))
    assert (tmp_path / "thesis.tex").exists()


def test_losses_that_differ_are_not_called_the_same(tmp_path):
    plan = plan_of(tmp_path, 12)
    alone = {step: 5.0 - step / 4 for step in range(1, 13)}
    first = {step: alone[step] for step in range(1, 7)}
    second = {step: alone[step] for step in range(5, 13)}
    for wrong, verdict in ((0.0, "by at most 0.0e+00: the same run"), (0.01, "by at most 1.0e-02: NOT the same run")):
        told = StringIO()
        screen = Screen(Console(file=told, width=100), plan.steps)
        worst = compare(plan, alone, first, {**second, 9: second[9] + wrong}, 6, 4, screen)
        assert (worst <= TOLERANCE) == (wrong == 0) and verdict in told.getvalue()
    rows = list(csv.reader((tmp_path / "loss.csv").open()))
    assert rows[5] == ["5", "3.75", "3.75", "3.75"] and rows[12] == ["12", "2.0", "", "2.0"]
