"""Arguments of another kind than asked for, and names that are nearly right: what was given, and what to write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp as theirs

from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, CheckpointManager, load, save
from terrazzo.engine import initialize
from terrazzo.errors import (
    CheckpointException,
    CheckpointMismatchError,
    CheckpointNameError,
    CheckpointNotFoundError,
    CommError,
    DTensorTypeError,
    EngineConfigError,
    FSDPTypeError,
    UnsupportedValueError,
)
from terrazzo.fsdp import fully_shard
from terrazzo.tensor import DTensor, Shard, distribute_module, distribute_tensor, init_device_mesh, rand, zeros
from terrazzo.testing import all_ranks


def check_meshes_and_placements() -> None:
    mesh = init_device_mesh("cpu", (1,))
    x = torch.ones(2)
    for call in (
        lambda: distribute_tensor(x, "cpu", [Shard(0)]),
        lambda: distribute_tensor(x, [0, 1], [Shard(0)]),
        lambda: distribute_tensor(x, mesh, [Shard(0)]).redistribute("cpu", [Shard(0)]),
        lambda: DTensor.from_local(x, "cpu", [Shard(0)]),
        lambda: distribute_module(torch.nn.Linear(2, 2), "cpu"),
        lambda: rand(2, device_mesh="cpu", placements=[Shard(0)]),
    ):
        with pytest.raises(DTensorTypeError, match=r"a mesh is a DeviceMesh, not .*init_device_mesh"):
            call()
    with pytest.raises(FSDPTypeError, match="mesh is a DeviceMesh, not 'cpu'"):
        fully_shard(torch.nn.Linear(2, 2), mesh="cpu")
    for options, said in (
        ({"mp_policy": torch.bfloat16}, r"write MixedPrecisionPolicy\(param_dtype=torch.bfloat16\)"),
        ({"mp_policy": None}, "mp_policy is a MixedPrecisionPolicy, not None"),
        ({"offload_policy": True}, r"offload_policy is an OffloadPolicy, not True: write CPUOffloadPolicy\(\)"),
    ):
        with pytest.raises(FSDPTypeError, match=said):
            fully_shard(torch.nn.Linear(2, 2), mesh=mesh, **options)  # type: ignore[call-overload]
    for options in ({}, {"offload_policy": theirs.OffloadPolicy()}, {"mp_policy": theirs.MixedPrecisionPolicy()}):
        fully_shard(torch.nn.Linear(2, 2), mesh=mesh, **options)  # type: ignore[call-overload]
    for device, shape, said in (
        ("gpu", (1,), "there is no type of devices 'gpu': write 'cpu'"),
        ("cpu", 1, r"a mesh's shape is a tuple of how many ranks each dim has, as \(4,\) or \(2, 4\), not 1"),
    ):
        with pytest.raises(CommError, match=said):
            init_device_mesh(device, shape)  # type: ignore[arg-type]
    for call in (
        lambda: distribute_tensor(x, mesh, Shard(0)),
        lambda: distribute_tensor(x, mesh, [Shard(0)]).redistribute(mesh, Shard(0)),
        lambda: DTensor.from_local(x, mesh, Shard(0)),
        lambda: zeros(2, device_mesh=mesh, placements=Shard(0)),
    ):
        with pytest.raises(DTensorTypeError, match=r"write \[Shard\(dim=0\)\]"):
            call()
    for call in (
        lambda: distribute_tensor([1.0], mesh, [Shard(0)]),
        lambda: DTensor.from_local([1.0], mesh, [Shard(0)]),
    ):
        with pytest.raises(DTensorTypeError, match="takes a tensor, not list"):
            call()


def test_meshes_and_placements() -> None:
    run_ranks(1, check_meshes_and_placements)


def test_a_checkpoint_is_not_the_folder_of_a_run(tmp_path: Path) -> None:
    """No step would be found in it, and training would begin anew."""
    save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "run" / "global_step8")
    where = tmp_path / "run" / "global_step8"
    with pytest.raises(CheckpointException, match=f"{where} is a checkpoint itself, and not the folder of a run"):
        CheckpointManager(where)
    optimizer = {"type": "SGD", "params": {"lr": 1.0}}
    engine = initialize(torch.nn.Linear(2, 2), config={"train_batch_size": 1, "optimizer": optimizer})
    with pytest.raises(CheckpointException, match=f"{where} is a checkpoint itself, and not the folder of a run"):
        engine.load_checkpoint(where)


def test_a_config_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"train_batch_size": 2,,}')
    for config, said in (
        ([1], "a config is a dict, JSON or the path of a file, not list"),
        (tmp_path / "confg.json", "No such file or directory; did you mean config.json?"),
        (tmp_path / "config.json", f"not valid JSON in {tmp_path}/config.json: "),
    ):
        with pytest.raises(EngineConfigError, match=re.escape(said)):
            initialize(torch.nn.Linear(2, 2), config=config)  # type: ignore[arg-type]


def test_a_file_of_no_format_shows_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointNotFoundError, match="the file begins with b'version https://git-lfs"):
        Checkpoint(tmp_path / "model.safetensors")


def test_an_error_is_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"f": object()}
    with pytest.raises(UnsupportedValueError), caplog.at_level("INFO", "terrazzo.checkpoint"):
        save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    with all_ranks(2) as world, pytest.raises(UnsupportedValueError, match=r"failed on 2 ranks:\n  ranks 0-1: Unsupp"):
        world.run(save, state, checkpoint_id=tmp_path / "b")
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert [text.split(" seconds")[0] for text in told] == [f"save rank=0 checkpoint={tmp_path / x}" for x in "ab"]
    assert any(record.levelname == "INFO" and "plan rank=0" in record.message for record in caplog.records)


def test_states_and_names(tmp_path: Path) -> None:
    save({"model.w": torch.ones(2), "step": 3}, checkpoint_id=tmp_path / "a", no_dist=True)
    for state in ([1], 3):
        with pytest.raises(UnsupportedValueError, match=f"a state is a dict .*, not {type(state).__name__}"):
            save(state, checkpoint_id=tmp_path / "b", no_dist=True)
        with pytest.raises(UnsupportedValueError, match=f"a state is a dict .*, not {type(state).__name__}"):
            load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    assert not (tmp_path / "b" / "manifest.terrazzo").exists()
    checkpoint = Checkpoint(tmp_path / "a")
    for look in (checkpoint.__getitem__, checkpoint.tensor, checkpoint.nbytes):
        with pytest.raises(KeyError) as found:
            look("modle.w")
        assert isinstance(found.value, CheckpointNameError)
        assert str(found.value) == "the checkpoint has no 'modle.w'; did you mean model.w?"
    assert checkpoint.get("absent", 5) == 5
    with pytest.raises(CheckpointMismatchError, match=r"modle\.w: not in .*did you mean model\.w\?"):
        load({"modle.w": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
