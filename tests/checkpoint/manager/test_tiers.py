"""Two places: fast local folders of the hosts, and the store that some checkpoints are copied to."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from checkpoint.newer import make_newer
from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, CheckpointManager, verify
from terrazzo.checkpoint.manager import Save, housekeeping, records
from terrazzo.checkpoint.manager.hosts import HostsStore, PeerStore, serve_folder
from terrazzo.checkpoint.manager.job import JobLease
from terrazzo.checkpoint.stores import LocalStore, MemoryStore, Request, Store
from terrazzo.comm.serving import Client, Server, WrongSecretError
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointException,
    CheckpointExistsError,
    CheckpointFormatError,
    CheckpointManagerError,
)
from terrazzo.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

LIMIT = timedelta(seconds=60)
ROWS = 50_000


def whole(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 2.0).reshape(ROWS, 2) + step


def state(step: int) -> dict:
    """A tensor that is cut among the ranks, one that all have, and a value."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(whole(step), mesh, [Shard(0)]), "b": torch.full((9,), float(step)), "step": step}


def check_restored(manager: CheckpointManager, which: int | str, expected: int) -> None:
    target = state(-5)
    assert manager.restore(which, target) == target["step"] == expected
    weight = target["w"]
    assert isinstance(weight, DTensor) and torch.equal(weight.full_tensor(), whole(expected))
    assert torch.equal(target["b"], torch.full((9,), float(expected)))


def local_of(folder: str, hosts: int) -> Path:
    """The local folder of this rank's host: ranks are dealt to hosts in blocks."""
    return Path(folder) / f"host{dist.get_rank() * hosts // dist.get_world_size()}"


def folders(path: Path) -> list[int]:
    return sorted(int(each.name.removeprefix("global_step")) for each in path.glob("global_step*"))


def live(folder: str, hosts: int) -> None:
    root = Path(folder) / "root"
    options = {"local": local_of(folder, hosts), "copy_every": 3, "keep_local": 2, "keep": 2, "timeout": LIMIT}
    with CheckpointManager(root, save=Save(steps=10), best="loss", **options) as manager:
        for step in range(1, 81):
            manager.save(step, lambda step=step: state(step), {"loss": abs(step - 20.0)})
        manager.wait()
        # The last two and the best are local; of 30 and 60, which were copied, the root keeps the last two.
        assert manager.steps() == [20, 30, 60, 70, 80], manager.steps()
        check_restored(manager, "latest", 80)
        check_restored(manager, "best", 20)
        check_restored(manager, 60, 60)
    dist.barrier()
    assert folders(root) == [30, 60, 80], "every third, and the newest at the end; the best and the last two are kept"
    assert (root / "latest").read_text() == "global_step80" and verify(root / "global_step80") == []
    assert [Checkpoint(root / f"global_step{step}")["step"] for step in (60, 80)] == [60, 80]


@pytest.mark.parametrize("hosts", [1, 2])
def test_every_third_is_copied(tmp_path: Path, hosts: int):
    run_ranks(2, live, str(tmp_path), hosts)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not any(name.endswith((".lease", ".tmp", ".lock")) or name.startswith("host-") for name in names), names
    for host in range(hosts):
        assert (tmp_path / f"host{host}" / "latest").read_text() == "global_step80"
        assert len(list((tmp_path / f"host{host}" / "global_step80").glob("data-*"))) == 2, "its own and a replica"


def save_two(folder: str, hosts: int, replicas: int) -> None:
    local = local_of(folder, hosts)
    with CheckpointManager(
        Path(folder) / "root", local=local, copy_every=2, replicas=replicas, timeout=LIMIT
    ) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        manager.wait()
        manager.save(3, state(3))
        manager.wait()
        raise ZeroDivisionError("the run dies here, and copies nothing more")


def save_and_die(folder: str, hosts: int, replicas: int = 1) -> None:
    with pytest.raises(ZeroDivisionError):
        save_two(folder, hosts, replicas)


def resume(folder: str, hosts: int, expected: int) -> None:
    with CheckpointManager(
        Path(folder) / "root", local=local_of(folder, hosts), copy_every=2, timeout=LIMIT
    ) as manager:
        assert manager.latest_step() == expected
        check_restored(manager, "latest", expected)
        manager.save(expected + 1, state(expected + 1))
    assert manager.latest_step() == expected + 1


