"""Checkpoints on a real S3 server: everywhere a path is taken, between several ranks, and on bad days."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from typer.testing import CliRunner

import terrazzo
from checkpoint.stores.fault_proxy import Fault, FaultProxy
from checkpoint.test_failing_ranks import check_trial
from ranks import run_ranks
from s3_server import BUCKET, S3Server
from terrazzo.checkpoint import Checkpoint, DefaultSavePlanner, async_save, load, save, verify
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.native.storage import NativeWriter
from terrazzo.checkpoint.planner import WriteItem
from terrazzo.checkpoint.stores import Absent, Request, Version
from terrazzo.checkpoint.stores.object_store import ObjectStore
from terrazzo.cli import app
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, ConflictError


@pytest.fixture
def url(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place of its own for each test, with the server's settings in the environment."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def state(fill: float, large: int = 10) -> dict[str, Any]:
    return {"a": torch.full((large, 7), fill), "b": torch.full((3,), fill, dtype=torch.bfloat16), "step": fill}


def zeros(large: int = 10) -> dict[str, Any]:
    return {"a": torch.zeros(large, 7), "b": torch.zeros(3, dtype=torch.bfloat16), "step": 0.0}


def value_at(where: str | ObjectStore, large: int = 10) -> float:
    target = zeros(large)
    load(target, **({"store": where} if isinstance(where, ObjectStore) else {"checkpoint_id": where}), no_dist=True)
    found = {*target["a"].reshape(-1).tolist(), *target["b"].tolist(), target["step"]}
    assert len(found) == 1, f"a mixture: {found}"
    return found.pop()


def names(store: ObjectStore) -> list[str]:
    return sorted(entry.key for entry in store.list())


def test_everywhere_a_path_is_taken(url: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        Checkpoint(url)
    metadata = save(state(1.0), checkpoint_id=url, no_dist=True)
    assert sorted(metadata.state_dict_metadata) == ["a", "b", "step"]
    assert value_at(url) == 1.0 and verify(url) == []
    assert torch.equal(Checkpoint(url)["a"][3:5, 2], torch.ones(2))
    async_save(state(2.0), checkpoint_id=url, no_dist=True).result()
    assert value_at(url) == 2.0 and len(names(ObjectStore(url))) == 2
    convert(url, tmp_path / "local", "native")
    convert(tmp_path / "local", url + "/copy", "native")
    convert(url + "/copy", tmp_path / "file.pt", "torch_save")
    convert(tmp_path / "file.pt", url + "/again", "native")
    assert torch.equal(torch.load(tmp_path / "file.pt")["a"], state(2.0)["a"])
    assert value_at(url + "/copy") == value_at(url + "/again") == 2.0
    assert len(names(ObjectStore(url))) == 2  # what lies beneath is of other checkpoints
    run = CliRunner()
    assert {row["name"] for row in json.loads(run.invoke(app, ["ls", url, "--json"]).stdout)["values"]} == {
        "a",
        "b",
        "step",
    }
    assert "begins with [2.0" in run.invoke(app, ["show", url, "a"]).stdout
    assert "as it was saved" in run.invoke(app, ["verify", url]).stdout
    assert run.invoke(app, ["diff", url, url + "/again"]).exit_code == 0
    save(state(3.0), checkpoint_id=url, no_dist=True)
    assert run.invoke(app, ["diff", url, url + "/again"]).exit_code == 1


def save_on_ranks(url: str, environment: dict[str, str], fill: float) -> dict[str, Any]:
    os.environ.update(environment)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = state(fill, 90)
    save(whole | {"a": distribute_tensor(whole["a"], mesh, [Shard(0)], src_data_rank=None)}, checkpoint_id=url)
    target = zeros(90)
    placed = distribute_tensor(target["a"], mesh, [Shard(1)], src_data_rank=None)
    load(target | {"a": placed}, checkpoint_id=url)
    for name in environment:
        del os.environ[name]
    return {"local": placed.to_local(), "b": target["b"]}


def test_several_ranks(s3: S3Server, url: str) -> None:
    for world in (2,):
        for result in run_ranks(world, save_on_ranks, url, s3.environment(), float(world)):
            assert set(result["local"].reshape(-1).tolist()) == {world} and result["b"].eq(world).all()
        assert value_at(url, 90) == world


class Copied(ObjectStore):
    """A store of one's own that does something with what is put, which `Store` says is bytes."""

    def put(self, key: str, data: bytes | memoryview, *, only_if: Absent | Version | None = None) -> Version:  # type: ignore[override]
        return super().put(key, bytes(memoryview(data)), only_if=only_if)


