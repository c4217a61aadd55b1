"""Arguments of another kind than asked for, and names that are nearly right: what was given, and what to write."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp as theirs

from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, CheckpointManager, load, save
from terrazzo.engine import initialize
from terrazzo.errors import (
    CheckpointException,
    CheckpointIOError,
    CheckpointManagerError,
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
from terrazzo.integrations.huggingface import load_model
from terrazzo.tensor import DTensor, Shard, distribute_module, distribute_tensor, init_device_mesh, rand, zeros
from terrazzo.tensor.parallel import ColwiseParallel, parallelize_module
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
        ("cuda:0", (1,), "there is no type of devices 'cuda:0': write 'cpu'"),
        ("cpu", 1, r"a mesh's shape is a tuple of how many ranks each dim has, as \(4,\) or \(2, 4\), not 1"),
    ):
        with pytest.raises(CommError, match=said):
            init_device_mesh(device, shape)  # type: ignore[arg-type]
    for names in (("dp", "tp"), ()):
        with pytest.raises(CommError, match="a name of its own for each of the 1 dims of a mesh of shape"):
            init_device_mesh("cpu", (1,), mesh_dim_names=names)
    with pytest.raises(CommError, match=r"for each of the 2 dims .*, not \('dp', 'dp'\)"):
        init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "dp"))
    with pytest.raises(IndexError, match=r"expected to be in range of \[-1, 0\], but got 3"):
        distribute_tensor(x, mesh, [Shard(0)]).sum(3)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.warns(match="'7' matches no submodule of Sequential, which has 0, 1"):
        parallelize_module(model, mesh, {"7": ColwiseParallel()})
    with pytest.warns(match="'0.wieght' matches no submodule of 0, which has none"):
        parallelize_module(model, mesh, {"0.wieght": ColwiseParallel()})
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


@contextmanager
def without_rights(folder: Path, mode: int) -> Iterator[str]:
    """A context manager inside which this process is an ordinary user, and `folder` has the mode; gives its owner."""
    before, was_root = folder.stat().st_mode, os.geteuid() == 0
    folder.chmod(mode)
    if was_root:
        os.seteuid(65534)
    try:
        yield "root" if was_root else ".*"
    finally:
        if was_root:
            os.seteuid(0)
        folder.chmod(before)


def test_what_the_system_refuses() -> None:
    """The error says who may not do what, where, and what to do."""
    state = {"w": torch.ones(2)}
    with tempfile.TemporaryDirectory(dir="/tmp") as made:  # every user may look into /tmp, not into pytest's folders
        folder = Path(made)
        folder.chmod(0o755)
        save(state, checkpoint_id=folder / "run/one")
        load(state, checkpoint_id=folder / "run/one")
        Checkpoint(folder / "run/one")["w"][:]
        whom = r"user .* may not {} {}, which belongs to {} \({}\); (use another place, or ask the owner|chmod u\+)"
        with without_rights(folder / "run", 0o555) as owner:
            said = whom.format("write in", folder / "run", owner, "dr-xr-xr-x")
            with pytest.raises(CheckpointIOError, match=f"rank 0: PermissionError: .*: {said}"):
                save(state, checkpoint_id=folder / "run/two/three")
        with without_rights(folder / "run", 0) as owner:
            said = whom.format("look into", folder / "run", owner, "d---------")
            for call in (
                lambda: load(state, checkpoint_id=folder / "run/one"),
                lambda: Checkpoint(folder / "run/one"),
                lambda: load_model(torch.nn.Linear(2, 2), folder / "run/one"),
            ):
                with pytest.raises(CheckpointIOError, match=said):
                    call()
        manifest = folder / "run/one/manifest.terrazzo"
        with (
            without_rights(manifest, 0) as owner,
            pytest.raises(CheckpointIOError, match=whom.format("read", manifest, owner, "----------")),
        ):
            Checkpoint(folder / "run/one")


def test_wrong_folders(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "runs/one")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointManagerError, match="file is a file, and the checkpoints of a run are in a folder"):
        CheckpointManager(file)
    with CheckpointManager(tmp_path / "runs") as manager, pytest.raises(CheckpointNotFoundError) as raised:
        manager.restore("latest", {})
    assert f"it has none; but there is one at {tmp_path / 'runs/one'}" in str(raised.value)
    with pytest.raises(EngineConfigError, match="Is a directory$"):  # and not: did you mean the same name
        initialize(torch.nn.Linear(2, 2), config=tmp_path / "runs")


def check_wrong_folder_of_a_run(folder: Path) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = initialize(torch.nn.Linear(2, 2), config=config)
    save({"w": torch.ones(2)}, checkpoint_id=folder / "runs/one")
    (folder / "file").write_text("")
    with pytest.raises(CheckpointManagerError, match="file is a file, and the checkpoints of a run are in a folder"):
        engine.load_checkpoint(folder / "file")
    with all_warnings() as said:
        assert engine.load_checkpoint(folder / "runs") == (None, {})
    assert f"; but there is one at {folder / 'runs/one'}" in said[0]


@contextmanager
def all_warnings() -> Iterator[list[str]]:
    """A context manager that collects what terrazzo logs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("terrazzo").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("terrazzo").removeHandler(handler)


def test_wrong_folder_of_a_run(tmp_path: Path) -> None:
    run_ranks(1, check_wrong_folder_of_a_run, tmp_path)
