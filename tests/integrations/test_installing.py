"""A program that imports PyTorch's names runs on terrazzo's, and everything can be undone."""

from __future__ import annotations

import _thread
import copy
import importlib
import io
import operator
import os
import pickle
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

import terrazzo
import terrazzo.checkpoint
import terrazzo.fsdp
import terrazzo.tensor
from engine.runs import config, make_model
from ranks import fresh_values, run_ranks
from terrazzo.engine import initialize
from terrazzo.errors import EngineConfigError
from terrazzo.integrations.installing import MODULES, InstallWarning

ROOT = Path(__file__).parents[2]

# Written as people write it for PyTorch.
LIBRARY = """
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed._composable.fsdp import fully_shard as older


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def train(folder, steps=4):
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(make(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    assert isinstance(model, FSDPModule) and isinstance(model[0].weight, DTensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        x = torch.ones(4, 6) * (step + 1)
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim}, checkpoint_id=folder)
    saved = {"model": {k: torch.zeros_like(v) for k, v in state.items()}}
    dcp.load(saved, checkpoint_id=folder)
    same = all(torch.equal(saved["model"][k].full_tensor(), state[k].full_tensor()) for k in state)
    assert model[0].weight._local_tensor.data_ptr() == model[0].weight.to_local().data_ptr(), "as libraries look at it"
    whole = distribute_tensor(torch.arange(6.0), mesh["tp"], [Shard(0)]).full_tensor().tolist()
    return losses, same, whole, type(model[0].weight).__module__, fully_shard is older


if __name__ == "__main__":
    import sys
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(train(sys.argv[1])[3])
"""


def check_library(folder: str) -> list[float]:
    sys.path.insert(0, folder)
    results = {}
    before = {name: vars(sys.modules[f"torch.distributed.{name}"]).copy() for name in ("tensor", "fsdp", "checkpoint")}
    for who in ("torch", "terrazzo"):
        sys.modules.pop("a_library", None)
        if who == "terrazzo":
            with warnings.catch_warnings():
                # What else in this process holds PyTorch's names is not the library's business.
                warnings.simplefilter("ignore", InstallWarning)
                done = terrazzo.install()
            assert terrazzo.install() is done
        try:
            results[who] = importlib.import_module("a_library").train(f"{folder}/{who}")
        finally:
            terrazzo.uninstall()
    sys.path.remove(folder)
    for name, names in before.items():
        now = vars(sys.modules[f"torch.distributed.{name}"])
        assert [n for n, value in names.items() if now[n] is not value] == [], "everything is as it was"
    assert results["torch"][3].startswith("torch.") and results["terrazzo"][3].startswith("terrazzo.")
    torch.testing.assert_close(results["torch"][0], results["terrazzo"][0])
    assert results["torch"][1:3] == results["terrazzo"][1:3] == (True, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert results["terrazzo"][4]
    return results["terrazzo"][0]


def test_a_library_for_pytorch_runs_on_terrazzo(tmp_path):
    (tmp_path / "a_library.py").write_text(LIBRARY)
    assert run_ranks(2, check_library, str(tmp_path))[0][0] > 0


def test_everything_public_is_replaced_or_listed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstallWarning)
        done = terrazzo.install()
    try:
        for name in MODULES:
            full = f"torch.distributed.{name}"
            module = sys.modules.get(full)
            if module is None:
                continue
            for public in getattr(module, "__all__", ()):
                if not hasattr(module, public):
                    continue
                ours = getattr(getattr(module, public), "__module__", "").startswith("terrazzo")
                assert public in (done.replaced if ours else done.kept)[full]
        for listed, ours in ((done.replaced, True), (done.kept, False), (done.translated, False)):
            for full, names in listed.items():
                values = {name: getattr(sys.modules[full], name) for name in names}
                wrong = [
                    n for n, v in values.items() if getattr(v, "__module__", "").startswith("terrazzo") is not ours
                ]
                assert not wrong, f"{full} is listed wrongly: {wrong}"
        assert torch.distributed.tensor.DTensor is terrazzo.tensor.DTensor
        assert torch.distributed.checkpoint.save is terrazzo.checkpoint.save
        assert "FullyShardedDataParallel" in done.kept["torch.distributed.fsdp"]
        # What all ranks raise is of the type that PyTorch's module has now.
        from torch.distributed.checkpoint.api import CheckpointException

        from terrazzo.checkpoint.run.coordination import exception_of, failure_of

        failed = exception_of([failure_of(ValueError("why"), rank=0)], "saving", None)
        assert isinstance(failed, CheckpointException) and isinstance(failed.failures[0][0], ValueError)
    finally:
        terrazzo.uninstall()
    assert torch.distributed.tensor.DTensor is not terrazzo.tensor.DTensor


