"""What is there and cannot be read is never taken for absent; and what a link leads to is not the run's to remove."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import terrazzo
from checkpoint.newer import make_newer
from ranks import run_ranks
from terrazzo.checkpoint import CheckpointManager, load, save, verify
from terrazzo.checkpoint.manager import Keep, Save
from terrazzo.checkpoint.stores import LocalStore
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointFormatError,
    CheckpointIOError,
    CheckpointNotFoundError,
)

MANIFEST = "manifest.terrazzo"


def state(step: int) -> dict:
    return {"w": torch.full((6, 4), float(step)), "step": step}


def save_steps(root: Path, *steps: int) -> None:
    with CheckpointManager(root) as manager:
        for step in steps:
            manager.save(step, state(step), {"loss": float(step)})


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def flip(folder: Path) -> None:
    data = bytearray((folder / MANIFEST).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / MANIFEST).write_bytes(data)


def drop_data(folder: Path) -> None:
    """The file of the metrics, if they are many."""
    for path in folder.glob("data-*"):
        path.unlink()


class Refusing:
    """`os`, but files of one step cannot be opened."""

    def __init__(self, step: int) -> None:
        self._name = f"global_step{step}"

    def __getattr__(self, name: str):
        return getattr(os, name)

    def open(self, path: object, *arguments: object) -> int:
        if Path(str(path)).parent.name == self._name:
            raise PermissionError(13, "Permission denied", str(path))
        return os.open(path, *arguments)


def start_again(root: str, kind: str) -> None:
    """What a training script does that was written as docs/manager.md says."""
    error = {"newer": CheckpointFormatError, "flipped": CheckpointCorruptError, "refused": CheckpointIOError}[kind]
    store = LocalStore(root, Refusing(20)) if kind == "refused" else LocalStore(root)
    with CheckpointManager(store, save=Save(first=True), keep=1) as manager:
        assert manager.steps() == [10]
        with pytest.raises(error, match=r"global_step20 cannot be read, and it may be the newest.*restore\(10\)"):
            manager.latest_step()
        for which in ("latest", 20):
            with pytest.raises(CheckpointError, match="global_step20"):
                manager.restore(which, state(0))
        with pytest.raises(CheckpointError, match="global_step20"), manager.hold("latest"):
            pass
        with pytest.raises(CheckpointExistsError, match=r"of 2 steps \(10, 20\), and this run has not restored"):
            manager.save(30, state(30), force=True)
        target = state(0)
        assert manager.restore(10, target) == 10 and target["step"] == 10
        with pytest.raises(CheckpointExistsError, match="global_step20 cannot be replaced.*move it away"):
            manager.save(20, state(20), force=True)
        manager.save(11, state(11), force=True)


@pytest.mark.parametrize(("kind", "hosts"), [("newer", 2), ("flipped", 1)])
def test_the_newest_cannot_be_read(tmp_path: Path, kind: str, hosts: int):
    save_steps(tmp_path, 10, 20)
    {"newer": make_newer, "flipped": flip}[kind](tmp_path / "global_step20")
    (tmp_path / "global_step20" / "read-0123456789ab.lease").touch()  # of a reader that died
    before = files(tmp_path / "global_step20")
    run_ranks(hosts, start_again, str(tmp_path), kind)
    # The run went on from 10, so 11 is newer than 20, which stays; the run is not held up again.
    with CheckpointManager(tmp_path, keep=1) as manager:
        assert manager.latest_step() == 11 and manager.restore("latest", state(0)) == 11
        manager.save(12, state(12))
    assert files(tmp_path / "global_step20") == before and not (tmp_path / "global_step10").exists()
    assert '"20":["cannot be read"]' in (tmp_path / "kept.json").read_text()
    assert (tmp_path / "latest").read_text() == "global_step12"


def test_the_newest_cannot_be_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It may be whole, and then `Keep` would select others, so nothing is removed."""
    save_steps(tmp_path, 10, 20)
    start_again(str(tmp_path), "refused")
    assert "could not be removed" in caplog.text and "Permission denied" in caplog.text
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == [10, 11, 20]


