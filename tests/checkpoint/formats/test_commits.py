"""Commits that meet others, and requests that take effect and then raise, as when a reply is lost: what was committed
is not removed, and what would not be read is no success.
"""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from checkpoint.faults import FaultySystem
from checkpoint.formats.deepspeed import made
from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, FileSystemWriter, load, save, seal, verify
from terrazzo.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from terrazzo.checkpoint.format_utils import dcp_to_torch_save
from terrazzo.checkpoint.formats import DCPWriter, HuggingFaceWriter
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.stores import LocalStore, MemoryStore, Place, Store, Upload, Version
from terrazzo.checkpoint.tools.compare import compare
from terrazzo.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointIOError,
    CheckpointNotFoundError,
)
from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh


class LosesAReply(MemoryStore):
    """Its request number `at` takes effect, and raises."""

    lease_seconds = 0.0
    at = -1
    count = 0

    def put(self, *args: Any, **options: Any) -> Version:
        version = super().put(*args, **options)
        self._answered()
        return version

    def delete(self, keys: Iterable[str]) -> None:
        super().delete(keys)
        self._answered()

    delete_if = Store.delete_if  # by two requests, as in stores that cannot delete on condition

    def stream(self, key: str) -> Upload:
        upload = super().stream(key)
        finish: Callable[[], None] = upload.finish
        upload.finish = lambda: (finish(), self._answered())  # type: ignore[method-assign, assignment]
        return upload

    def _answered(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise TimeoutError(110, "the reply was lost")


@pytest.mark.parametrize("to", ["native", "dcp", "huggingface", "torch_save", "deepspeed"])
@pytest.mark.parametrize("replacing", [False, True])
def test_any_reply_of_a_conversion_is_lost(to: str, replacing: bool, tmp_path: Path) -> None:
    if to == "deepspeed":
        if replacing:
            pytest.skip("it replaces nothing")
        made.write(tmp_path, 2)
        old = new = tmp_path / "native"
        convert(new, tmp_path / "expected", to)
        expected = [tmp_path / "expected"]
    else:
        old, new = tmp_path / "old.pt", tmp_path / "new.pt"
        torch.save({"w": torch.ones(300), "v": torch.ones(2)}, old)
        torch.save({"w": torch.full((300,), 2.0), "v": torch.full((2,), 2.0)}, new)
        expected = [old, new] if replacing else [new]
    at = failed = 0
    absent = []
    while True:
        at += 1
        store = LosesAReply()
        place = Place(store) / "file.pt" if to == "torch_save" else Place(store)
        if replacing:
            convert(old, place, to)
        store.at = store.count + at
        try:
            convert(new, place, to, overwrite=replacing)
        except (OSError, CheckpointError):
            failed += 1
        if store.count < store.at:
            break
        try:
            assert any(not list(compare(Checkpoint(one), Checkpoint(place))) for one in expected), at
        except CheckpointNotFoundError:
            assert not replacing, at
            absent.append(at)
            convert(new, place, to)
            assert not list(compare(Checkpoint(expected[-1]), Checkpoint(place))), at
    last = [at - 1] if to != "deepspeed" else [at - 2, at - 1]  # there the commit is a removal, by two requests
    assert failed >= 1 and not {*last} & {*absent}, "the last request is the commit, or comes after it"


@pytest.mark.parametrize("to", ["native", "dcp", "huggingface", "torch_save"])
@pytest.mark.parametrize("replacing", [False, True])
def test_any_operation_of_a_conversion_meets_a_full_disk(to: str, replacing: bool, tmp_path: Path) -> None:
    """A typed error that says where; what was there is whole, and nothing else looks as if it were."""
    old, new = {"w": torch.ones(300)}, {"w": torch.full((300,), 2.0)}
    for name, state in (("old.pt", old), ("new.pt", new)):
        torch.save(state, tmp_path / name)
    met = 0
    for at in range(200):
        folder = tmp_path / str(at)
        place = folder / "file.pt" if to == "torch_save" else folder
        folder.mkdir()
        if replacing:
            convert(tmp_path / "old.pt", place, to)
        system = FaultySystem(at, "ENOSPC")
        store = Place(LocalStore(folder, system))
        failed = False
        try:
            convert(tmp_path / "new.pt", store / "file.pt" if to == "torch_save" else store, to, overwrite=replacing)
        except CheckpointError as error:
            failed = True
            assert not isinstance(error, CheckpointIOError) or "bytes are free in" in str(error), error
            met += isinstance(error, CheckpointIOError)
        if system.happened is None:
            break
        expected = [old, new] if replacing and failed else [new]
        try:
            found = Checkpoint(place)["w"][...]
            assert any(torch.equal(found, state["w"]) for state in expected), at
        except CheckpointNotFoundError:
            assert failed and not replacing, at
    assert at < 199 and met > 3


def test_a_seal_and_a_consolidation_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "h", "huggingface")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("put", "stream", "upload"):
        monkeypatch.setattr(LocalStore, name, full)
    for run in (
        lambda: seal(tmp_path / "a.pt"),
        lambda: consolidate_safetensors_files(str(tmp_path / "h"), str(tmp_path / "new"), {"w": 1}),
        lambda: dcp_to_torch_save(tmp_path / "a.pt", tmp_path / "b.pt"),
    ):
        with pytest.raises(CheckpointIOError, match=rf"{tmp_path}.*No space left .* bytes are free in") as raised:
            run()
        assert raised.value.errno == errno.ENOSPC
    assert not (tmp_path / "b.pt").exists() and verify(tmp_path / "a.pt") == []


