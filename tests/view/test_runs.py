"""A run: its checkpoints, its starts and restarts, and the loss across them."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
import torch

from terrazzo.checkpoint import CheckpointManager
from terrazzo.checkpoint.manager import Keep
from terrazzo.errors import ViewError
from terrazzo.launch.history import NAME, Happened, History, read_history
from terrazzo.launch.recovery import Recovery
from terrazzo.view import Page
from terrazzo.view.data.run_data import run_data, runs_data, segments_of
from view.chromium import chromium, opened, texts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints, a start, a restart and an end; and the loss of both starts."""
    folder = tmp_path / "run"
    state = {"w": torch.ones(8)}
    with CheckpointManager(folder, keep=Keep(last=2, steps=10), best="loss") as manager:
        for step, loss in ((10, 2.5), (20, float("nan")), (30, 2.0)):
            manager.save(step, state, {"loss": loss, "<b>": 1.0})
    history = History(folder)
    history.add(Happened("started", 1_700_000_000.0))
    history.add(Happened("went on", 1_700_000_100.0, {"detect": 0.5, "start": 5.0, "first_step": 0.25}))
    history.add(Happened("ended", 1_700_000_200.0, status=137, why="rank 1 was killed by SIGKILL"))
    with open(folder / "loss.csv", "w", newline="") as file:
        rows = csv.writer(file)
        for first, last in ((1, 26), (21, 31)):
            rows.writerow(["step", "train_loss"])
            rows.writerows([8 * step, 3 - step / 30] for step in range(first, last))
    return folder


def test_what_a_run_says(run):
    data = run_data(run, losses=run / "loss.csv", samples_per_step=8)
    assert [step["step"] for step in data["steps"]] == [10, 20, 30] and data["latest"] == "global_step30"
    assert [step["metrics"]["loss"] for step in data["steps"]] == [2.5, "nan", 2.0]
    assert "best by loss" in data["steps"][2]["kept"] and data["steps"][0]["bytes"] == 32
    assert [each["what"] for each in data["history"]] == ["started", "went on", "ended"]
    assert [[at for at, _ in segment][:: len(segment) - 1] for segment in data["losses"]] == [[1, 25], [21, 30]]
    json.dumps(data, allow_nan=False)
    by_samples = run_data(run, losses=run / "loss.csv")
    assert not by_samples["by_step"] and by_samples["losses"][1][0][0] == 168


def test_what_is_no_run(tmp_path):
    with pytest.raises(ViewError, match="not a run's folder"):
        run_data(tmp_path)
    with pytest.raises(ViewError, match="line 2"):
        segments_of(["step,loss", "1,x"], "x.csv")
    with pytest.raises(ViewError, match="line 1"):
        segments_of(["1"], "x.csv")
    assert segments_of(["step,loss", "step,loss", "1,nan"], "x.csv")[0][0][0] == 1.0


def test_a_history_waits_for_its_folder(tmp_path):
    history = History(tmp_path / "later")
    history.started()
    assert not (tmp_path / "later").exists(), "only a run makes its folder"
    (tmp_path / "later").mkdir()
    history.went_on(Recovery(0.5, 5.0, 0.1, 1.0, 0.25))
    history.ended(0, "")
    found = read_history(tmp_path / "later")
    assert [each.what for each in found] == ["started", "went on", "ended"]
    assert sum(found[1].seconds.values()) == pytest.approx(6.85) and found[0].at <= found[1].at
    with open(tmp_path / "later" / NAME, "ab") as file:
        file.write(b'{"what": "unknown"}\nnonsense\n{"what": "ended", "at"')
    assert len(read_history(tmp_path / "later")) == 3, "what cannot be read is left out"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_history_that_cannot_be_written_stops_nothing(tmp_path):
    tmp_path.chmod(0o500)
    History(tmp_path).started()
    assert read_history(tmp_path) == []


def test_the_page_of_a_run(run, tmp_path):
    Page(runs_data([run_data(run, losses=run / "loss.csv", samples_per_step=8)])).save(tmp_path / "page.html")
    with chromium() as browser, opened(browser, tmp_path / "page.html") as page:
        assert texts(page, "h3")[:2] == ["loss across 2 starts", "loss of checkpoints"]
        assert page.locator('[data-title="loss across 2 starts"] .series path').count() == 2
        assert page.locator('[data-title="loss across 2 starts"] .mark').count() == 4, "three saves and a start"
        steps = [row.split() for row in texts(page, "table.steps tbody tr")]
        assert len(steps) == 3 and steps[2][0].startswith("global_step30")
        assert "latest" in texts(page, "table.steps tbody tr")[2]
        assert "after 5.75 s: detect 0.5, start 5.0, first step 0.3" in texts(page, "table.history tbody tr")[1]
        assert "rank 1 was killed by SIGKILL" in texts(page, "table.history tbody tr")[2]
        assert "<b>" in texts(page, "table.steps th")
        chart = page.locator('[data-title="loss across 2 starts"]')
        box = chart.locator(".series path").first.bounding_box()
        page.mouse.click(box["x"], box["y"])
        assert texts(page, ".said")[0].startswith("start 1: loss 2.9") and "at step 1" in texts(page, ".said")[0]
        page.get_by_label("smooth").fill("0.5")
        assert chart.locator(".series path").count() == 4, "the lines, and smooth ones on them"
        page.get_by_label("smooth").fill("0")
        page.get_by_role("button", name="start 2").click()
        assert chart.locator(".series path").count() == 1, "a click in the legend hides it"


def test_several_runs_beside_each_other(run, tmp_path):
    one = run_data(run, losses=run / "loss.csv", samples_per_step=8, title="one")
    two = run_data(run, losses=run / "loss.csv", samples_per_step=4, title="two")
    by_samples = run_data(run, losses=run / "loss.csv", title="<i>three</i>")
    Page(runs_data([one, two, by_samples])).save(tmp_path / "page.html")
    with (
        chromium() as browser,
        opened(browser, tmp_path / "page.html", viewport={"width": 1600, "height": 900}) as page,
    ):
        assert texts(page, "h1") == ["one, two, <i>three</i>"]
        assert [text.strip() for text in texts(page, "table.summary th")] == ["", "one", "two", "<i>three</i>"]
        assert page.locator('[data-title="loss of 2 runs"] .series path').count() == 4, "two starts of each, by steps"
        assert page.locator('[data-title="loss of 1 run"] .series path').count() == 2, (
            "by samples, on an axis of its own"
        )
        sections = [page.locator("section.run").nth(number).bounding_box() for number in range(3)]
        assert len({section["y"] for section in sections}) == 1, "they stand beside each other"
        assert sections[0]["x"] + sections[0]["width"] <= sections[1]["x"]