def test_none_can_be_read(tmp_path: Path):
    """A release is rolled back."""
    save_steps(tmp_path, 10, 20)
    for step in (10, 20):
        make_newer(tmp_path / f"global_step{step}")
    before = files(tmp_path)
    with CheckpointManager(tmp_path, keep=1) as manager:
        assert manager.steps() == []
        with pytest.raises(CheckpointFormatError, match="global_step20.*format version 2.*use a release that reads it"):
            manager.latest_step()
        with pytest.raises(CheckpointFormatError, match="global_step20"):
            manager.restore("latest", state(0))
        with pytest.raises(CheckpointExistsError, match="has not restored"):
            manager.save(30, state(30))
    assert files(tmp_path) == before
    with pytest.raises(CheckpointFormatError, match="format version 2"):
        load(state(0), checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match="cannot read, so it is not replaced"):
        save(state(0), checkpoint_id=tmp_path / "global_step20")
    assert files(tmp_path) == before


def test_a_file_that_the_record_needs_is_missing(tmp_path: Path):
    with CheckpointManager(tmp_path) as manager:
        for step in (10, 20):
            manager.save(step, state(step), {f"metric {number}": number for number in range(1000)})
    drop_data(tmp_path / "global_step20")
    with CheckpointManager(tmp_path, keep=1) as manager:
        with pytest.raises(CheckpointCorruptError, match="global_step20: a file of the checkpoint is missing"):
            manager.latest_step()
        assert manager.steps() == [10]


def test_an_older_one_that_cannot_be_read_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_steps(tmp_path, 10, 20)
    make_newer(tmp_path / "global_step10")
    before = files(tmp_path / "global_step10")
    with CheckpointManager(tmp_path, keep=1) as manager:
        assert manager.latest_step() == 20 and manager.restore("latest", state(0)) == 20
        for step in (30, 40):
            manager.save(step, state(step))
    assert manager.steps() == [40] and files(tmp_path / "global_step10") == before
    assert caplog.text.count("global_step10 cannot be read, so it is neither used, replaced nor removed") == 1


def test_a_run_that_went_back_to_one_that_cannot_be_read_now(tmp_path: Path):
    """The newest has not the largest number: `latest` says which it is."""
    save_steps(tmp_path, 10, 50)
    with CheckpointManager(tmp_path) as manager:
        manager.restore(10, state(0))
        manager.save(20, state(20))
    flip(tmp_path / "global_step20")
    with CheckpointManager(tmp_path) as manager, pytest.raises(CheckpointCorruptError, match=r"restore\(50\)"):
        manager.latest_step()


@pytest.mark.parametrize("left", [(), (10,)])
def test_latest_names_what_is_gone(tmp_path: Path, left: tuple[int, ...]):
    save_steps(tmp_path, 10, 20)
    for step in {10, 20} - set(left):
        shutil.rmtree(tmp_path / f"global_step{step}")
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointNotFoundError, match="latest names global_step20, which has no checkpoint"):
            manager.latest_step()
        with pytest.raises(CheckpointNotFoundError, match="latest names global_step20"):
            manager.restore("latest", state(0))
        for step in left:
            assert manager.restore(step, state(0)) == step


def test_latest_holds_nonsense(tmp_path: Path):
    """If there is nothing else, that is all that is known of the run."""
    save_steps(tmp_path, 10)
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 10
    shutil.rmtree(tmp_path / "global_step10")
    with CheckpointManager(tmp_path) as manager, pytest.raises(CheckpointFormatError, match="latest"):
        manager.latest_step()


# ------------------------------------------------------------------ links


def linked(tmp_path: Path, link: Callable[[Path, Path], object]) -> tuple[Path, Path]:
    """A run whose first step is a link to a checkpoint elsewhere; and that checkpoint."""
    shared, root = tmp_path / "shared", tmp_path / "real" / "run"
    root.mkdir(parents=True)
    save(state(1), checkpoint_id=shared)
    link(shared, root / "global_step1")
    return root, shared