def test_a_subclass_that_puts_bytes(s3: S3Server) -> None:
    store = Copied(f"s3://{BUCKET}/{uuid.uuid4().hex}", **s3.settings())
    save({"w": torch.arange(50_000.0), "text": "x"}, store=store, no_dist=True)
    assert torch.equal(Checkpoint(store)["w"][:], torch.arange(50_000.0))


def test_settings_of_its_own_and_large_tensors_in_small_objects(s3: S3Server) -> None:
    store = ObjectStore(f"s3://{BUCKET}/{uuid.uuid4().hex}", **s3.settings())
    whole = {"w": torch.randn(3000, 4000), "u": torch.randn(100, 100).t(), "text": "x" * 10_000}
    save(whole, store=store, no_dist=True)
    sizes = [entry.size for entry in store.list() if entry.key.startswith("data-")]
    assert len(sizes) >= 3 and max(sizes) <= store.caps.file_bytes + 100_000  # type: ignore[operator]
    target = {"w": torch.zeros(3000, 4000), "u": torch.zeros(100, 100), "text": ""}
    load(target, store=store, no_dist=True)
    assert (
        torch.equal(target["w"], whole["w"]) and torch.equal(target["u"], whole["u"]) and len(target["text"]) == 10_000
    )
    again = pickle.loads(pickle.dumps(store))
    assert torch.equal(Checkpoint(again)["w"][2999], whole["w"][2999])
    with pytest.raises(CheckpointError, match="not both"):
        save(whole, store=store, storage_writer=NativeWriter(store), no_dist=True)
    damaged = store.list("data-")[0].key
    content = bytearray(store.get(damaged)[0])
    content[-5] ^= 1
    store.put(damaged, content)
    assert [damage.file for damage in verify_of(store)] == [damaged]
    with pytest.raises(CheckpointCorruptError, match=damaged):
        load(target, store=store, no_dist=True)


def test_on_the_base_of_another_checkpoint_in_the_bucket(s3: S3Server, proxy: FaultProxy) -> None:
    place = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    stores = [ObjectStore(f"{place}/{step}", **proxy.settings(s3.settings())) for step in range(2)]
    frozen = {"w": torch.randn(3000, 2000)}
    save(frozen | {"step": 0}, store=stores[0], no_dist=True)
    for store in (stores[1], stores[1]):  # elsewhere, then over what is there
        proxy.reset(lambda *request: None)
        save(frozen | {"step": 1}, store=store, no_dist=True, base=stores[0])
        stores[0] = stores[1]
        sent = [path for method, path in proxy.seen if method == "PUT" and "data-" in path]
        assert len(sent) <= 2  # copies that the server makes, and nothing that we send
        target = {"w": torch.zeros(3000, 2000), "step": 0}
        load(target, store=store, no_dist=True)
        assert torch.equal(target["w"], frozen["w"]) and target["step"] == 1
    assert verify_of(stores[1]) == []


def verify_of(store: ObjectStore) -> list[Any]:
    from terrazzo.checkpoint.native.verify import verify_store

    return verify_store(store)


# ------------------------------------------------------------------ bad days


def choose(kind: str, amount: float, at: int, times: int = 1) -> Any:
    def chosen(method: str, path: str, number: int) -> Fault | None:
        return (kind, amount) if at <= number < at + times else None

    return chosen


FAULTS = [("status", 503), ("status", 500), ("lost", 0), ("cut", 0), ("cut reply", 0), ("slow", 0.3)]


@pytest.mark.parametrize("shift", [0, pytest.param(3, marks=pytest.mark.long)])
def test_any_request_fails_once(s3: S3Server, proxy: FaultProxy, shift: int) -> None:
    """It is tried again: nobody notices, whichever request it was and however it failed."""
    place = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    store = ObjectStore(place, **proxy.settings(s3.settings()))
    save(state(0.0), store=store, no_dist=True)
    proxy.reset(lambda *request: None)
    save(state(0.5), store=store, no_dist=True)
    value_at(store)
    requests = len(proxy.seen)
    assert requests > 8
    for at in range(requests):
        proxy.reset(choose(*FAULTS[(at + shift) % len(FAULTS)], at))
        save(state(float(at + 1)), store=store, no_dist=True)
        assert value_at(store) == at + 1
        assert len(names(store)) == 2, (at, proxy.happened, names(store))
        assert len(proxy.happened) == 1