class LosesTheCommit(LocalStore):
    def put(self, key: str, *args: Any, **options: Any) -> Version:
        version = super().put(key, *args, **options)
        if key == ".metadata":
            raise TimeoutError(110, "the reply was lost")
        return version


def save_for_pytorch(folder: str) -> str:
    """Twice on all ranks; the second reply to the commit is lost."""
    for fill, store in ((1.0, LocalStore(folder)), (2.0, LosesTheCommit(folder))):
        state = {f"of {dist.get_rank()}": torch.full((5,), fill), "w": torch.full((3,), fill)}
        try:
            save(state, storage_writer=DCPWriter(store))
        except CheckpointError as error:
            return str(error)
    return ""


def test_a_lost_reply_to_the_commit_for_pytorch(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_for_pytorch, str(tmp_path))
    assert first == second and "the reply was lost" in first and "may have been committed" in first
    state = {name: torch.zeros(size) for name, size in (("of 0", 5), ("of 1", 5), ("w", 3))}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    assert all(tensor.eq(2).all() for tensor in state.values())
    save({"w": torch.full((3,), 3.0)}, storage_writer=DCPWriter(tmp_path), no_dist=True)
    load(state := {"w": torch.zeros(3)}, checkpoint_id=tmp_path, no_dist=True)
    assert state["w"].eq(3).all()


class Overtaken(MemoryStore):
    """The reply to a commit is late: by then another save has committed, which shares files with the first one."""

    lease_seconds = 0.0
    overtaking = False

    def adopt(self, other: Store, key: str, name: str) -> str | None:
        return key if other is self else None

    def put(self, key: str, *args: Any, **options: Any) -> Version:
        version = super().put(key, *args, **options)
        if key == MANIFEST and self.overtaking:
            self.overtaking = False
            save({"w": torch.ones(9000), "later": 1}, store=self, base=self, no_dist=True)
            raise TimeoutError(110, "the reply was lost")
        return version


def test_a_later_save_builds_on_a_commit_whose_reply_was_lost() -> None:
    store = Overtaken()
    store.overtaking = True
    with pytest.raises(CheckpointError, match="the reply was lost"):
        save({"w": torch.ones(9000)}, store=store, no_dist=True)
    assert Checkpoint(store)["later"] == 1 and Checkpoint(store)["w"][...].eq(1).all()
    save({"w": torch.zeros(3)}, store=store, no_dist=True)
    assert sum(entry.key.startswith("data-") for entry in store.list()) == 1, "nothing stays that nobody needs"


def incomplete(path: str) -> list[str]:
    """For each writer: a checkpoint, and then saves whose files would not make one. What is left, and the errors."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    told = []
    for kind in (FileSystemWriter, DCPWriter, HuggingFaceWriter, dcp.FileSystemWriter):
        place = Path(path, f"{kind.__module__}.{kind.__name__}")
        save({"w": sharded}, storage_writer=kind(place))
        # Rank 1 lacks its shard; it has the whole tensor as well; its folder is another one of the same name.
        for on_1, elsewhere in (({}, place), ({"w": whole}, place), ({"w": sharded}, Path(path, "other", place.name))):
            if kind is dcp.FileSystemWriter and elsewhere != place:
                continue  # PyTorch's own commit does not look
            with pytest.raises(CheckpointError) as found:
                save({"w": sharded * 2} if rank == 0 else on_1, storage_writer=kind(place if rank == 0 else elsewhere))
            told.append(str(found.value))
            if kind is not dcp.FileSystemWriter:  # which overwrites its files
                assert Checkpoint(place)["w"][...].equal(whole), kind
            dist.barrier()
    return told


def test_what_ranks_have_written_must_make_up_the_tensors_and_be_in_one_folder(tmp_path: Path) -> None:
    told, _ = run_ranks(2, incomplete, str(tmp_path))
    gap, twice = "4 of 8 elements were not written", "some elements were written more than once"
    elsewhere = "the folder must be the same for all ranks"
    expected = [gap, twice, elsewhere] * 2 + ["of the 32 bytes"] * 2 + ["not the same folder on all ranks", gap, gap]
    for message, part in zip(told, expected, strict=True):
        assert part in message


@pytest.mark.parametrize("passed", [1, 2], ids=["while this one writes", "while this one commits"])
@pytest.mark.parametrize("kind", [DCPWriter, HuggingFaceWriter])
def test_a_save_in_another_format_commits_meanwhile(
    kind: type[DCPWriter | HuggingFaceWriter], passed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two formats in one folder this one would not be read, so its save must not say that it has succeeded."""
    module = importlib.import_module(kind.__module__)
    check, calls = module.check_is_found, 0

    def then_another(*args: Any) -> None:
        nonlocal calls
        check(*args)
        calls += 1
        if calls == passed:
            save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)

    with monkeypatch.context() as patch:
        patch.setattr(module, "check_is_found", then_another)
        with pytest.raises(CheckpointError, match="holds a checkpoint of the format native|holds two checkpoints"):
            save({"w": torch.zeros(3)}, storage_writer=kind(tmp_path), no_dist=True)
    assert calls == passed
    if kind is DCPWriter and passed == 2:  # its metadata has taken the place of the other's marker, so neither is read
        with pytest.raises(CheckpointFormatError, match="holds two checkpoints"):
            Checkpoint(tmp_path)
    else:
        assert torch.equal(Checkpoint(tmp_path)["w"][...], torch.ones(3)) and verify(tmp_path) == []
