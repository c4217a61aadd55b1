"""Damaged local files: what another host or the root has whole is read, and nothing builds on them."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from terrazzo.checkpoint import CheckpointManager, load, verify
from terrazzo.errors import CheckpointCorruptError, CheckpointException
from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh

LIMIT = timedelta(seconds=60)
ROWS = 50_000


def whole(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 2.0).reshape(ROWS, 2) + step


def state(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(whole(step), mesh, [Shard(0)]), "step": step}


def manager_of(folder: str, hosts: int) -> CheckpointManager:
    local = Path(folder) / f"host{dist.get_rank() * hosts // dist.get_world_size()}"
    return CheckpointManager(
        Path(folder) / "root", local=local, copy_every=2, keep_local=3, reuse=True, best="loss", timeout=LIMIT
    )


def save_three(folder: str, hosts: int) -> None:
    """Step 2 is in the root as well, 1 and 3 are local only."""
    with pytest.raises(ZeroDivisionError), manager_of(folder, hosts) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step), {"loss": float(step), "nothing": math.nan})
            manager.wait()
        raise ZeroDivisionError("the run dies here, and copies nothing more")


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def restore(folder: str, hosts: int, step: int, by_function: bool, save_again: bool) -> tuple[str, list[str]]:
    """What was raised, and all warnings."""
    heard = Messages()
    logging.getLogger("terrazzo.checkpoint").addHandler(heard)
    raised = ""
    try:
        with manager_of(folder, hosts) as manager:
            target = state(-1)
            try:
                assert (
                    manager.restore(step, (lambda store: load_from(target, store)) if by_function else target) == step
                )
            except CheckpointException as error:
                assert isinstance(error, CheckpointCorruptError)
                raised = str(error)
            else:
                assert target["step"] == step and torch.equal(target["w"].full_tensor(), whole(step))
            if save_again:  # reuses the files of the newest
                manager.save(9, state(3), {"loss": 9.0})
                manager.wait()
                target = state(-1)
                assert manager.restore(9, target) == 9 and torch.equal(target["w"].full_tensor(), whole(3))
    finally:
        logging.getLogger("terrazzo.checkpoint").removeHandler(heard)
    return raised, heard.texts


def load_from(target: dict[str, Any], store: Any) -> None:
    load(target, store=store, together=True)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def data_of(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.name.startswith("data-"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    run_ranks(2, save_three, str(folder), 2)
    return folder


@pytest.mark.parametrize("damage", [flip, cut])
@pytest.mark.parametrize(("world", "by_function"), [(2, False), (4, True)])
def test_the_copy_of_another_host_is_read(
    saved: Path, tmp_path: Path, damage: Callable[[Path], None], world: int, by_function: bool
):
    """Of each file one of the two copies is damaged, here on the one host and there on the other."""
    shutil.copytree(saved, tmp_path / "run")
    places = [tmp_path / "run" / f"host{host}" / "global_step3" for host in (0, 1)]
    damaged = [data_of(place)[number] for number, place in enumerate(places)]
    assert {each.name for each in damaged} == {each.name for each in data_of(places[0])} and len(damaged) == 2
    for each in damaged:
        damage(each)
    told = run_ranks(world, restore, str(tmp_path / "run"), 2, 3, by_function, True)
    texts = [text for _, texts in told for text in texts]
    assert all(raised == "" for raised, _ in told)
    for each in damaged:
        assert any(str(each) in text and "another host" in text for text in texts), texts
        assert each.read_bytes() == (places[1 - places.index(each.parent)] / each.name).read_bytes()


def test_a_damaged_manifest_costs_nothing(saved: Path, tmp_path: Path):
    shutil.copytree(saved, tmp_path / "run")
    flip(tmp_path / "run" / "host0" / "global_step3" / "manifest.terrazzo")
    assert [raised for raised, _ in run_ranks(2, restore, str(tmp_path / "run"), 2, 3, False, True)] == ["", ""]


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_root_is_read_where_no_host_has_a_whole_copy(saved: Path, tmp_path: Path, hosts: int):
    shutil.copytree(saved, tmp_path / "run")
    if hosts == 1:
        shutil.rmtree(tmp_path / "run" / "host1")
    places = [tmp_path / "run" / f"host{host}" / "global_step2" for host in range(hosts)]
    damaged = [data_of(place)[0] for place in places]
    for each in damaged:
        flip(each)
    told = run_ranks(2, restore, str(tmp_path / "run"), hosts, 2, False, False)
    assert [raised for raised, _ in told] == ["", ""]
    texts = told[0][1]
    assert any(damaged[0].name in text and "is read from" in text and "root" in text for text in texts), texts
    assert not any(place.exists() for place in places), "what no host has whole is not kept, nor built on"
    assert verify(tmp_path / "run" / "root" / "global_step2") == []


def test_what_is_whole_nowhere_is_an_error(saved: Path, tmp_path: Path):
    shutil.copytree(saved, tmp_path / "run")
    damaged = [data_of(tmp_path / "run" / f"host{host}" / "global_step3")[0] for host in (0, 1)]
    for each in damaged:
        flip(each)
    left = [each.read_bytes() for each in damaged]
    (first, _), (second, _) = run_ranks(2, restore, str(tmp_path / "run"), 2, 3, False, False)
    assert first == second and damaged[0].name in first
    assert [each.read_bytes() for each in damaged] == left, "parts of it may still be wanted"


def test_both_the_hosts_and_the_root_are_damaged(saved: Path, tmp_path: Path):
    shutil.copytree(saved, tmp_path / "run")
    places = [tmp_path / "run" / place / "global_step2" for place in ("host0", "host1", "root")]
    damaged = [data_of(place)[0] for place in places]
    for each in damaged:
        flip(each)
    (first, _), (second, _) = run_ranks(2, restore, str(tmp_path / "run"), 2, 2, False, False)
    assert first == second and damaged[0].name in first
    assert all(each.exists() for each in damaged)


def damaged_before_it_is_copied(folder: str, how: str) -> tuple[str, list[str]]:
    heard = Messages()
    logging.getLogger("terrazzo.checkpoint").addHandler(heard)
    try:
        with manager_of(folder, 2) as manager:  # whose close copies the newest step
            manager.save(1, state(1), {"loss": 1.0})
            manager.wait()
            dist.barrier()
            places = [Path(folder) / f"host{host}" / "global_step1" for host in (0, 1)]
            if dist.get_rank() == 0 and how == "a manifest is lost":
                (places[0] / "manifest.terrazzo").unlink()
            elif dist.get_rank() == 0:
                for number, place in enumerate(places):
                    flip(data_of(place)[number if how == "a copy of each file" else 0])
            dist.barrier()
    except CheckpointException as error:
        return str(error), heard.texts
    finally:
        logging.getLogger("terrazzo.checkpoint").removeHandler(heard)
    return "", heard.texts


def test_what_is_copied_to_the_root_is_whole(tmp_path: Path):
    """A local file that has been damaged is copied from another host; if none has it whole, the step is not copied."""
    for how in ("a copy of each file", "a manifest is lost"):
        told = run_ranks(2, damaged_before_it_is_copied, str(tmp_path / how), how)
        assert [raised for raised, _ in told] == ["", ""]
        assert any("is not what was saved" in text for text in told[0][1])
        assert verify(tmp_path / how / "root" / "global_step1") == []
    told = run_ranks(2, damaged_before_it_is_copied, str(tmp_path / "other"), "all copies of a file")
    assert all("is damaged on each host that has it" in raised for raised, _ in told), told
    assert not (tmp_path / "other" / "root" / "global_step1" / "manifest.terrazzo").exists()
