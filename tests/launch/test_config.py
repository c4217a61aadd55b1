"""The file of a run: what it may say, and what is said of mistakes in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from terrazzo.errors import LaunchError, RunConfigError
from terrazzo.launch import Run, read_run
from terrazzo.launch.config import fewer_ranks
from terrazzo.launch.entry import find
from terrazzo.launch.network import address_towards, is_here
from terrazzo.launch.torchrun import GRACE, HAS_GRACE, torchrun_arguments

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    (folder / "train.py").write_text("")
    (folder / name).write_text(text)
    return folder / name


def test_the_same_run_in_toml_and_json(tmp_path):
    toml = write(
        tmp_path, 'script = "train.py"\ncheckpoints = "c"\n[ranks]\nper_host = 2\n[engine]\ntrain_batch_size = 4'
    )
    said = {"script": "train.py", "checkpoints": "c", "ranks": {"per_host": 2}, "engine": {"train_batch_size": 4}}
    runs = [read_run(toml), read_run(write(tmp_path, json.dumps(said), "run.json"))]
    assert runs[0].config == runs[1].config
    assert runs[0].checkpoints == tmp_path / "c" and runs[0].script == tmp_path / "train.py"
    assert runs[0].latest() is None
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "latest").write_text("global_step3")
    assert runs[0].latest() == "global_step3"


class Told:
    """A stop signal that was received before step 5."""

    asked = 0

    def agreed(self) -> bool:
        self.asked += 1
        return self.asked == 5


def test_the_manager_that_a_file_describes(tmp_path):
    text = """