def test_a_host_is_lost(tmp_path: Path):
    """What was on its disk is on that of the next host; other worlds resume from it, and go on."""
    run_ranks(4, save_and_die, str(tmp_path / "before"), 2)
    assert folders(tmp_path / "before" / "root") == [2], "step 3 is local only"
    for lost in (0, 1):
        for world, hosts in ((4, 2), (2, 2), (1, 1), (2, 1)):
            now = tmp_path / f"{lost}-{world}-{hosts}"
            shutil.copytree(tmp_path / "before", now)
            shutil.rmtree(now / f"host{lost}")
            if hosts == 1 and lost == 0:
                os.rename(now / "host1", now / "host0")
            run_ranks(world, resume, str(now), hosts, 3)
            assert (now / "root" / "latest").read_text() == "global_step4"


def test_what_is_not_whole_is_not_used(tmp_path: Path):
    """Without replicas a lost host takes its part of a local checkpoint along: the newest is the copy in the store."""
    run_ranks(2, save_and_die, str(tmp_path), 2, 0)
    shutil.rmtree(tmp_path / "host1")
    run_ranks(2, resume, str(tmp_path), 2, 2)
    assert folders(tmp_path / "host0") == [3], "of the damaged step 3 nothing stays but what has replaced it"
    assert (tmp_path / "root" / "latest").read_text() == "global_step3"


def go_on_without_a_folder(folder: str) -> None:
    """Each host in turn lacks the folder of a step that is removed: it came back with an empty disk, for example."""
    for lost in (0, 1):
        local = local_of(f"{folder}/{lost}", 2)
        with CheckpointManager(
            Path(folder) / f"root{lost}", local=local, keep=1, keep_local=1, timeout=LIMIT
        ) as manager:
            manager.save(1, state(1))
            manager.wait()
            if dist.get_rank() == lost:
                shutil.rmtree(local / "global_step1")
            dist.barrier()
            manager.save(2, state(2))
            manager.wait()
            check_restored(manager, "latest", 2)
        assert manager.steps() == [2] and folders(local) == [2]


def test_a_host_lacks_the_folder_of_a_step_that_is_removed(tmp_path: Path):
    run_ranks(2, go_on_without_a_folder, str(tmp_path))


def meet_what_cannot_be_read(folder: str) -> None:
    """The local step 3, of which the root has no copy, is of another release on some hosts."""
    local = local_of(folder, 2)
    before = {path.name: path.read_bytes() for path in (local / "global_step3").iterdir()}
    with CheckpointManager(Path(folder) / "root", local=local, keep_local=1, timeout=LIMIT) as manager:
        assert manager.steps() == [2]
        with pytest.raises(CheckpointFormatError, match=r"global_step3 cannot be read.*restore\(2\)"):
            manager.latest_step()
        with pytest.raises(CheckpointFormatError, match="format version 2"):
            manager.restore("latest", state(0))
        with pytest.raises(CheckpointExistsError, match=r"\(2, 3\), and this run has not restored"):
            manager.save(4, state(4))
        check_restored(manager, 2, 2)
        with pytest.raises(CheckpointExistsError, match="global_step3 cannot be replaced"):
            manager.save(3, state(3))
        manager.save(4, state(4))
    assert manager.latest_step() == 4 and folders(local) == [3, 4]
    assert {path.name: path.read_bytes() for path in (local / "global_step3").iterdir()} == before


def test_a_local_step_of_another_release(tmp_path: Path):
    run_ranks(2, save_and_die, str(tmp_path / "before"), 2)
    for newer in ([0, 1], [1]):
        now = tmp_path / f"newer-{len(newer)}"
        shutil.copytree(tmp_path / "before", now)
        for host in newer:
            make_newer(now / f"host{host}" / "global_step3")
        run_ranks(2, meet_what_cannot_be_read, str(now))


def connect_pair(tmp_path: Path) -> tuple[Server, PeerStore]:
    sent: list[str] = []
    server = serve_folder(LocalStore(tmp_path), "127.0.0.1", 5.0, lambda folder, key: sent.append(f"{folder}/{key}"))
    return server, PeerStore(Client(server.address, 5.0))