def test_an_answer_that_breaks_off_is_asked_for_again(s3: S3Server, proxy: FaultProxy) -> None:
    """What has arrived by then was copied already, into several buffers; the next answer is copied over it."""
    store = ObjectStore(f"s3://{BUCKET}/{uuid.uuid4().hex}", **proxy.settings(s3.settings()))
    data = np.random.default_rng(0).bytes(3 << 20)
    store.put("data", data)
    for times in (1, 2):
        proxy.reset(choose("cut reply", 0, 0, times))
        target = bytearray(len(data) - 2000)
        buffers = [memoryview(target)[:100], memoryview(target)[100:100], memoryview(target)[100:]]
        assert [request.key for request in store.read([Request("data", 1000, buffers)])] == ["data"]
        assert len(proxy.happened) == times and target == data[1000:-1000]
    with pytest.raises(EOFError, match="ends at byte 3145728"):
        list(store.read([Request("data", 1000, [memoryview(bytearray(len(data)))])]))


@pytest.mark.parametrize("status", [503, *(pytest.param(n, marks=pytest.mark.long) for n in (409, 412))])
def test_any_request_fails_for_good(s3: S3Server, proxy: FaultProxy, status: int) -> None:
    """The save fails, and what was there before is there, or it succeeds; the next one tidies up."""
    place = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    store = ObjectStore(place, lease_seconds=-1.0, **proxy.settings(s3.settings()))
    before, failed, at = 0.0, 0, 0
    save(state(before), store=store, no_dist=True)
    while True:
        proxy.reset(choose("status", status, at, times=1000))
        try:
            save(state(before + 1), store=store, no_dist=True)
            saved = True
        except (CheckpointError, OSError):
            saved = False
            failed += 1
        happened = bool(proxy.happened)
        proxy.reset(lambda *request: None)
        found = value_at(store)
        assert found == before + 1 if saved else found in (before, before + 1), (at, saved)
        before = found
        if not happened:
            break
        at += 1
    assert failed > 4
    save(state(-1.0), store=store, no_dist=True)
    assert value_at(store) == -1.0 and len(names(store)) == 2


def test_a_lost_reply_to_the_commit_is_no_conflict(s3: S3Server, proxy: FaultProxy) -> None:
    store = ObjectStore(f"s3://{BUCKET}/{uuid.uuid4().hex}", **proxy.settings(s3.settings()))
    save(state(1.0), store=store, no_dist=True)
    lost = []

    def root_lost(method: str, path: str, number: int) -> Fault | None:
        if method == "PUT" and "manifest" in path and not lost:
            lost.append(path)
            return ("lost", 0)
        return None

    proxy.reset(root_lost)
    save(state(2.0), store=store, no_dist=True)
    assert lost and value_at(store) == 2.0


def test_a_bit_that_flips_on_its_way_is_never_committed(s3: S3Server, proxy: FaultProxy) -> None:
    store = ObjectStore(f"s3://{BUCKET}/{uuid.uuid4().hex}", **proxy.settings(s3.settings()))
    save(state(1.0), store=store, no_dist=True)
    version = store.put("large", b"old")
    for kind in ("data-", "manifest"):
        proxy.reset(lambda method, path, number, kind=kind: ("flip", 0) if method == "PUT" and kind in path else None)
        with pytest.raises(CheckpointError, match="400 Bad Request"):
            save(state(2.0), store=store, no_dist=True)
        assert proxy.happened and value_at(store) == 1.0
    proxy.reset(lambda method, path, number: ("flip", 0) if "partNumber=2" in path else None)
    file = store.stream("large")
    with pytest.raises(OSError, match="400 Bad Request"):
        for number in range(5):
            file.write(number * (20 << 20), [memoryview(bytes(20 << 20))])
        file.finish()
    file.abort()
    assert proxy.happened and store.get("large") == (b"old", version)


def test_settings_of_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    from terrazzo.checkpoint.stores.object_store import _with_checksums as completed

    assert completed("s3://b", {"region": "x"}) == {"region": "x", "checksum_algorithm": "SHA256"}
    assert completed("s3://b", {"AWS_CHECKSUM_ALGORITHM": "CRC64NVME"}) == {"AWS_CHECKSUM_ALGORITHM": "CRC64NVME"}
    assert completed("s3://b", {"config": {"checksum_algorithm": "sha256"}}) == {
        "config": {"checksum_algorithm": "sha256"}
    }
    assert completed("s3://b", {"checksum_algorithm": None}) == completed("az://b", {}) == {}
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "CRC64NVME")
    assert completed("s3://b", {}) == {}


