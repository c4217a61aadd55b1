"""Checkpoints of every format, in object stores and other places behind URLs: written, read, converted, compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from typer.testing import CliRunner

import terrazzo
from checkpoint.formats.deepspeed import made
from checkpoint.stores.fault_proxy import FaultProxy
from ranks import run_ranks
from s3_server import BUCKET, S3Server
from terrazzo.checkpoint import Checkpoint, load, save, verify
from terrazzo.checkpoint.formats import DCPWriter, detect
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.formats.deepspeed.files import UNFINISHED
from terrazzo.checkpoint.stores import MemoryStore, Place, Store, store_at
from terrazzo.checkpoint.stores.object_store import ObjectStore
from terrazzo.checkpoint.tools.compare import compare
from terrazzo.cli import app
from terrazzo.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConflictError,
)


@pytest.fixture(params=["s3", "fsspec"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place of its own for each test."""
    if request.param == "fsspec":
        return f"memory://{uuid.uuid4().hex}"
    for name, value in request.getfixturevalue("s3").environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 30, generator=generator)
    return {"model": {"w": weight, "b": weight[0].bfloat16()}, "step": 7, "list": [1, {"x": torch.arange(3)}]}


def fetched(place: str, folder: Path) -> Path:
    """The files of a place, in a folder of this machine."""
    store = store_at(place)
    folder.mkdir()
    for entry in store.list():
        (folder / entry.key).write_bytes(store.get(entry.key)[0])
    return folder


def differences(one: Any, other: Any) -> list[Any]:
    return list(compare(Checkpoint(one), Checkpoint(other)))