def check_files_of_pytorch(folder: str) -> None:
    from terrazzo.checkpoint import save
    from terrazzo.checkpoint.formats.convert import convert

    save({"w": torch.arange(4.0)}, checkpoint_id=f"{folder}/ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstallWarning)
        terrazzo.install()
    try:
        convert(f"{folder}/ours", f"{folder}/theirs", "dcp")
    finally:
        terrazzo.uninstall()
    state = {"w": torch.zeros(4)}
    torch.distributed.checkpoint.load(state, checkpoint_id=f"{folder}/theirs", no_dist=True)
    assert state["w"].tolist() == [0, 1, 2, 3]


def check_formats(folder: str) -> None:
    """Programs for PyTorch's checkpoints get PyTorch's files; in terrazzo's format they see that there is one."""
    from terrazzo.checkpoint import AsyncCheckpointerType, Checkpoint, FileSystemWriter, async_save, load, save
    from terrazzo.checkpoint.formats import detect

    state = {"w": torch.arange(4.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstallWarning)
        terrazzo.install()
    try:
        for _ in range(2):  # the second replaces the first
            save(state, checkpoint_id=f"{folder}/under")
        async_save(
            state, checkpoint_id=f"{folder}/process", async_checkpointer_type=AsyncCheckpointerType.PROCESS
        ).result()
        save(state, storage_writer=FileSystemWriter(f"{folder}/native"))
        save(state, checkpoint_id=f"{folder}/based", base=f"{folder}/native")
        save(state, checkpoint_id=f"{folder}/chained", base=f"{folder}/under")
    finally:
        terrazzo.uninstall()
    save(state, checkpoint_id=f"{folder}/without")
    async_save(
        state, checkpoint_id=f"{folder}/process-without", async_checkpointer_type=AsyncCheckpointerType.PROCESS
    ).result()
    formats = {path.name: detect(path) for path in Path(folder).iterdir()}
    native = dict.fromkeys(("native", "based", "chained", "without", "process-without"), "native")
    assert formats == {"under": "dcp", "process": "dcp", **native}
    shown = {path.name for path in Path(folder).iterdir() if (path / ".metadata").exists()}
    assert shown == formats.keys() - {"without", "process-without"}
    for name, kind in formats.items():
        found, theirs = {"w": torch.zeros(4)}, {"w": torch.zeros(4)}
        load(found, checkpoint_id=f"{folder}/{name}")
        assert found["w"].tolist() == [0, 1, 2, 3] == Checkpoint(f"{folder}/{name}")["w"][...].tolist()
        if kind == "dcp":
            assert sorted(os.listdir(f"{folder}/{name}")) == [".metadata", "__0_0.distcp"]
            torch.distributed.checkpoint.load(theirs, checkpoint_id=f"{folder}/{name}", no_dist=True)
            assert theirs["w"].tolist() == [0, 1, 2, 3]
    with pytest.raises(torch.distributed.checkpoint.CheckpointException, match="of terrazzo: load it with terrazzo"):
        torch.distributed.checkpoint.load(found, checkpoint_id=f"{folder}/native", no_dist=True)


def test_programs_that_look_for_pytorchs_checkpoints_find_them(tmp_path):
    run_ranks(1, check_formats, str(tmp_path))


def check_engine(folder: str) -> None:
    from terrazzo.checkpoint import CheckpointManager
    from terrazzo.checkpoint.formats import detect

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstallWarning)
        terrazzo.install()
    try:
        options = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine = initialize(make_model(), config=options)
        engine.save_checkpoint(folder, client_state={1: 2})
        engine.save_checkpoint(folder, "later", client_state={1: 3}, async_op=True).result()
        assert [detect(f"{folder}/{name}") for name in ("global_step0", "later")] == ["native", "native"]
        assert CheckpointManager(folder).steps() == [0]
        assert engine.load_checkpoint(folder)[1] == {1: 3}
        with CheckpointManager(f"{folder}/run", keep=1) as manager:
            for step in (1, 2):
                manager.save(step, {"w": torch.ones(1)})
        assert [path.name for path in Path(folder, "run").iterdir() if path.is_dir()] == ["global_step2"]
    finally:
        terrazzo.uninstall()


def test_an_engines_checkpoints_are_of_terrazzos_format(tmp_path):
    run_ranks(1, check_engine, str(tmp_path))


def test_files_for_pytorch_are_written_as_before(tmp_path):
    run_ranks(1, check_files_of_pytorch, str(tmp_path))


@pytest.mark.filterwarnings("ignore::terrazzo.integrations.installing.InstallWarning")  # of other tests' modules
def test_private_names_of_older_versions_are_found_beside_ours():
    """That module is PyTorch's shim for an older name, and makes PyTorch's module once more when it is imported."""
    terrazzo.install()
    try:
        module = importlib.import_module("torch.distributed._tensor.experimental._attention")
        assert module.context_parallel is terrazzo.tensor.experimental.context_parallel
        assert module._cp_options is not None
    finally:
        terrazzo.uninstall()
    assert module.context_parallel.__module__.startswith("torch.")


def test_who_imported_before_is_named(monkeypatch):
    early = type(sys)("an_early_library")
    early.fully_shard = torch.distributed.fsdp.fully_shard
    monkeypatch.setitem(sys.modules, "an_early_library", early)
    with pytest.warns(InstallWarning, match=r"an_early_library: fully_shard.*terrazzo run"):
        terrazzo.install()
    terrazzo.uninstall()


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def check_objects_of_pytorch() -> None:
    """What a program made with PyTorch's classes before works on; nothing has been computed with it yet."""
    from torch.distributed import tensor as theirs
    from torch.distributed.checkpoint._traverse import traverse_state_dict
    from torch.distributed.checkpoint.metadata import MetadataIndex

    kind, place = theirs.DTensor, theirs.Shard
    own = kind.from_local(torch.arange(4.0), dist.init_device_mesh("cpu", (1,)), [place(0)])
    objects = [place(1), theirs.Replicate(), theirs.Partial(), place, kind, MetadataIndex("w"), own._spec]
    pickled = [[pickle.dumps(value, protocol) for value in objects] for protocol in range(2, 6)]
    before = saved({"own": own})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstallWarning)
        terrazzo.install()
    try:
        for result in (own * 2, torch.ops.aten.mul(own, 2), own.clone() * 2, copy.deepcopy(own) * 2):
            assert type(result) is kind and result.to_local().tolist() == [0, 2, 4, 6]
        assert type(torch.linalg.vector_norm(own)) is kind
        # Pickle in C, called from here, and pickle in Python.
        for dumps, loads in ((pickle.dumps, pickle.loads), (pickle._dumps, pickle._loads)):
            for protocol, files in enumerate(pickled, 2):
                for value, file in zip(objects, files, strict=True):
                    assert b"terrazzo" not in dumps(value, protocol)
                    assert loads(file) == value == loads(dumps(value, protocol)), value
                    assert type(loads(file)) is type(value)
            # A function that stands for PyTorch's under PyTorch's name is pickled under it.
            shown = sys.modules["torch.distributed.checkpoint._traverse"].traverse_state_dict
            assert shown is not traverse_state_dict and loads(dumps(shown)) is shown
        under = saved({"own": own})
        for file in (before, under):
            for only in (True, False):
                loaded = torch.load(io.BytesIO(file), weights_only=only)["own"]
                assert type(loaded) is kind and type(loaded.placements[0]) is place
                assert loaded.full_tensor().tolist() == [0, 1, 2, 3]
        # Who asks by name still gets terrazzo's.
        from torch.distributed.tensor import Shard

        ours = {terrazzo.tensor.DTensor}
        assert Shard is terrazzo.tensor.Shard
        assert {theirs.DTensor, getattr(theirs, "DTensor")} == ours  # noqa: B009  # another instruction
        assert {operator.attrgetter("DTensor")(theirs), __import__(theirs.__name__, fromlist=["a"]).DTensor} == ours
        nameless = {}
        exec(
            "import torch.distributed.tensor as t; from torch.distributed.tensor import DTensor; u = t.DTensor",
            nameless,
        )
        assert {nameless["DTensor"], nameless["u"]} == ours
        # PyTorch's C++ in a thread of its own, where no Python runs.
        found: list[object] = []
        _thread.start_new_thread(found.extend, (map(operator.attrgetter("DTensor"), [theirs]),))
        for _ in range(3000):
            if not found:
                time.sleep(0.01)
        assert found == [kind]
    finally:
        terrazzo.uninstall()
    assert b"terrazzo" not in under
    loaded = torch.load(io.BytesIO(under), weights_only=True)["own"]
    assert type(loaded * 2) is kind and loaded.full_tensor().tolist() == [0, 1, 2, 3]


