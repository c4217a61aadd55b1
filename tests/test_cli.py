"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner, Result

import terrazzo
from terrazzo.checkpoint import CheckpointManager, load, save
from terrazzo.checkpoint.manager import Keep
from terrazzo.cli import app, doctor
from terrazzo.cli.lazy import starting
from terrazzo.cli.screen import OUT, progress
from terrazzo.launch.torchrun import GRACE, HAS_GRACE

STATE = {"model": {"layers.2.w": torch.arange(12.0).reshape(3, 4), "layers.10.w": torch.ones(5).bfloat16()}, "step": 7}


@pytest.fixture
def path(tmp_path: Path) -> str:
    save(STATE, checkpoint_id=tmp_path / "one")
    return str(tmp_path / "one")


def run(*arguments: str) -> Result:
    """A command on a wide terminal; the console takes its width when it is imported, perhaps by an earlier test."""
    before, OUT.width = OUT.width, 200
    try:
        return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    finally:
        OUT.width = before


def test_ls(path: str) -> None:
    lines = run("ls", path).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["model.layers.2.w", "model.layers.10.w", "step"]
    assert "float32" in lines[1] and "3 x 4" in lines[1] and "48 bytes" in lines[1]
    assert lines[-1] == "3 values, 58 bytes"
    document = json.loads(run("ls", path, "*.w", "--json").stdout)
    assert document["ranks"] == 1 and document["bytes"] == 58
    assert document["values"][0] == {
        "name": "model.layers.2.w", "dtype": "float32", "shape": [3, 4], "bytes": 48, "parts": 1,
    }  # fmt: skip


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ls_of_names_that_are_not_there(path: str, options: list[str]) -> None:
    found = run("ls", path, "layers.2", *options)
    output = " ".join(found.output.split())
    assert found.exit_code == 2 and "matches 'layers.2'" in output and "similar names are model.layers.2.w" in output
    save({}, checkpoint_id=Path(path, "empty"), no_dist=True)
    assert run("ls", str(Path(path, "empty")), *options).exit_code == 0


def test_names_that_are_nearly_right(path: str) -> None:
    found = run("show", path, "modle.layers.2.w")
    assert found.exit_code == 2 and "did you mean model.layers.2.w?" in " ".join(found.output.split())
    folder, name = Path(path).parent, Path(path).name
    (folder / "run.toml").write_text('script = "trian.py"')
    (folder / "train.py").touch()
    said = f"; did you mean {name}?"
    for command, expected in (
        (["verfy", path], "no command 'verfy'; did you mean verify?"),
        (["ls", path[:-1]], said),
        (["verify", path + "x"], said),
        (["diff", path, path + "x"], said),
        (["view", path + "x", "--out", "page.html"], said),
        (["convert", path, str(folder / "new"), "--to", "dpc"], "; did you mean dcp?"),
        (["top", path + "x"], said),
        (["train", str(folder / "rnu.toml")], "; did you mean run.toml?"),
        (["train", str(folder / "run.toml")], "; did you mean train.py?"),
        (["run", str(folder / "trian.py")], "; did you mean train.py?"),
        (["ops", "embeding"], "; did you mean embedding?"),
        (["ops", "embeding", "--json"], "; did you mean embedding?"),
    ):
        found = run(*command)
        assert found.exit_code == 2 and expected in " ".join(found.output.split()), (command, found.output)