def use(root: Path) -> None:
    """A manager that would like to remove, to sweep and to replace all that it may."""
    with CheckpointManager(root, keep=1) as manager:
        assert manager.latest_step() == 1
        target = state(0)
        assert manager.restore(1, target) == 1 and target["w"].eq(1).all()
        for step in (2, 3):
            manager.save(step, state(step))
        manager.wait()
        manager._last = None
        with pytest.raises(CheckpointExistsError, match="global_step1 is a link or a mount point"):
            manager.save(1, state(9))
        manager.save(4, state(4))
    assert manager.steps() == [1, 4]


def test_nothing_is_removed_through_a_link(tmp_path: Path):
    root, shared = linked(tmp_path, lambda there, link: link.symlink_to(there))
    leftover = shared / "data-0123456789ab-00000.safetensors"
    leftover.write_bytes(b"of a save that died there")
    before = files(shared)
    run = tmp_path / "run"
    run.symlink_to(root)  # the folder that the user names may be a link
    use(run)
    assert files(shared) == before and verify(shared) == []
    assert (root / "global_step1").is_symlink() and '"1":["a link"]' in (root / "kept.json").read_text()
    assert not (root / "global_step2").exists() and not (root / "global_step3").exists()


def test_a_link_that_leads_nowhere(tmp_path: Path):
    root, shared = linked(tmp_path, lambda there, link: link.symlink_to(there))
    save(state(2), checkpoint_id=root / "global_step2")
    shared.rename(tmp_path / "not mounted now")
    with CheckpointManager(root, keep=1) as manager:
        assert manager.steps() == [2] and manager.restore("latest", state(0)) == 2
        with pytest.raises(CheckpointCorruptError, match="global_step1 is a link, and it leads to no checkpoint"):
            manager.restore(1, state(0))
        with pytest.raises(CheckpointExistsError, match="cannot be replaced"):
            manager.save(1, state(1))
        manager.save(3, state(3))
    assert (root / "global_step1").is_symlink() and manager.steps() == [3]


def test_mount_points_are_links(tmp_path: Path):
    """Also those of the same file system."""
    for name in ("shared", "run/mounted here", "run/own"):
        (tmp_path / name).mkdir(parents=True)
    program = (
        "from terrazzo.checkpoint.stores import LocalStore; store = LocalStore('run');"
        "store.remove_folder('mounted here'); print(store.is_link('mounted here'), store.is_link('own'))"
    )
    command = ["unshare", "--mount", "sh", "-c", 'mount --bind shared "run/mounted here" && exec "$0" -c "$1"']
    environment = os.environ | {"PYTHONPATH": str(Path(terrazzo.__file__).parents[1])}
    done = subprocess.run(
        [*command, sys.executable, program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    if done.returncode and "Traceback" not in done.stderr:
        pytest.skip(f"this user may not mount: {done.stderr}")
    assert done.stdout == "True False\n", done.stderr


def test_a_store_removes_nothing_behind_a_linked_folder(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("mine")
    (tmp_path / "run" / "own").mkdir(parents=True)
    (tmp_path / "run" / "own" / "file").write_text("ours")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "single").symlink_to(tmp_path / "elsewhere" / "mine")
    store = LocalStore(tmp_path / "run")
    for key in ("link/mine", "../elsewhere/mine", "own/../../elsewhere/mine"):
        with pytest.raises(PermissionError, match="a link leads to it"):
            store.delete([key])
    store.delete(["own/file", "single", "own/absent", "absent/absent"])
    assert (tmp_path / "elsewhere" / "mine").read_text() == "mine"
    assert not (tmp_path / "run" / "own" / "file").exists() and not (tmp_path / "run" / "single").is_symlink()
    assert store.is_link("link") and not store.is_link("own") and not store.is_link("absent")


def test_keep_counts_only_what_can_be_read(tmp_path: Path):
    save_steps(tmp_path, 1, 2, 3)
    flip(tmp_path / "global_step1")
    with CheckpointManager(tmp_path, keep=Keep(seconds=1e6)) as manager:
        manager.restore("latest", state(0))
        manager.save(4, state(4))
    assert manager.steps() == [2, 4]