script = "train.py"
[checkpoints]
folder = "c"
save = { steps = 4, at = [2], first = true }
keep = { last = 1, best = 1, steps = 8 }
best = { metric = "accuracy", mode = "max" }
"""
    state = {"w": torch.zeros(2)}
    with read_run(write(tmp_path, text)).manager(Told()) as manager:
        saved = [step for step in range(1, 11) if manager.save(step, state, {"accuracy": -abs(step - 4)})]
    assert saved == [1, 2, 4, 5, 8] and manager.steps() == [4, 8] and manager.best_step() == 4
    assert manager.root == str(tmp_path / "c")
    with read_run(write(tmp_path, 'script = "train.py"\ncheckpoints = "d"')).manager(stop := Told()) as manager:
        assert [step for step in range(1, 4) if manager.save(step, state)] == [1, 2, 3] and stop.asked == 3
    with read_run(write(tmp_path, 'script = "train.py"\ncheckpoints = "d"')).manager(keep=1) as manager:
        assert manager.restore("latest", state) == 3 and manager.save(4, state)
    assert manager.steps() == [4]
    assert read_run(write(tmp_path, 'script = "train.py"\ncheckpoints = "s3://b/r"')).checkpoints == "s3://b/r"
    text = 'script = "train.py"\n[checkpoints]\nfolder = "e"\nlocal = "fast"\ncopy_every = 2\nkeep_local = 1'
    run = read_run(write(tmp_path, text))
    with run.manager() as manager:
        assert all(manager.save(step, state) for step in (1, 2, 3))
        manager.wait()
        assert manager.steps() == [2, 3] and run.latest() == "global_step3"
        assert (tmp_path / "e" / "latest").read_text() == "global_step2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "script and entry"),
        ('script = "train.py"\nentry = "a:b"', "script and entry"),
        ('script = "absent.py"', "script .*absent.py does not exist"),
        ('entry = "module"', "module:function"),
        ('script = "train.py"\nscrpit = 1', "scrpit"),
        ('script = "train.py"\n[ranks]\nper_host = 0', "per_host"),
        ('script = "train.py"\n[ranks]\nhosts = 2', "ranks.endpoint"),
        ('script = "train.py"\n[ranks]\nendpoint = "host"', "host:port"),
        ('script = "train.py"\n[checkpoints]\nkeep = 0', "checkpoints.keep"),
        ('script = "train.py"\n[checkpoints.save]\nstep = 3', "step"),
        ('script = "train.py"\n[checkpoints]\nbest = { metric = "loss", mode = "low" }', "mode"),
        ('script = "train.py"\n[engine]\ntrain_batch = 2', "engine: .*train_batch"),
        ("script = ", "not TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, said):
    with pytest.raises(RunConfigError, match=said) as caught:
        read_run(write(tmp_path, text))
    assert "run.toml" in str(caught.value)
    with pytest.raises(RunConfigError, match="cannot be read"):
        read_run(tmp_path / "absent.toml")


def test_one_host_needs_no_meeting_place(tmp_path):
    run = read_run(write(tmp_path, 'script = "train.py"\narguments = ["-x"]\n[ranks]\nper_host = 2\nrestarts = 1'))
    assert torchrun_arguments(run) == [
        "--nnodes=1", "--nproc-per-node=2", "--max-restarts=1", *([f"{GRACE}=120"] if HAS_GRACE else []),
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2", "--standalone",
        str(tmp_path / "train.py"), str(tmp_path / "run.toml"), "-x",
    ]  # fmt: skip


def test_hosts_meet_by_the_addresses_that_reach_each_other(tmp_path):
    text = 'entry = "m:f"\n[ranks]\nhosts = 2\nname = "n"\nendpoint = "127.0.0.1:29400"'
    arguments = torchrun_arguments(read_run(write(tmp_path, text)))
    assert arguments[:2] == ["--nnodes=2", "--nproc-per-node=auto"]
    assert {"--rdzv-endpoint=127.0.0.1:29400", "--rdzv-id=n", "--rdzv-conf=is_host=1"} < set(arguments)
    assert "--local-addr=127.0.0.1" in arguments and arguments[-3:-1] == ["-m", "terrazzo.launch.entry"]
    assert address_towards("[::1]:1") == "::1"
    assert not is_here("192.0.2.1:29400"), "an address that belongs to nobody"
    with pytest.raises(LaunchError, match="no-such-host.invalid"):
        is_here("no-such-host.invalid:1")


def test_fewer_ranks_and_hosts(tmp_path):
    def run_of(ranks: str, engine: str = "") -> Run:
        return read_run(write(tmp_path, f'script = "train.py"\n[ranks]\n{ranks}\n{engine}'))

    assert fewer_ranks(run_of("min_per_host = 2"), 4) == 3 and fewer_ranks(run_of("min_per_host = 2"), 2) is None
    divides = run_of("min_per_host = 1", "[engine]\ntrain_batch_size = 16")
    assert [fewer_ranks(divides, count) for count in (1, 4, 8, 9)] == [None, 2, 4, 8]
    assert fewer_ranks(run_of("min_per_host = 3", "[engine]\ntrain_batch_size = 16"), 4) is None
    assert fewer_ranks(run_of("per_host = 4"), 4) is None
    arguments = torchrun_arguments(run_of('hosts = 3\nmin_hosts = 2\nendpoint = "127.0.0.1:29400"'))
    assert arguments[0] == "--nnodes=2:3" and any("is_host=1,keep_alive_interval" in each for each in arguments)
    for ranks, said in (
        ("hosts = 2\nmin_per_host = 1\nendpoint = '127.0.0.1:29400'", "min_per_host is for one host; on 2 hosts set"),
        ("hosts = 2\nmin_hosts = 3\nendpoint = '127.0.0.1:29400'", "min_hosts must be at most 2, .*not 3"),
        ("per_host = 2\nmin_per_host = 3", "min_per_host must be at most 2, .*not 3"),
    ):
        with pytest.raises(RunConfigError, match=said):
            torchrun_arguments(run_of(ranks))


def test_an_entry_is_found_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "entry_of_this_test.py").write_text("def f(run, *arguments): return arguments")
    assert find(read_run(write(tmp_path, 'entry = "entry_of_this_test:f"')))(None, 1, 2) == (1, 2)
    for entry in ("absent_module:f", "entry_of_this_test:absent"):
        with pytest.raises(RunConfigError, match="absent"):
            find(read_run(write(tmp_path, f'entry = "{entry}"')))


@pytest.mark.parametrize("file", sorted(path.name for path in EXAMPLES.glob("*.toml")))
def test_the_examples_are_right(file):
    assert read_run(EXAMPLES / file).engine["train_batch_size"] == 16