def test_ls_of_a_run(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=Keep(last=1, steps=20), best="loss") as manager:
        for step, loss in ((10, 0.5), (20, 0.25), (30, 4.0), (40, float("nan"))):
            manager.save(step, STATE, {"loss": loss, "[bold]": 1} if step < 40 else {"loss": loss})
    lines = run("ls", str(tmp_path)).stdout.splitlines()
    assert lines[0].split() == ["name", "saved", "size", "loss", "[bold]", "kept"]
    assert [line.split()[0] for line in lines[1:3]] == ["global_step20", "global_step40"]
    assert "58 bytes" in lines[1] and "0.25" in lines[1] and lines[1].rstrip().endswith("every 20 steps, best by loss")
    assert "nan" in lines[2] and lines[2].rstrip().endswith("last 1, every 20 steps, newest, latest")
    assert lines[-1] == "2 steps; latest is global_step40"
    document = json.loads(run("ls", str(tmp_path), "--json").stdout)
    assert document["latest"] == "global_step40" and [row["step"] for row in document["steps"]] == [20, 40]
    assert document["steps"][0]["metrics"] == {"loss": 0.25, "[bold]": 1.0} and document["steps"][0]["bytes"] == 58
    values = json.loads(run("ls", str(tmp_path), "*.w", "--json").stdout)["values"]
    assert [row["name"] for row in values] == ["model.layers.2.w", "model.layers.10.w"]
    (tmp_path / "kept.json").write_text("[")
    (tmp_path / "latest").write_text("../x")
    assert "2 steps; latest is none" in run("ls", str(tmp_path)).stdout


def test_show(path: str) -> None:
    printed = run("show", path, "model.layers.2.w").stdout
    assert "[3, 4]" in printed and "[0.0, 1.0, 2.0, 3.0]" in printed and "[0:3, 0:4]" in printed
    assert "data-" in printed
    assert run("show", path, "step").stdout.strip() == "7"
    document = json.loads(run("show", path, "model.layers.2.w", "--json").stdout)
    assert document["chunks"][0]["lengths"] == [3, 4] and document["first"] == [0, 1, 2, 3]
    wrong = run("show", path, "layers.2")
    assert wrong.exit_code == 2 and "model.layers.2.w" in wrong.output


def test_verify(path: str) -> None:
    assert run("verify", path).exit_code == 0
    (file,) = Path(path).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    damaged = run("verify", path)
    assert damaged.exit_code == 1 and "model.layers.10.w" in damaged.output and file.name in damaged.output
    (damage,) = json.loads(run("verify", path, "--json").stdout)["damage"]
    assert damage["name"] == "model.layers.10.w"


def test_diff(path: str, tmp_path: Path) -> None:
    assert run("diff", path, path).exit_code == 0
    changed = {"w": torch.ones(2), "i": torch.tensor([2**60]), "n": torch.tensor([float("nan"), 1.0]), "step": 8}
    changed |= {"nan": torch.tensor([float("nan"), 1.0]), "nans": torch.tensor([float("nan"), 1.0])}
    other = {"w": torch.ones(3), "i": torch.tensor([2**60 + 1]), "n": torch.tensor([float("nan"), 1.5]), "new": None}
    other |= {"nan": torch.tensor([0.0, 1.0]), "nans": torch.tensor([0.0, 3.0])}
    save(changed, checkpoint_id=tmp_path / "a")
    save(other, checkpoint_id=tmp_path / "b")
    result = run("diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json")
    assert result.exit_code == 1
    found = {entry["name"]: entry["what"] for entry in json.loads(result.stdout)["differences"]}
    assert found.keys() == {"w", "i", "n", "step", "new", "nan", "nans"}
    assert found["nan"] == "1 of 2 elements differ: nan in one of the two"
    assert found["nans"] == "2 of 2 elements differ, by up to 2; in 1 of them one of the two is nan"
    assert "1 of 2 elements differ, by up to 0.5" in found["n"] and found["step"] == "only in the first"
    both = str(tmp_path / "a"), str(tmp_path / "b")
    result = run("diff", *both, "--tolerance", "0.5", "--json")
    close = {entry["name"] for entry in json.loads(result.stdout)["differences"]}
    assert "n" not in close and "i" in close  # integers that float64 cannot tell apart
    assert run("diff", *both, "--tolerance", "1", "--only", "i").exit_code == 0
    for wrong in ("nan", "-1"):
        refused = run("diff", *both, "--tolerance", wrong)
        assert refused.exit_code != 0 and "must be a number that is not negative" in refused.output