def test_torch_dcp(url: str, tmp_path: Path) -> None:
    flat = {"w": torch.randn(50, 20), "b": torch.arange(5), "step": torch.tensor(3)}
    dcp.save(flat, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    convert(tmp_path / "theirs", f"{url}/dcp", "dcp")
    assert detect(f"{url}/dcp") == "dcp" and differences(tmp_path / "theirs", f"{url}/dcp") == []
    target = {name: torch.zeros_like(tensor) for name, tensor in flat.items()}
    load(target, checkpoint_id=f"{url}/dcp", no_dist=True)
    assert all(torch.equal(target[name], flat[name]) for name in flat)
    # What is there is what PyTorch reads.
    target = {name: torch.zeros_like(tensor) for name, tensor in flat.items()}
    dcp.load(target, checkpoint_id=str(fetched(f"{url}/dcp", tmp_path / "fetched")), no_dist=True)
    assert all(torch.equal(target[name], flat[name]) for name in flat)
    with pytest.raises(CheckpointExistsError):
        convert(tmp_path / "theirs", f"{url}/dcp", "dcp")
    before = {entry.key for entry in store_at(f"{url}/dcp").list()}
    convert(tmp_path / "theirs", f"{url}/dcp", "dcp", overwrite=True)
    after = {entry.key for entry in store_at(f"{url}/dcp").list()}
    assert before & after == {".metadata"} and len(before) == len(after)
    convert(f"{url}/dcp", f"{url}/native", "native")
    assert verify(f"{url}/native") == [] and differences(tmp_path / "theirs", f"{url}/native") == []


def test_torch_save(url: str, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "plain.pt")
    for name, source in (("one.pt", tmp_path / "plain.pt"), ("two.pt", f"{url}/one.pt")):
        convert(source, f"{url}/{name}", "torch_save")
        (tmp_path / name).write_bytes(store_at(url).get(name)[0])
        mapped = torch.load(tmp_path / name, mmap=True)
        assert torch.equal(mapped["model"]["w"], state()["model"]["w"]) and mapped["step"] == 7
        assert torch.equal(torch.load(tmp_path / name)["list"][1]["x"], torch.arange(3))
    assert Checkpoint(f"{url}/one.pt")["step"] == 7 and differences(tmp_path / "plain.pt", f"{url}/two.pt") == []
    with pytest.raises(CheckpointExistsError):
        convert(tmp_path / "plain.pt", f"{url}/one.pt", "torch_save")
    with pytest.raises(CheckpointNotFoundError):
        Checkpoint(f"{url}/three.pt")


def test_a_file_that_is_sent_in_parts(url: str, tmp_path: Path) -> None:
    large = {"w": torch.randint(256, (100 << 20,), dtype=torch.uint8), "n": 1}
    save(large, checkpoint_id=tmp_path / "native", no_dist=True)
    convert(tmp_path / "native", f"{url}/large.pt", "torch_save")
    found = Checkpoint(f"{url}/large.pt")
    assert torch.equal(found["w"][...], large["w"]) and found["n"] == 1
    assert found["w"][-3:].tolist() == large["w"][-3:].tolist()


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed(url: str, tmp_path: Path, stage: int) -> None:
    made.write(tmp_path, stage)
    convert(tmp_path / "native", f"{url}/native", "native")
    convert(f"{url}/native", f"{url}/run/tag", "deepspeed", stage=stage, ranks=2)
    store = store_at(f"{url}/run/tag")
    assert sorted(entry.key for entry in store.list()) == sorted(os.listdir(tmp_path / "tag"))
    for name in os.listdir(tmp_path / "tag"):
        assert bytes(store.get(name)[0]) == (tmp_path / "tag" / name).read_bytes(), name
    assert differences(tmp_path / "tag", f"{url}/run/tag") == []
    store_at(f"{url}/run").put("latest", b"tag")
    assert detect(f"{url}/run") == "deepspeed" and differences(tmp_path / "tag", f"{url}/run") == []
    convert(f"{url}/run", tmp_path / "back", "native")
    assert differences(tmp_path / "tag", tmp_path / "back") == []
    with pytest.raises(CheckpointExistsError, match="cannot replace another"):
        convert(f"{url}/native", f"{url}/run/tag", "deepspeed", stage=stage, ranks=2)


def test_universal(url: str, tmp_path: Path) -> None:
    made.write_universal(tmp_path, 2)
    inner = tmp_path / "tag"
    for folder, _, files in os.walk(inner):
        beneath = os.path.relpath(folder, inner)
        store = store_at(f"{url}/tag" if beneath == "." else f"{url}/tag/{beneath}")
        for name in files:
            store.put(name, (Path(folder) / name).read_bytes())
    assert differences(inner, f"{url}/tag") == []


def test_commands(url: str, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "plain.pt")
    run = CliRunner()
    targets = {"torch_save": f"{url}/file.pt", "dcp": f"{url}/dcp", "native": f"{url}/native"}
    for name, target in targets.items():
        done = run.invoke(app, ["convert", str(tmp_path / "plain.pt"), target, "--to", name])
        assert done.exit_code == 0, done.output
        listed = json.loads(run.invoke(app, ["ls", target, "--json"]).stdout)
        assert {row["name"] for row in listed["values"]} == {"model.w", "model.b", "step", "list.0", "list.1.x"}
        assert "begins with [0.0, 1.0, 2.0]" in run.invoke(app, ["show", target, "list.1.x"]).stdout
        assert run.invoke(app, ["diff", target, targets["torch_save"]]).exit_code == 0
        assert run.invoke(app, ["verify", target]).exit_code == 0
    assert run.invoke(app, ["ls", f"{url}/nothing"]).exit_code == 2


def test_a_store_in_the_place_of_a_url(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "plain.pt")
    native, other = MemoryStore(), MemoryStore()
    convert(tmp_path / "plain.pt", native, "native")
    convert(native, other, "dcp")
    assert differences(native, other) == [] and Checkpoint(other)["step"] == 7
    target = {"model": {"w": torch.zeros(40, 30)}}
    load(target, store=other, no_dist=True)
    assert torch.equal(target["model"]["w"], state()["model"]["w"])
    made.write(tmp_path, 2)
    convert(tmp_path / "native", native.beneath("tag"), "deepspeed", stage=2)
    assert differences(native.beneath("tag"), tmp_path / "tag") == []
    assert verify(other) == []
    (name,) = [entry.key for entry in other.list() if entry.key.endswith(".distcp")]
    damaged = bytearray(other.get(name)[0])
    damaged[len(damaged) // 2] ^= 1
    other.put(name, damaged)
    assert [damage.file for damage in verify(other)] == [name]
    with pytest.raises(CheckpointNotFoundError):
        Checkpoint(MemoryStore())


# ------------------------------------------------------------------ two writers, and bad days


def test_of_two_that_convert_to_one_place_one_wins(s3: S3Server, tmp_path: Path) -> None:
    save(state(), checkpoint_id=tmp_path / "native", no_dist=True)
    for make in (MemoryStore, lambda: ObjectStore(f"s3://{BUCKET}/{uuid.uuid4().hex}", **s3.settings())):
        store: Store = make()
        began, other_done, errors = threading.Event(), threading.Event(), []

        def slow(name: str, nbytes: int, began: Any = began, other_done: Any = other_done) -> None:
            began.set()
            assert other_done.wait(60)

        def first(store: Store = store, slow: Any = slow, errors: Any = errors) -> None:
            try:
                convert(tmp_path / "native", store, "dcp", overwrite=True, progress=slow)
            except ConflictError as error:
                errors.append(error)

        thread = threading.Thread(target=first)
        thread.start()
        assert began.wait(60)
        convert(tmp_path / "native", store, "dcp")
        kept = {entry.key for entry in store.list() if entry.key.startswith("__") or entry.key == ".metadata"}
        other_done.set()
        thread.join()
        assert len(errors) == 1 and {entry.key for entry in store.list()} == kept
        assert differences(tmp_path / "native", store) == []


@pytest.mark.parametrize("to", ["dcp", "torch_save", pytest.param("deepspeed", marks=pytest.mark.long)])
def test_any_request_fails_for_good(s3: S3Server, proxy: FaultProxy, tmp_path: Path, to: str) -> None:
    """What was there is there, or the new one; and nothing that a later conversion does not remove."""
    made.write(tmp_path, 2)
    settings = proxy.settings(s3.settings())
    before = tmp_path / "native"
    if to == "deepspeed":
        convert(before, tmp_path / "again", to)
        before = tmp_path / "again"
    at, failed = 0, 0
    while True:
        store = ObjectStore(f"s3://{BUCKET}/{uuid.uuid4().hex}", lease_seconds=-1.0, **settings)
        place = Place(store) / "file.pt" if to == "torch_save" else store
        proxy.reset(lambda method, path, number, at=at: ("status", 503) if at <= number < at + 1000 else None)
        try:
            convert(tmp_path / "native", place, to)
            saved = True
        except (CheckpointError, OSError):
            saved = False
            failed += 1
        happened = bool(proxy.happened)
        proxy.reset(lambda *request: None)
        if saved:
            assert differences(before, place) == []
        else:
            try:
                assert differences(before, place) == []  # the commit was done, and what came after was not
            except CheckpointNotFoundError:
                convert(tmp_path / "native", place, to)
                names = [entry.key for entry in store.list()]
                assert not [name for name in names if name.endswith((".lease", UNFINISHED))]
                assert sum(name.endswith(".distcp") for name in names) <= 1
        if not happened:
            break
        at += 1
    assert failed > 2


def test_a_killed_conversion_to_deepspeed_is_no_checkpoint(s3: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    made.write(tmp_path, 2)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    program = (
        "from terrazzo.checkpoint.formats.convert import convert; "
        f"convert({str(tmp_path / 'native')!r}, {url!r}, 'deepspeed')"
    )
    proxy.reset(lambda method, path, number: ("slow", 60.0) if method == "PUT" and "model_states" in path else None)
    environment = os.environ | s3.environment() | {"AWS_ENDPOINT_URL": proxy.endpoint}
    environment["PYTHONPATH"] = str(Path(terrazzo.__file__).parents[1])
    job = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        while not proxy.happened:
            assert job.poll() is None
            threading.Event().wait(0.05)
    finally:
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    store = ObjectStore(url, **s3.settings())
    assert UNFINISHED in [entry.key for entry in store.list()]
    with pytest.raises(CheckpointNotFoundError, match="not complete"):
        Checkpoint(store)
    with pytest.raises(CheckpointExistsError, match="an hour"):
        convert(tmp_path / "native", store, "deepspeed")
    store = ObjectStore(url, lease_seconds=-1.0, **s3.settings())
    convert(tmp_path / "native", store, "deepspeed", stage=2)
    assert differences(tmp_path / "tag", store) == []


@pytest.mark.long
def test_a_killed_save_for_pytorch_leaves_nothing_that_the_next_does_not_remove(tmp_path: Path) -> None:
    save(state(), checkpoint_id=tmp_path / "native", no_dist=True)
    program = (
        "import os, signal; from terrazzo.checkpoint.formats.convert import convert; "
        f"convert({str(tmp_path / 'native')!r}, {str(tmp_path / 'dcp')!r}, 'dcp', overwrite=True, "
        "progress=lambda name, nbytes: nbytes and os.kill(os.getpid(), signal.SIGKILL))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(terrazzo.__file__).parents[1])}
    convert(tmp_path / "native", tmp_path / "dcp", "dcp")
    (tmp_path / "dcp" / "__0_0.distcp").write_bytes(b"somebody's own")
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == -signal.SIGKILL
        assert len(os.listdir(tmp_path / "dcp")) == 5  # what is valid, what is not ours, and a file with its lease
    save(state(), storage_writer=DCPWriter(tmp_path / "dcp"), no_dist=True)
    assert len(os.listdir(tmp_path / "dcp")) == 3 and (tmp_path / "dcp" / "__0_0.distcp").exists()
    assert differences(tmp_path / "native", tmp_path / "dcp") == []


def check_safetensors(url: str, environment: dict[str, str], folder: str) -> None:
    """Ranks send an owner their parts of each file."""
    import torch.distributed as dist

    from terrazzo.integrations.huggingface import load_model, save_model
    from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh

    os.environ.update(environment)
    mesh = init_device_mesh("cpu", (2,))

    def model(values: torch.Tensor) -> torch.nn.Module:
        made = torch.nn.Module()
        made.w = torch.nn.Parameter(distribute_tensor(values, mesh, [Shard(1)], src_data_rank=None))
        made.b = torch.nn.Parameter(values[0].bfloat16())
        return made

    values = torch.arange(12_000_000.0).reshape(4000, 3000)  # of several windows
    save_model(model(values), url)
    save_model(model(values + 1), url, max_shard_size="1MB")
    if dist.get_rank() == 0:
        found = fetched(url, Path(folder, "fetched"))
        weight_map = json.loads((found / "model.safetensors.index.json").read_text())["weight_map"]
        names = sorted([*weight_map.values(), "model.safetensors.index.json"])
        assert sorted(path.name for path in found.iterdir()) == names
        assert torch.equal(load_file(found / weight_map["w"])["w"], values + 1)
    other = model(torch.zeros(4000, 3000))
    load_model(other, url)
    assert torch.equal(other.w.full_tensor(), values + 1) and torch.equal(other.b, (values[0] + 1).bfloat16())


def test_safetensors(s3: S3Server, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    run_ranks(2, check_safetensors, url, s3.environment(), str(tmp_path))