def test_objects_of_pytorch_work_and_are_pickled_as_ever():
    fresh_values(1, check_objects_of_pytorch)


@pytest.mark.filterwarnings("ignore::terrazzo.integrations.installing.InstallWarning")  # of other tests' modules
def test_a_name_that_is_patched_for_a_while_is_terrazzos_again():
    theirs = torch.distributed.tensor.distribute_tensor
    terrazzo.install()
    try:
        for _ in range(2):
            with mock.patch("torch.distributed.tensor.distribute_tensor") as patched:
                assert torch.distributed.tensor.distribute_tensor is patched
            assert torch.distributed.tensor.distribute_tensor is terrazzo.tensor.distribute_tensor
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.distributed.tensor.distribute_tensor", 1)
            assert torch.distributed.tensor.distribute_tensor == 1
        assert torch.distributed.tensor.distribute_tensor is terrazzo.tensor.distribute_tensor
    finally:
        terrazzo.uninstall()
    assert torch.distributed.tensor.distribute_tensor is theirs


@pytest.mark.long
def test_started_by_the_command_and_by_the_variable(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LIBRARY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-m", "terrazzo", "run", str(script), str(tmp_path / "one")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0 and done.stdout.strip() == "terrazzo.tensor.dtensor", done.stderr[-3000:]
    # What Python does when it starts, where the wheel is installed.
    start = tmp_path / "start.py"
    start.write_text(
        f"import site, sys; site.addpackage({str(ROOT / 'src')!r}, 'terrazzo-install.pth', set())\n"
        "import importlib.util\n"
        "importlib.util.find_spec('torch')\n"  # a program may look whether there is one
        "print('torch' in sys.modules, 'terrazzo' in sys.modules)\n"
        "import torch\n"
        "print('terrazzo' in sys.modules, 'torch.distributed.tensor' in sys.modules)\n"
        "from torch.distributed.pipelining.stage import PipelineStage\n"  # imports fully_shard in its middle
        "from torch.distributed.fsdp import fully_shard\n"
        "print(fully_shard.__module__, hasattr(PipelineStage.backward_maybe_with_nosync, '__wrapped__'))"
    )
    theirs = torch.distributed.fsdp.fully_shard.__module__
    for value, expected in (
        ("1", ["False False", "True False", "terrazzo.fsdp.api True"]),
        ("0", ["False False", "False False", f"{theirs} False"]),
    ):
        environment["TERRAZZO_INSTALL"] = value
        done = subprocess.run(
            [sys.executable, str(start)], capture_output=True, text=True, env=environment, timeout=400
        )
        assert done.stdout.split("\n")[:-1] == expected, done.stdout + done.stderr[-3000:]
    environment["TERRAZZO_INSTALL"] = "maybe"
    done = subprocess.run([sys.executable, str(start)], capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 1 and done.stdout == "False False\n", done.stdout
    assert "TERRAZZO_INSTALL must be 0 or 1, not 'maybe'" in done.stderr
    (tmp_path / "terrazzo.py").write_text("")  # without it, torch is not imported
    environment |= {"TERRAZZO_INSTALL": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(start)], capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 1 and done.stdout == "False False\n", done.stdout
    assert "'terrazzo' is not a package" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "first",
    [
        "import torch.distributed._composable.fsdp",
        "import torch.distributed.tensor.parallel.style",
        "import torch.distributed.checkpoint.state_dict",
        "import torch._dynamo",  # does not need it
        "import terrazzo.fsdp",
    ],
)
def test_names_are_replaced_whatever_is_imported_first(first, tmp_path):
    program = (
        f"import site; site.addpackage({str(ROOT / 'src')!r}, 'terrazzo-install.pth', set())\nimport torch\n{first}\n"
        "from torch.distributed._tensor import DTensor\n"
        "from torch.distributed.checkpoint import load, FileSystemReader\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel\n"
        "from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel\n"
        "found = DTensor, load, FileSystemReader, ColwiseParallel, fully_shard, FullyShardedDataParallel\n"
        "print([x.__module__.partition('.')[0] for x in found])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERRAZZO_INSTALL": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.stdout.strip() == str([*["terrazzo"] * 5, "torch"]), done.stdout + done.stderr[-3000:]


def check_mixed_imports() -> None:
    for sharded in (make_model(), make_model()):
        torch.distributed.fsdp.fully_shard(sharded)
        with pytest.raises(
            EngineConfigError, match=r"import fully_shard from terrazzo\.fsdp, or call terrazzo\.install"
        ):
            initialize(sharded, config=config(2))
        break
    weight = torch.distributed.tensor.distribute_tensor(
        torch.ones(4, 4), dist.init_device_mesh("cpu", (1,)), [torch.distributed.tensor.Shard(0)]
    )
    model = torch.nn.Linear(4, 4)
    model.weight = torch.nn.Parameter(weight)
    with pytest.raises(EngineConfigError, match=r"import .* from terrazzo\.tensor, or call terrazzo\.install"):
        initialize(model, config=config(2))


def test_mixed_imports_say_which_to_change():
    run_ranks(1, check_mixed_imports)