def test_diff_of_steps_of_a_run(tmp_path: Path) -> None:
    nan = torch.tensor([float("nan"), 1.0])
    with CheckpointManager(tmp_path, keep=9) as manager:
        layers = {f"layers.{n}": {"w": torch.zeros(2, 3), "b": torch.zeros(2)} for n in (2, 10)}
        manager.save(1, {"model": layers, "step": 1}, {"loss": 0.5})
        manager.save(2, {"model": layers, "step": 1}, {"loss": 0.25})
        layers["layers.10"] = {"w": torch.tensor([[0.5, 0, 0], [0, -2.0, 0]]), "b": torch.zeros(2)}
        layers["layers.2"] = {"w": torch.zeros(2, 3), "b": nan}
        manager.save(3, {"model": layers, "step": 2}, {"loss": 0.25})
    one, two, three = (str(tmp_path / f"global_step{step}") for step in (1, 2, 3))
    same = run("diff", one, two)
    assert same.exit_code == 0 and "no difference" in same.stdout  # but for the manager's record
    record = run("diff", one, two, "--only", "checkpoint_manager")
    assert record.exit_code == 1 and "0.5" in record.stdout
    names = json.loads(run("diff", one, three, "--only", "model.*", "--json").stdout)["differences"]
    assert [each["name"] for each in names] == ["model.layers.2.b", "model.layers.10.w"]
    assert run("diff", one, three, "--only", "*.layers.10.b").exit_code == 0
    assert run("diff", one, three, "--only", "nothing*").exit_code == 2
    summary = run("diff", one, three, "--summary")
    assert summary.exit_code == 1
    rows = [line.split() for line in summary.stdout.splitlines()]
    assert ["model.layers.2", "1", "2", "2", "1"] in rows or ["model.layers.2", "1", "2", "2", "nan"] in rows
    assert ["model.layers.10", "1", "2", "6", "2"] in rows and rows[-1] == ["3", "differences"]
    modules = json.loads(run("diff", one, three, "--summary", "--json").stdout)["modules"]
    assert [(each["module"], each["values"]) for each in modules] == [
        ("model.layers.2", 1),
        ("model.layers.10", 1),
        ("", 1),
    ]


def test_convert(path: str, tmp_path: Path) -> None:
    file, back = str(tmp_path / "x.pt"), str(tmp_path / "back")
    assert run("convert", path, file, "--to", "torch_save").exit_code == 0
    assert torch.equal(torch.load(file)["model"]["layers.2.w"], STATE["model"]["layers.2.w"])
    done = json.loads(run("convert", file, back, "--json").stdout)
    assert done == {"source": file, "target": back, "format": "native", "bytes": 58}
    target = {"model": {"layers.2.w": torch.zeros(3, 4)}}
    load(target, checkpoint_id=back)
    assert torch.equal(target["model"]["layers.2.w"], STATE["model"]["layers.2.w"])
    again = run("convert", file, back)
    assert again.exit_code == 2 and "overwrite" in again.output
    assert run("diff", path, back).exit_code == 0


