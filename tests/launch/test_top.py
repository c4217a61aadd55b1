"""`terrazzo top`, on what a run has written; tests/launch/test_train.py looks at one in progress."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner, Result

from terrazzo.checkpoint import CheckpointManager
from terrazzo.cli import app
from terrazzo.cli.screen import OUT
from terrazzo.engine.marks import Beat
from terrazzo.launch.history import History
from terrazzo.launch.live import Host, LiveFile, Pace
from terrazzo.launch.recovery import Recovery


def top(*arguments: str) -> Result:
    before, OUT.width = OUT.width, 200
    try:
        return CliRunner().invoke(app, ["top", *arguments])
    finally:
        OUT.width = before


def beats(rank: int, last: float, step: int, **more: float) -> list[Beat]:
    """Two of a rank that makes 2 steps a second."""
    return [
        msgspec.convert({"step": at_step, "at": at, "rank": rank, "process": 10 + rank, "memory": 3_000_000 + rank,
                         "samples": 8 * at_step, "tokens": 800 * at_step, "sent": 1_000, **more}, Beat)
        for at, at_step in ((last - 4, step - 8), (last, step))
    ]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One that was restarted once and has saved twice, with a rank that lags on the other host."""
    folder = tmp_path / "run"
    with CheckpointManager(folder) as manager:
        for step in (10, 20):
            manager.save(step, {"w": torch.ones(2)}, {"accuracy": step / 100})
    history = History(folder)
    history.started()
    history.went_on(Recovery(0.5, 1.0, 0.25, 0.5, 0.25))
    history.noted("rank 2 has made no step for 60 s")
    live, now = LiveFile(folder), time.time()
    for rank, loss in ((0, 2.0), (1, 3.0)):
        for beat in beats(rank, now - rank, 24 - 2 * rank, loss=loss):
            live.add(beat)
    live.write(now=True)
    other = [Pace(beats(2, now - 60, 3, loss=4.0)[1]), Pace(beats(1, now - 90, 2, loss=9.0)[1])]
    (folder / "live-other.json").write_bytes(msgspec.json.encode(Host("other", now, other)))
    for file in folder.glob("live-*.json"):  # written in the moment that they tell
        at = msgspec.json.decode(file.read_bytes(), type=Host).at
        os.utime(file, (at, at))
    (folder / "live-broken.json").write_text("{")
    return folder


def test_a_run_that_trains(run: Path) -> None:
    seen = json.loads(top(str(run), "--json").stdout)
    assert seen["state"] == "running" and (seen["starts"], seen["restarts"]) == (1, 1)
    assert seen["step"] == 24 and seen["loss"] == 3.0, "the mean over the ranks"
    assert seen["per_second"] == pytest.approx({"steps": 2.0, "samples": 16.0, "tokens": 1600.0})
    assert seen["memory"] == 3_000_002 and seen["sent"] == 1_000
    assert [(rank["rank"], rank["step"], rank["lags"]) for rank in seen["ranks"]] == [
        (0, 24, False), (1, 22, False), (2, 3, True),
    ]  # fmt: skip
    assert seen["lagging"] == [2] and seen["ranks"][2]["host"] == "other"
    assert seen["ranks"][2]["seconds_behind"] == pytest.approx(60)
    assert (seen["saves"]["count"], seen["saves"]["latest"]) == (2, "global_step20")
    assert seen["saves"]["metrics"] == {"accuracy": 0.2} and sum(seen["recovery"].values()) == 2.5
    shown = top(str(run), "--once").stdout
    for text in (
        "24, loss 3", "2 steps, 16 samples, 1,600 tokens", "3.0 MB on the fullest rank", "1.0 kB sent by a rank",
        "2, newest global_step20", "accuracy 0.2", "1, the last one took 2.5 s", "made no step for 60 s", "3, 1 lag",
    ):  # fmt: skip
        assert text in shown, shown
    assert shown.splitlines()[-3].split()[:3] == ["2", "other", "3"], "ranks that lag come first"


@pytest.mark.parametrize("ahead", [0.0, 3600.0, -3600.0])
def test_hosts_whose_clocks_differ_are_compared(run: Path, ahead: float) -> None:
    other = [Pace(beats(2, time.time() + ahead - 2, 23)[1])]
    (run / "live-other.json").write_bytes(msgspec.json.encode(Host("other", time.time() + ahead, other)))
    seen = json.loads(top(str(run), "--json").stdout)
    assert [rank["host"] for rank in seen["ranks"]][2] == "other" and seen["lagging"] == []
    assert 0 <= seen["ranks"][2]["seconds_behind"] < 60 and abs(seen["news"] - time.time()) < 60


def test_interrupted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("terrazzo.cli.top.time.sleep", interrupted)
    shown = top(str(run))
    assert shown.exit_code == 130 and "running" in shown.stdout and shown.stderr == ""


def test_a_run_that_has_ended_and_one_that_has_not_begun(run: Path, tmp_path: Path) -> None:
    History(run).ended(137, "rank 0 was killed by SIGKILL")
    ended = top(str(run))  # without --once, too
    assert ended.exit_code == 0 and "ended: rank 0 was killed by SIGKILL" in ended.stdout
    History(run).started()
    assert json.loads(top(str(run), "--json").stdout)["state"] == "running"
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.toml").write_text('script = "train.py"')
    seen = json.loads(top(str(tmp_path / "run.toml"), "--json").stdout)
    assert (seen["state"], seen["step"], seen["saves"]["count"], seen["ranks"]) == ("not started", None, 0, [])
    assert "not started" in top(str(tmp_path / "run.toml"), "--once").stdout
    (tmp_path / "run.toml").write_text('script = "train.py"\ncheckpoints = "s3://bucket/run"')
    for what, said in (("run.toml", "is a URL"), ("absent", "does not exist")):
        wrong = top(str(tmp_path / what))
        assert wrong.exit_code == 2 and said in wrong.output
