"""`terrazzo deepspeed`: host files, options, and ranks that are started over ssh."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from terrazzo.cli.deepspeed import ssh_command, torchrun_arguments
from terrazzo.deepspeed.env_report import report
from terrazzo.deepspeed.launcher.runner import fetch_hostfile, hosts_of, parse_args, parse_resource_filter
from terrazzo.errors import RunConfigError

SCRIPT = """
import argparse, os, sys
import torch, torch.distributed as dist
import terrazzo.deepspeed as deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--fail", type=int, default=-1)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed()
rank = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(rank)
dist.barrier()
fails = dist.get_rank() == args.fail
dist.destroy_process_group()
if args.fail >= 0:
    sys.exit(7 if fails else 0)
line = f"sum {int(rank)} local {args.local_rank} {args.deepspeed_config} {os.environ.get('UCX_MINE')}"
sys.stdout.write(line + "\\n")  # in one piece: ranks share the output
"""


def wrong(words: str, call: object, *args: object, **kwargs: object) -> None:
    with pytest.raises(RunConfigError, match=words):
        call(*args, **kwargs)  # type: ignore[operator]


def test_host_files(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\n  one slots=2\n\ntwo slots=4 # with a comment\n")
    assert fetch_hostfile(path) == {"one": 2, "two": 4} and fetch_hostfile(tmp_path / "absent") is None
    for text, words in (
        ("one slots=2\none slots=1", "line 2 .* again"),
        ("a host slots=1", "line 1 .* NAME slots=NUMBER"),
        ("one", "line 1"),
        ("#", "no host"),
    ):
        path.write_text(text)
        wrong(words, fetch_hostfile, path)
    wrong("host file .* cannot be read", fetch_hostfile, tmp_path)  # a folder
    path.write_bytes(b"one\xff slots=1")
    wrong("host file .* cannot be read", fetch_hostfile, path)


def test_which_slots_are_left():
    hosts = {"one": [0, 1, 2, 3], "two": [0, 1]}
    assert parse_resource_filter(hosts) == hosts
    assert parse_resource_filter(hosts, "two@one:3,0@one:0") == {"two": [0, 1], "one": [0, 3]}
    assert parse_resource_filter(hosts, exclude_str="two@one:3,0") == {"one": [1, 2]}
    wrong("one of them", parse_resource_filter, hosts, "one", "two")
    wrong("no host 'three'; there are one, two", parse_resource_filter, hosts, "three")
    wrong("no slot 2", parse_resource_filter, hosts, exclude_str="two:2")
    wrong("HOST:SLOT", parse_resource_filter, hosts, exclude_str="two:x")


def test_options(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("one slots=2\ntwo slots=4\n")
    start = ["-H", str(file)]

    def hosts(*options: str) -> dict[str, list[int]]:
        return hosts_of(parse_args([*start, *options, "train.py"]))

    assert hosts() == {"one": [0, 1], "two": [0, 1, 2, 3]} and hosts("--num_nodes", "1") == {"one": [0, 1]}
    assert hosts("--num_gpus", "1") == {"one": [0], "two": [0]}
    wrong("cannot be combined", hosts, "--num_gpus", "1", "-i", "one")
    wrong("--num_nodes is 3", hosts, "--num_nodes", "3")
    wrong("no host left|leaves no host", hosts, "-e", "one@two")
    wrong("no host file", hosts_of, parse_args(["-H", "absent", "train.py"]))
    assert list(hosts_of(parse_args(["--num_gpus", "3", "train.py"]))) == ["localhost"]
    args = parse_args([*start, "-i", "two:1", "--no_local_rank", "--module", "--ssh_port", "22", "m", "-x"])
    assert torchrun_arguments(args, hosts_of(args), 0) == [
        *("--nnodes=1", "--nproc-per-node=1", "--max-restarts=0", "--standalone"),
        *("-m", "terrazzo.deepspeed.launcher.launch", "module", "m", "--no_local_rank", "-x"),
    ]
    *ssh, line = ssh_command(args, hosts_of(args), 0)
    assert ssh[-3:] == ["-p", "22", "two"] and "CUDA_VISIBLE_DEVICES=1 " in line
    assert "terrazzo" in report() and "no accelerator" in report()


@pytest.mark.long
def test_ranks_over_ssh(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=1\n")
    (tmp_path / ".deepspeed_env").write_text("UCX_MINE=a b\n")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "ssh").write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')  # each host is this one
    (bin_ / "ssh").chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = [sys.executable, "-m", "terrazzo", "deepspeed", "--hostfile", "hosts", "--master_addr", "127.0.0.1"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(bin_), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [*start, "--master_port", str(port), *options]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)

    done = run("train.py", "--deepspeed", "--deepspeed_config", "ds.json")
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("sum"))
    assert said == [f"sum 6 local {local} ds.json a b" for local in (0, 0, 1)]
    failed = run("train.py", "--fail", "2")
    assert failed.returncode != 0 and "exitcode  : 7" in failed.stderr
    alone = run("--num_nodes", "1", str(Path("train.py")), "--fail", "1")
    assert alone.returncode == 7 and "rank 1 ended with status 7" in alone.stderr