def test_a_peer_is_a_store(tmp_path: Path):
    """What another host's folder says and does is what a local store says and does."""
    server, peer = connect_pair(tmp_path / "there")
    there = LocalStore(tmp_path / "there")
    step = peer.beneath("global_step1")
    assert peer.list() == [] and list(peer.folders()) == []
    data = os.urandom(9_000_000)  # of several pieces
    (tmp_path / "here").write_bytes(data)
    step.send("data-1", str(tmp_path / "here"))
    step.put("latest", b"x")
    assert list(peer.folders()) == ["global_step1"]
    assert sorted(step.list(), key=lambda e: e.key) == sorted(there.beneath("global_step1").list(), key=lambda e: e.key)
    assert bytes(step.get("data-1")[0]) == data and step.stat("latest").size == 1 and not step.exists("absent")
    assert [entry.key for entry in step.list("data-")] == ["data-1"] and step.list(".") == []
    ends = [bytearray(5_000_000), bytearray(7)]
    for _ in step.read([Request("data-1", 3, [memoryview(end) for end in ends])]):
        pass
    assert bytes(ends[0] + ends[1]) == data[3:5_000_010]
    assert peer.beneath("global_step2").adopt(step, "data-1", "data-2") == "data-2"
    with pytest.raises(FileNotFoundError):
        step.get("absent")
    with pytest.raises(CheckpointCorruptError, match="data-1 has 9000000 bytes, more than the 8999999 "):
        step.get("data-1", 8_999_999)
    with pytest.raises(OSError, match="ends"):
        list(step.read([Request("latest", 0, [memoryview(bytearray(5))])]))
    step.delete(["data-1", "latest", "absent"])
    peer.remove_folder("global_step1")
    assert list(peer.folders()) == ["global_step2"]
    server.close()
    with pytest.raises(OSError, match="does not answer"):
        for _ in range(3):  # the first may meet a connection that is just being closed
            step.list()


@pytest.mark.parametrize(
    ("folder", "operation", "arguments"),
    [
        ("..", "list", ("",)),
        ("global_step1/..", "list", ("",)),
        ("", "get", ("../secret",)),
        ("global_step1", "get", ("../../secret",)),
        ("global_step1", "file", ("/tmp/x",)),
        ("global_step1", "delete", (["data-1", "../../secret"],)),
        ("global_step1", "__init__", ("/tmp",)),
        ("global_step1", "adopt", ("../..", "secret", "mine")),
        ("global_step1", "adopt", ("global_step2", "secret", "../mine")),
        ("", "remove_folder", (7,)),
        ("", "exec", ("ls",)),
        ("", "read", ("secret", "0", 5)),
    ],
)
def test_a_peer_serves_nothing_else(tmp_path: Path, folder: str, operation: str, arguments: tuple):
    (tmp_path / "secret").write_bytes(b"mine")
    server, peer = connect_pair(tmp_path / "there")
    with pytest.raises(OSError, match=r"Error: "):
        peer.beneath(folder)._call(operation, *arguments)
    assert peer.list() == [] and (tmp_path / "secret").read_bytes() == b"mine"
    server.close()


def test_a_peer_wants_the_secret(tmp_path: Path):
    server, peer = connect_pair(tmp_path)
    stranger = PeerStore(Client(msgspec.structs.replace(server.address, secret=b"0" * 32), 5.0))
    with pytest.raises(WrongSecretError, match="has another secret"):
        stranger.list()
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, server.address.secret + b"\xff" * 64):
        with socket.create_connection((server.address.host, server.address.port)) as connection:
            with suppress(OSError):  # it is closed, which may show at once
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                greeting = connection.recv(1000)
                assert server.address.secret not in greeting and connection.recv(1) == b""
    assert peer.list() == []
    server.close()


def fail_on_a_peer(folder: str) -> str:
    """The disk of the next host is full."""
    local = Path(folder) / f"host{dist.get_rank()}"
    with CheckpointManager(Path(folder) / "root", local=local, copy_every=1, timeout=LIMIT) as manager:
        manager.save(1, state(1))
        manager.wait()
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:

                def full(self: LocalStore, key: str) -> None:
                    raise OSError(28, "No space left on device")

                patch.setattr(LocalStore, "stream", full)
            with pytest.raises(CheckpointException, match="No space left") as failed:
                manager.save(2, state(2))
                manager.wait()
        assert manager.save(3, state(3))
        check_restored(manager, "latest", 3)
    return str(failed.value)


def test_a_replica_that_cannot_be_made_fails_the_save(tmp_path: Path):
    told = run_ranks(2, fail_on_a_peer, str(tmp_path))
    assert all("rank 0" in each for each in told)
    for name in ("host0", "host1", "root"):
        assert folders(tmp_path / name)[-1] == 3
        for step in folders(tmp_path / name):
            assert verify(tmp_path / name / f"global_step{step}") == [] if name == "root" else True


