"""`terrazzo view`: which page it makes of what, and what it says of what it cannot show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from ranks import run_ranks
from terrazzo.checkpoint import CheckpointManager, save
from terrazzo.cli import app
from terrazzo.launch.history import Happened, History
from view.test_steps import check_what_ran

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["view", *map(str, arguments)], env={"COLUMNS": "200"})


def data_of(path: Path) -> dict:
    text = path.read_text()
    begin = text.index('id="data">') + len('id="data">')
    return json.loads(text[begin : text.index("</script>", begin)])


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    for step, name in enumerate(("one", "two")):
        save({"w": torch.full((4,), float(step)), "step": 10 * step}, checkpoint_id=tmp_path / name)
    return tmp_path / "one", tmp_path / "two"


def test_a_checkpoint(paths, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(paths[0])
    assert done.exit_code == 0, done.output
    data = data_of(tmp_path / "terrazzo-view.html")
    assert data["kind_of_page"] == "checkpoint" and data["names"] == ["step", "w"] and not data["served"]


def test_two_checkpoints(paths, tmp_path):
    done = json.loads(run(*paths, "--out", tmp_path / "page.html", "--json").stdout)
    assert done["kind"] == "diff" and done["page"] == str(tmp_path / "page.html") and done["address"] is None
    data = data_of(tmp_path / "page.html")
    assert [row["name"] for row in data["rows"]] == ["step", "w"] and data["titles"] == [str(path) for path in paths]
    assert run(*paths, "--out", tmp_path / "page.html", "--tolerance", 1).exit_code == 0
    assert [row["name"] for row in data_of(tmp_path / "page.html")["rows"]] == ["step"]


def test_a_layout(tmp_path):
    out = tmp_path / "page.html"
    done = run(
        "--mesh", "dp=64,tp=8", "--shape", "4096,4096", "--placements", "S(0),S(1)", "--dtype", "bfloat16", "--out", out
    )
    assert done.exit_code == 0, done.output
    data = data_of(out)
    assert len(data["ranks"]) == 512 and data["itemsize"] == 2 and "bfloat16 [4096, 4096]" in data["title"]
    assert run("--mesh", "4", "--shape", "3", "--out", out).exit_code == 0
    assert data_of(out)["placements"] == ["R"]


def test_traces(tmp_path):
    run_ranks(2, check_what_ran, str(tmp_path))
    files = [tmp_path / f"rank-{rank}.json" for rank in range(2)]
    done = run(*files, "--out", tmp_path / "page.html", "--perfetto", tmp_path / "all.json")
    assert done.exit_code == 0, done.output
    data = data_of(tmp_path / "page.html")
    assert [each["rank"] for each in data["ranks"]] == [0, 1]
    assert {event["pid"] for event in json.loads((tmp_path / "all.json").read_text())["traceEvents"]} == {0, 1}
    again = tmp_path / "again"
    again.mkdir()
    for file in files:
        (again / file.name).write_bytes(file.read_bytes())
    done = run(*files, *again.iterdir(), "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    data = data_of(tmp_path / "page.html")
    assert data["steps"] == [str(tmp_path), str(again)] and [each["step"] for each in data["ranks"]] == [0, 0, 1, 1]
    assert run(files[0], files[0]).exit_code == 2
    assert run(files[0], again / files[0].name, "--perfetto", tmp_path / "all.json").exit_code == 2


def test_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.toml").write_text(
        'script = "train.py"\ncheckpoints = "steps"\n[engine]\ntrain_batch_size = 4\n'
        'csv_monitor = { enabled = true, output_path = "logs", job_name = "mine" }\n'
    )
    assert run("run.toml").exit_code == 2, "nothing has happened yet"
    with CheckpointManager(tmp_path / "steps") as manager:
        manager.save(5, {"w": torch.ones(2)}, {"loss": 2.0})
    History(tmp_path / "steps").add(Happened("started", 5.0))
    (tmp_path / "logs" / "mine").mkdir(parents=True)
    (tmp_path / "logs" / "mine" / "Train_Samples_train_loss.csv").write_text("step,train_loss\n4,3.0\n8,2.5\n")
    for named in ("run.toml", "steps"):
        assert run(named).exit_code == 0
        data = data_of(tmp_path / "terrazzo-view.html")
        assert data["kind_of_page"] == "run" and [step["step"] for step in data["runs"][0]["steps"]] == [5]
        assert data["runs"][0]["losses"] == ([[[1.0, 3.0], [2.0, 2.5]]] if named == "run.toml" else [])
    other = tmp_path / "logs" / "mine" / "Train_Samples_train_loss.csv"
    assert run("steps", "--losses", other).exit_code == 0
    assert data_of(tmp_path / "terrazzo-view.html")["runs"][0]["losses"] == [[[4.0, 3.0], [8.0, 2.5]]]
    assert run("steps", "run.toml").exit_code == 0
    data = data_of(tmp_path / "terrazzo-view.html")
    assert data["title"].startswith("steps, ") and len(data["runs"]) == 2 and data["runs"][1]["losses"]
    assert run("steps", "run.toml", "--losses", other).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "name a checkpoint"),
        (("/nowhere",), "nowhere"),
        (("one", "--mesh", "4"), "layout of its own"),
        (("one", "two", "three"), "3 checkpoints"),
        (("one", "--perfetto", "x.json"), "these are none"),
        (("--mesh", "x", "--shape", "4"), "not a dim of a mesh"),
        (("--mesh", "4"), "add --shape"),
        (("one", "--shape", "4"), "add its --mesh"),
        (("--mesh", "4", "--shape", "4", "--placements", "S(0),R"), "2 placements"),
        (("--mesh", "4", "--shape", "4", "--placements", "S(1)"), "does not exist"),
        (("--mesh", "4", "--shape", "4", "--dtype", "nn"), "no dtype"),
    ],
)
def test_what_cannot_be_shown(arguments, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 2 and told in done.output.replace("\n", " ")
    assert not (tmp_path / "terrazzo-view.html").exists()


def test_serving_until_interrupted(paths, tmp_path):
    command = [sys.executable, "-m", "terrazzo", "view", str(paths[0]), "--serve", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    signal.signal(signal.SIGINT, before)
    try:
        said = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        url = said["address"]
        assert url.startswith("http://127.0.0.1:") and said["page"] is None
        with urllib.request.urlopen(f"{url}statistics?name=w&of=0", timeout=60) as response:
            assert json.loads(response.read())["elements"] == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
