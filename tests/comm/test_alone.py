"""A program that no launcher started: it is a process group of one rank, and says so once."""

from __future__ import annotations

import logging
import subprocess

import pytest
import torch
import torch.distributed as dist
from torch import nn

import terrazzo.checkpoint as checkpoint
from terrazzo.engine import initialize
from terrazzo.errors import CommError
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh
from warm_python import warm_python

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
PROGRAM = """
import torch
from terrazzo.checkpoint import load, save
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh

save({"step": 1}, checkpoint_id="plain")                 # needs no process group
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
model = fully_shard(torch.nn.Linear(3, 2))
model(torch.ones(1, 3)).sum().backward()
save({"x": x, "model": model.state_dict()}, checkpoint_id="sharded")
target = {"x": torch.zeros(6)}
load(target, checkpoint_id="sharded")
print(target["x"].tolist())
"""


def said(caplog: pytest.LogCaptureFixture) -> int:
    return sum("process group of one rank" in record.getMessage() for record in caplog.records)


def test_a_program_without_a_launcher(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([warm_python(), "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]\n"
    assert done.stderr.count("process group of one rank") == 1 and "torchrun" in done.stderr


@pytest.mark.parametrize(
    "begin",
    [
        lambda: init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")),
        lambda: fully_shard(nn.Linear(2, 2)),
        lambda: initialize(nn.Linear(2, 2), config=CONFIG),
    ],
    ids=["init_device_mesh", "fully_shard", "initialize"],
)
def test_each_way_to_begin_makes_the_group(begin, caplog):
    begin()
    begin()
    assert dist.get_world_size() == 1 and said(caplog) == 1
    assert [record.levelno for record in caplog.records if record.name == "terrazzo.comm"] == [logging.WARNING]


def test_a_group_that_there_is_stays(caplog):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    init_device_mesh("cpu", (1,))
    assert dist.group.WORLD is group and said(caplog) == 0


def test_a_mesh_of_several_ranks_says_how_to_start_them():
    with pytest.raises(CommError, match=r"shape \(2, 4\) needs 8 ranks.*torchrun --nproc-per-node 8"):
        init_device_mesh("cpu", (2, 4))
    assert not dist.is_initialized()


def test_saving_makes_no_group(tmp_path):
    checkpoint.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "one")
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("PMI_SIZE", "2"),
    ],
)
def test_a_process_that_may_be_one_of_several_does_not_go_alone(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="environment variable .* expected"):  # PyTorch's
        init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match="environment variable .* expected"):
        initialize(nn.Linear(2, 2), config=CONFIG)
    with pytest.raises(ValueError, match="environment variable .* expected"):  # it joins the others, as PyTorch's
        fully_shard(nn.Linear(2, 2))
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_launcher_of_one_process_is_none(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    x = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [Shard(0)])
    assert x.to_local().tolist() == [0, 1, 2, 3]