def test_keeps_until_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A store that cannot be reached costs local space and nothing else."""
    down = threading.Event()
    store, stream = MemoryStore(), MemoryStore.stream

    def unreachable(self: MemoryStore, key: str):
        if down.is_set():
            raise OSError(110, "Connection timed out")
        return stream(self, key)

    monkeypatch.setattr(MemoryStore, "stream", unreachable)
    with CheckpointManager(store, local=tmp_path, copy_every=2, keep_local=1) as manager:
        down.set()
        for step in range(1, 8):
            manager.save(step, {"w": torch.full((3,), float(step))})
        with pytest.raises(CheckpointException, match="timed out"):
            manager.wait()
        assert folders(tmp_path) == [2, 4, 6, 7] and list(store.folders()) == []
        assert "until copied" in (tmp_path / "kept.json").read_text()
        down.clear()
        manager.wait()
        assert folders(tmp_path) == [7] and sorted(store.folders()) == ["global_step2", "global_step4", "global_step6"]
        assert bytes(store.get("latest")[0]) == b"global_step6"
    assert sorted(store.folders())[-1] == "global_step7" and bytes(store.get("latest")[0]) == b"global_step7"
    target = {"w": torch.zeros(3)}
    with CheckpointManager(store) as manager:
        assert manager.restore("latest", target) == 7 and target["w"].eq(7).all()


def test_what_the_root_keeps_less_long_than_the_hosts_is_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that it is removed from the root does not make it stay in the local folder."""
    copied, copy_checkpoint = [], housekeeping.copy_checkpoint

    def copy(source: HostsStore, target: Store) -> None:
        copied.append(Path(target.location).name)
        copy_checkpoint(source, target)

    monkeypatch.setattr(housekeeping, "copy_checkpoint", copy)
    with CheckpointManager(tmp_path / "root", local=tmp_path / "local", keep=1, keep_local=3) as manager:
        for step in range(1, 7):
            manager.save(step, {"w": torch.full((3,), float(step))})
            manager.wait()
    assert copied == [f"global_step{step}" for step in range(1, 7)]
    assert folders(tmp_path / "root") == [6] and folders(tmp_path / "local") == [4, 5, 6]


def test_going_back_with_a_local_folder(tmp_path: Path):
    """A step that is saved again replaces what the store has of it, when its turn comes."""
    values = {"w": torch.zeros(3)}
    with CheckpointManager(tmp_path / "root", local=tmp_path / "local", keep_local=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.full((3,), float(step))})
    with CheckpointManager(tmp_path / "root", local=tmp_path / "local", keep_local=1) as manager:
        assert manager.steps() == [1, 2, 3] and manager.restore(2, values) == 2 and values["w"].eq(2).all()
        assert manager.save(3, {"w": torch.full((3,), -3.0)})
        manager.wait()
        assert manager.restore("latest", values) == 3 and values["w"].eq(-3).all()
        assert manager.steps() == [1, 2, 3] and folders(tmp_path / "local") == [3]
    assert Checkpoint(tmp_path / "root")["w"][...].eq(-3).all()
    assert verify(tmp_path / "root" / "global_step3") == []
    with pytest.raises(CheckpointManagerError, match="a folder of this host"):
        CheckpointManager(tmp_path / "root", local="s3://bucket/run")
    with pytest.raises(CheckpointManagerError, match="copy_every"):
        CheckpointManager(tmp_path / "root", local=tmp_path / "local", copy_every=0)


def build_on(folder: str) -> None:
    frozen = torch.randn(200, 1000, generator=torch.Generator().manual_seed(3))
    local = Path(folder) / f"host{dist.get_rank()}"
    with CheckpointManager(
        Path(folder) / "root", local=local, reuse=True, keep=1, keep_local=1, timeout=LIMIT
    ) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"frozen": frozen, "w": state(step)["w"]})
            manager.wait()
        target = {"frozen": torch.zeros(200, 1000), "w": state(0)["w"]}
        assert manager.restore("latest", target) == 3
        assert torch.equal(target["frozen"], frozen) and torch.equal(target["w"].full_tensor(), whole(3))


def test_unchanged_tensors_are_not_written_again(tmp_path: Path):
    run_ranks(2, build_on, str(tmp_path))
    for name in ("host0", "host1", "root"):
        assert folders(tmp_path / name) == [3]
    assert verify(tmp_path / "root" / "global_step3") == []
    target = Checkpoint(tmp_path / "root")
    assert torch.equal(target["w"][...], whole(3)) and target["frozen"].shape == (200, 1000)