@pytest.mark.parametrize("command", ["ls", "show", "verify", "diff", "convert", "view"])
def test_on_a_terminal_nothing_is_silent_while_names_are_read(
    command: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = StringIO()
    monkeypatch.setattr("terrazzo.cli.screen.ERR", Console(file=terminal, force_terminal=True, width=100))
    monkeypatch.setattr("terrazzo.cli.screen._MOMENT", 0.01)

    def slowly(opens: Callable[[str], Any]) -> Callable[[str], Any]:
        def opened(place: str) -> Any:
            limit = time.monotonic() + 60
            while "0:00:0" not in terminal.getvalue():
                assert time.monotonic() < limit, "nothing is shown"
                time.sleep(0.01)
            return opens(place)

        return opened

    module = importlib.import_module(f"terrazzo.cli.{command if command in ('convert', 'view') else 'inspect'}")
    opens = "listing_of" if hasattr(module, "listing_of") else "Checkpoint"
    monkeypatch.setattr(module, opens, slowly(getattr(module, opens)))
    more = {
        "show": ["model.layers.2.w"],
        "diff": [path],
        "convert": [str(tmp_path / "out")],
        "view": ["--out", str(tmp_path / "page.html")],
    }
    assert run(command, path, *more.get(command, [])).exit_code == 0
    assert terminal.getvalue().rstrip().endswith("\x1b[2K"), "what was shown is removed at the end"


def test_progress_has_numbers_and_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = StringIO()
    monkeypatch.setattr("terrazzo.cli.screen.ERR", Console(file=terminal, force_terminal=True, width=100))
    monkeypatch.setattr("terrazzo.cli.screen._MOMENT", 0.01)
    with progress("copying") as bar:
        bar.of(2_000_000)
        limit = time.monotonic() + 60
        while not re.search(
            r"copying .*[0-9.]+/2\.0 MB.* [kM]?B/s", re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
        ):
            assert time.monotonic() < limit, terminal.getvalue()
            bar.advance(1000)
            time.sleep(0.01)


def test_errors_are_one_line_and_status_two(tmp_path: Path) -> None:
    for command in (["ls"], ["verify"], ["show", "x"]):
        result = run(command[0], str(tmp_path / "absent"), *command[1:])
        assert result.exit_code == 2 and result.output.startswith("error: ")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_enough_gets_no_error(path: str, options: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "terrazzo", "ls", path, *options]
    with os.fdopen(writes) as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_folder_of_checkpoints_is_not_one_but_names_them(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")
    for step in (9, 10):
        save({"step": step}, checkpoint_id=tmp_path / f"step{step}")
    found = run("ls", str(tmp_path))
    assert found.exit_code == 2
    assert found.output.endswith(f"; but there is one at {tmp_path / 'step10'} (also step9)\n")
    shutil.rmtree(tmp_path / "step9")
    assert run("ls", str(tmp_path)).output.endswith(f"; but there is one at {tmp_path / 'step10'}\n")
    shutil.rmtree(tmp_path / "step10")
    assert "but there is one" not in run("ls", str(tmp_path)).output
    save({"step": 1}, checkpoint_id=tmp_path / "runs" / "mine" / "step1")  # deeper
    for folder in (tmp_path, tmp_path / "runs"):
        nested = tmp_path / "runs" / "mine" / "step1"
        assert run("ls", str(folder)).output.endswith(f"; but there is one at {nested}\n")


def test_misspelt_values_of_options_and_a_program_for_a_run(path: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    for command, said in (
        (["view", "--mesh", "dp=2", "--shape", "4,4", "--dtype", "flaot32"], "did you mean float32?"),
        (["convert", path, str(tmp_path / "x"), "--to", "safetensors", "--only", "modle"], "did you mean model?"),
        (["train", str(tmp_path / "train.py")], "run.toml with script = 'train.py'"),
    ):
        shown = run(*command)
        assert shown.exit_code == 2 and said in shown.output, shown.output


def test_train_shows_the_line_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "run.toml").write_text('script = "train.py"\narguments = ["a b"]\n[ranks]\nper_host = 4')
    shown = run("train", str(tmp_path / "run.toml"), "--show", "--per-host", "2", "--restarts", "1")
    assert shown.exit_code == 0
    again = run("train", str(tmp_path / "run.toml"), "--show", "--json", "--per-host", "2", "--restarts", "1")
    assert json.loads(again.stdout)["command"] == shlex.split(shown.stdout)
    line = shlex.split(shown.stdout)
    assert line[line.index("torchrun") + 1 :] == [
        "--nnodes=1", "--nproc-per-node=2", "--max-restarts=1", *([f"{GRACE}=120"] if HAS_GRACE else []),
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2", "--standalone",
        str(tmp_path / "train.py"), str(tmp_path / "run.toml"), "a b",
    ]  # fmt: skip


def test_what_cannot_be_started_is_one_line_and_status_two(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[ranks]\nhosts = 0")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for command in (
        ["train", str(tmp_path / "absent.toml")],
        ["train", str(tmp_path / "run.toml")],
        ["demo", "--out", str(tmp_path / "out")],
    ):
        result = run(*command)
        assert result.exit_code == 2 and result.output.startswith("error: ") and len(result.output.splitlines()) == 1


def test_the_shell_completes_commands() -> None:
    words = {"COMP_WORDS": "terrazzo ver", "COMP_CWORD": "1", "_TERRAZZO_COMPLETE": "complete_bash"}
    found = subprocess.run(
        [sys.executable, "-m", "terrazzo"], capture_output=True, text=True, timeout=120, env=os.environ | words
    )
    assert found.stdout.split() == ["verify"], found.stderr


def test_texts_name_commands_that_are_there() -> None:
    root = Path(__file__).parents[1]
    there = set(get_command(app).list_commands(None))  # type: ignore[attr-defined, arg-type]
    texts = [*(root / "src").rglob("*.py"), *(root / "docs").rglob("*.md"), root / "README.md"]
    named = {word: str(path) for path in texts for word in re.findall(r"`terrazzo ([a-z]+)", path.read_text())}
    assert len(named) > 5 and not {word: path for word, path in named.items() if word not in there}
    table = (root / "docs" / "api" / "commands.md").read_text()
    assert there <= set(re.findall(r"^\| `terrazzo ([a-z]+)", table, re.MULTILINE))


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {each["check"]: each for each in json.loads(run("doctor", "--json").stdout)}
    assert found["pytorch"]["found"] == str(torch.__version__) and found["terrazzo"]["found"] == terrazzo.__version__
    assert found["store and gloo"] == {"check": "store and gloo", "found": "two ranks met and added", "mend": ""}
    monkeypatch.setattr("resource.getrlimit", lambda which: (100, 5000))
    monkeypatch.setattr("socket.gethostbyname", _fails)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    monkeypatch.setenv("TERRAZZO_INSTALL", "1")  # too late: this Python has started without it
    shown = run("doctor")
    assert shown.exit_code == 1 and "-> raise it before training: ulimit -n 5000" in shown.output
    assert (
        "-> ranks of several hosts find each other by name" in shown.output
        and "there is no nothing0: unset it" in shown.output
    )
    assert "-> raise it before training: ulimit -u 5000" in shown.output
    found = int(shown.output.splitlines()[-1].split(" of ")[0])
    assert found == sum(line.startswith("!") for line in shown.output.splitlines()) >= 5
    assert "TERRAZZO_INSTALL    set: no effect" in shown.output and "-> install terrazzo with pip" in shown.output
    monkeypatch.setattr("sys.meta_path", [type("WithTorch", (), {})(), *sys.meta_path])
    assert "TERRAZZO_INSTALL    set: programs that import PyTorch's names get terrazzo's" in run("doctor").output


def test_doctor_on_a_machine_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only root can raise, a port that is taken, a folder that is a file, one for which nothing is set up."""
    monkeypatch.setattr("resource.getrlimit", lambda which: (100, 100))
    monkeypatch.setattr("tempfile.gettempdir", _no_folder)
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr("terrazzo.cli.doctor._PORT", taken.getsockname()[1])
        shown = run("doctor", str(tmp_path / "file"), str(tmp_path / "new" / "run"), "--json")
    mend = {each["check"]: each["mend"] for each in json.loads(shown.stdout)}
    assert shown.exit_code == 1
    assert mend["open files"].startswith("only root can raise it above 100") and "nproc=" in mend["processes"]
    assert "--standalone" in mend["torchrun's port"] and "set TMPDIR" in mend["temporary files"]
    assert "name a folder in which this user can write" in mend[str(tmp_path / "file")]
    assert mend[str(tmp_path / "new" / "run")] == "" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("shm", "needed", "found", "mend"),
    [
        ("absent", 1, "missing", "mount it"),
        ("", 1 << 60, "GiB free", "docker run --shm-size=8g"),
        ("", 1, "GiB free", ""),
    ],
)
def test_doctor_and_shared_memory(
    shm: str, needed: int, found: str, mend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_SHM", tmp_path / shm)
    monkeypatch.setattr(doctor, "_SHARED", needed)
    (finding,) = [each for each in doctor._limits() if each.check == "/dev/shm"]
    assert found in finding.found and mend in finding.mend and bool(mend) == bool(finding.mend)


def test_doctor_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    assert doctor._nccl() == []
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert "built with NCCL" in doctor._nccl()[0].mend
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", _fails)
    assert doctor._nccl()[0].found == "cannot be loaded: no address" and "libnccl.so.2" in doctor._nccl()[0].mend
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 29, 7))
    assert doctor._nccl()[0].found.startswith("2.29.7") and not doctor._nccl()[0].mend


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"])
def test_doctor_and_interfaces_that_are_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, absent in (("nothing0,nothing1", "nothing0, nothing1"), ("=nothing", "nothing"), ("^nothing", "")):
        monkeypatch.setenv(variable, value)
        found = [each for each in doctor._network() if each.check == variable]
        if absent and (value[0] != "=" or "NCCL" in variable):
            assert f"there is no {absent}: unset it, or name what is there (" in found[0].mend
        elif "NCCL" in variable:
            assert not found


def _no_folder() -> str:
    raise FileNotFoundError("no usable temporary directory")


def _fails(*_: object) -> None:
    raise OSError("no address")


def test_ops() -> None:
    printed = run("ops", "softmax").stdout
    assert "rule" in printed and "terrazzo/tensor/ops/norms.py:" in printed and "aten::softmax.int" in printed
    rows = {row["name"]: row for row in json.loads(run("ops", "--json").stdout)}
    assert rows["mm"]["how"] == "rule" and rows["mm"]["alias"] == "new" and rows["mm"]["otherwise"] == "replicate"
    assert rows["contiguous"]["alias"] == "same" and rows["transpose"]["alias"] == "view"
    assert rows["uniform_"]["how"] == "handler" and rows["glu"]["how"] == "decomposition"
    assert rows["tile"]["how"] == "body" and rows["histc"]["how"] == "replicate"
    for row in rows.values():
        if row["where"]:
            file, line = row["where"].split(":")
            source = (Path(__file__).parents[1] / "src" / file).read_text().splitlines()
            assert source[int(line) - 1].lstrip().startswith(("@", "def ")), row
    views = ("t", "H", "mT", "__getitem__", "view", "transpose", "unbind")
    assert {rows[name]["alias"] for name in views} == {"view"} and not rows["__getitem__"]["schema"]
    assert run("ops", "no such thing").exit_code == 2


def test_help_and_version_without_waiting_for_torch() -> None:
    script = (
        "import sys\nfrom terrazzo.cli import main\nsys.argv = ['terrazzo', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'numpy', 'rich', 'terrazzo.checkpoint'} & set(sys.modules)"
    )
    for option in ("--help", "--version"):
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src"), "COLUMNS": "100"}
        done = subprocess.run([sys.executable, "-c", script, option], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        if option == "--version":
            assert done.stdout == f"terrazzo {terrazzo.__version__} (PyTorch {torch.__version__.split('+')[0]})\n" or (
                done.stdout.startswith(f"terrazzo {terrazzo.__version__} (PyTorch 2.")
            )
        else:
            lines = [line.split("  ")[1:] for line in done.stdout.partition("Commands:")[2].splitlines() if line]
            assert ["verify CHECKPOINT", "is every byte the one that was saved?"] == [p.strip() for p in lines[2] if p]


def test_the_module_is_the_command_and_every_command_has_help() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "terrazzo", "--version"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and done.stdout.startswith("terrazzo ")
    names = [line.split()[0] for line in run("--help").stdout.partition("Commands:")[2].splitlines() if line]
    assert {"ls", "convert", "ops", "train", "demo"} <= set(names)
    for name in names:
        shown = run(name, "--help")
        assert shown.exit_code == 0 and f"{name} [OPTIONS]" in shown.stdout
    assert run("no-such-command").exit_code == 2


def test_a_word_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        said = threading.Event()

        def isatty(self) -> bool:
            return True

        def flush(self) -> None:
            self.said.set()

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with starting("terrazzo view"):
        assert terminal.said.wait(60)
        assert terminal.getvalue() == "starting terrazzo view ...\r"
    assert terminal.getvalue().endswith("\r\x1b[2K")  # nothing stays
    monkeypatch.setattr(sys, "stderr", quick := Terminal())
    with starting("terrazzo ls"):
        pass
    assert quick.getvalue() == ""