@pytest.mark.parametrize("first", [True, False])
def test_another_conditional_put_under_way_is_no_conflict(s3: S3Server, proxy: FaultProxy, first: bool) -> None:
    """S3 answers 409 then: nothing has changed, so the put is tried again."""
    store = ObjectStore(f"s3://{BUCKET}/{uuid.uuid4().hex}", **proxy.settings(s3.settings()))
    if not first:
        save(state(1.0), store=store, no_dist=True)
    busy: list[str] = []

    def answer(method: str, path: str, number: int) -> Fault | None:
        if method == "PUT" and "manifest" in path and len(busy) < 2:
            busy.append(path)
            return ("status", 409)
        return None

    proxy.reset(answer)
    save(state(2.0), store=store, no_dist=True)
    assert len(busy) == 2 and value_at(store) == 2.0 and len(names(store)) == 2


def test_a_bucket_that_is_not_there_is_no_conflict(s3: S3Server, proxy: FaultProxy) -> None:
    store = ObjectStore("s3://misspelt/run", **proxy.settings(s3.settings()))
    proxy.reset(lambda method, path, number: ("status", 404))
    for put in (lambda: store.put("a", b"x"), lambda: store.upload("a", 1).finish()):
        with pytest.raises(OSError, match="no bucket or container|NoSuchBucket") as caught:
            put()
        assert not isinstance(caught.value, FileExistsError)


class Sleeping(DefaultSavePlanner):
    """A job that falls asleep while it writes its data."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep, self.wake = threading.Event(), threading.Event()

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.asleep.set()
        assert self.wake.wait(60)
        return super().resolve_data(write_item)


def test_of_two_jobs_one_wins_and_the_other_destroys_nothing(s3: S3Server) -> None:
    store = ObjectStore(f"s3://{BUCKET}/{uuid.uuid4().hex}", **s3.settings())
    planner, errors = Sleeping(), []

    def sleeper() -> None:
        try:
            save(state(2.0), store=store, planner=planner, no_dist=True)
        except ConflictError as error:
            errors.append(error)

    thread = threading.Thread(target=sleeper)
    thread.start()
    assert planner.asleep.wait(60)
    save(state(3.0), store=store, no_dist=True)
    assert sum(name.endswith(".lease") for name in names(store)) == 1
    planner.wake.set()
    thread.join()
    assert len(errors) == 1 and value_at(store) == 3.0 and len(names(store)) == 2


def test_a_forked_process_does_not_wait_forever(s3: S3Server) -> None:
    """The client's threads are those of its parent."""
    store = ObjectStore(f"s3://{BUCKET}/{uuid.uuid4().hex}", **s3.settings())
    assert store.list() == []
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = f"it listed {ObjectStore(store.location, **s3.settings()).list()}"
        except BaseException as error:  # noqa: B036  # the parent looks at it
            text = f"{isinstance(error, CheckpointError)} {error}"
        os.write(writes, text.encode())
        os._exit(0)
    try:
        assert select.select([reads], [], [], 30)[0], "it waits"
        assert "True" in (told := os.read(reads, 10_000).decode()) and "'spawn'" in told
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_killed_upload_leaves_nothing_that_a_later_save_does_not_remove(s3: S3Server, proxy: FaultProxy) -> None:
    place = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    store = ObjectStore(place, lease_seconds=1.0, **s3.settings())
    save(state(1.0), store=store, no_dist=True)
    program = (
        "import torch; from terrazzo.checkpoint import save; "
        f"save({{'w': torch.randn(40, 1 << 20)}}, checkpoint_id={place!r}, no_dist=True)"
    )
    proxy.reset(lambda method, path, number: ("slow", 60.0) if method == "PUT" and number > 8 else None)
    source = Path(terrazzo.__file__).parents[1]
    environment = os.environ | s3.environment() | {"AWS_ENDPOINT_URL": proxy.endpoint, "PYTHONPATH": str(source)}
    job = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        while len(proxy.happened) < 2:
            assert job.poll() is None
            threading.Event().wait(0.05)
    finally:
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    assert len(names(store)) > 3 and value_at(store) == 1.0
    threading.Event().wait(3.0)  # the lease's second, and one each for two dates, which S3 tells in whole seconds
    save(state(2.0), store=store, no_dist=True)
    assert len(names(store)) == 2 and value_at(store) == 2.0


@pytest.mark.parametrize(
    "trial",
    [
        (2, "save", 1, "write", "kill", True),
        (2, "async_save", 0, "commit", "kill", True),
        (2, "load", 1, "read", "raise", True),
    ],
    ids=lambda trial: "-".join(map(str, trial[:5])),
)
def test_the_others_hear_of_a_mishap(s3: S3Server, url: str, trial: tuple[int, str, int, str, str, bool]) -> None:
    check_trial(url, *trial, s3.environment())