def save_on_base(folder: str, step: int) -> None:
    """A step whose large part is that of the step before; the run dies then."""
    frozen = torch.arange(200_000.0)
    with (
        suppress(ZeroDivisionError),
        CheckpointManager(
            Path(folder) / "root", local=local_of(folder, 2), reuse=True, keep_local=1, copy_every=9, timeout=LIMIT
        ) as manager,
    ):
        if step > 1:
            target = {"frozen": torch.zeros(200_000), **state(0)}
            assert manager.restore("latest", target) == target["step"] == step - 1
            assert torch.equal(target["frozen"], frozen)
        manager.save(step, {"frozen": frozen, **state(step)})
        manager.wait()
        raise ZeroDivisionError


def test_unchanged_tensors_have_their_replicas_again_when_a_host_was_lost(tmp_path: Path):
    """The other host has what the lost one had; what is saved then must not be on that one alone."""
    for step, (lost, files) in enumerate((("host1", 2), ("", 2), ("host0", 3), ("", 2)), 1):  # 3: one is the base's
        run_ranks(2, save_on_base, str(tmp_path), step)
        for host in (0, 1):
            assert len(list((tmp_path / f"host{host}" / f"global_step{step}").glob("data-*"))) == files, step
        if lost:
            shutil.rmtree(tmp_path / lost)


def test_local_folders_of_other_runs(tmp_path: Path):
    """A run that is begun anew does not resume from what an older one has left on its hosts."""
    values = {"w": torch.zeros(3)}
    with CheckpointManager(tmp_path / "old", local=tmp_path / "local") as manager:
        manager.save(1000, values)
    shutil.copytree(tmp_path / "local", tmp_path / "plain")
    (tmp_path / "plain" / "run.id").unlink()
    for local in ("local", "plain"):
        with pytest.raises(CheckpointException, match="of another run than"):
            CheckpointManager(tmp_path / "new", local=tmp_path / local)
    with pytest.raises(CheckpointManagerError, match="different folders"):
        CheckpointManager(tmp_path / "new", local=f"{tmp_path}/./new")
    with CheckpointManager(tmp_path / "old", local=tmp_path / "local") as manager:
        assert manager.steps() == [1000]
    shutil.rmtree(tmp_path / "old")
    with pytest.raises(CheckpointException, match="of another run than"):
        CheckpointManager(tmp_path / "old", local=tmp_path / "local")
    shutil.rmtree(tmp_path / "local")
    with CheckpointManager(tmp_path / "old", local=tmp_path / "local") as manager:
        assert manager.steps() == []


def test_who_only_looks_copies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    values = {"w": torch.zeros(3)}
    with (
        pytest.raises(ZeroDivisionError),
        CheckpointManager(tmp_path / "root", local=tmp_path / "local", copy_every=2) as manager,
    ):
        manager.save(1, values)
        raise ZeroDivisionError
    with CheckpointManager(tmp_path / "root", local=tmp_path / "local") as manager:
        assert manager.latest_step() == 1
        with manager.hold(1) as store:
            assert Checkpoint(store)["w"].shape == (3,)
        manager.wait()
    assert folders(tmp_path / "root") == []
    with CheckpointManager(tmp_path / "root", local=tmp_path / "local") as manager:
        manager.restore("latest", values)  # a run that has nothing more to do
    assert folders(tmp_path / "root") == [1]
    monkeypatch.setattr(JobLease, "take", None)  # not needed, so that no job that saves now is refused
    with CheckpointManager(tmp_path / "root", local=tmp_path / "local") as manager:
        manager.restore("latest", values)


def ask_little(folder: str) -> list[str]:
    asked: list[str] = []
    with (
        pytest.MonkeyPatch.context() as patch,
        CheckpointManager(Path(folder) / "root", local=local_of(folder, 2), keep_local=3, timeout=LIMIT) as manager,
    ):
        patch.setattr(records, "_UNIT", -1.0)  # else what is new is looked at twice
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.zeros(3)})
        manager.wait()
        if dist.get_rank() == 0:
            call = PeerStore._call

            def told(self: PeerStore, operation: str, *arguments: object, **options: object) -> object:
                asked.append(operation)
                return call(self, operation, *arguments, **options)

            patch.setattr(PeerStore, "_call", told)
            assert manager._tiers.look().steps == [1, 2, 3]
            patch.setattr(PeerStore, "_call", call)
        dist.barrier()
    return asked


def test_what_is_whole_is_looked_at_once(tmp_path: Path):
    assert run_ranks(2, ask_little, str(tmp_path)) == [["folders"], []]
