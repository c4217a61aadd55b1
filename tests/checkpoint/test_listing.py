"""Checkpoints looked at without PyTorch: the same is said as by the reader, which fills tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import terrazzo
from terrazzo.checkpoint import Checkpoint, FileSystemWriter, LazyTensor, save
from terrazzo.checkpoint.native.format import STORED
from terrazzo.checkpoint.native.listing import NativeListing
from terrazzo.checkpoint.native.tensors import OPAQUE, bytes_of, dtype_from_name
from terrazzo.checkpoint.plan.sharded import ChunkedTensor
from terrazzo.checkpoint.stores import LocalStore
from terrazzo.checkpoint.tools.lazy import ReaderListing
from terrazzo.cli import app
from terrazzo.errors import CheckpointCorruptError, CheckpointNotFoundError
from terrazzo.layout.box import Box

GOLDEN = sorted((Path(__file__).parents[1] / "golden").iterdir())


def agree(path: Path) -> None:
    """Check that both say the same of a checkpoint, and of its tensors what they are."""
    opened = Checkpoint(path)
    native, by_reader = NativeListing(LocalStore(path)), ReaderListing(opened)
    assert dict(native.entries) == dict(by_reader.entries) and set(native.entries) == set(opened)
    assert native.about() == by_reader.about() and native.about()["ranks"] >= 1
    assert native.digests() == by_reader.digests() and native.total_bytes() == opened.total_bytes()
    for name, entry in native.entries.items():
        value = opened[name]
        assert native.entry(name) == entry
        if isinstance(value, LazyTensor):
            first = value[...].reshape(-1)[: min(8, *value.shape[-1:])] if value.shape else value[...].reshape(-1)
            numbers = first.to(torch.complex128 if first.is_complex() else torch.float64).tolist()
            numbers = [str(number) for number in numbers] if first.is_complex() else numbers
            assert repr(native.first(name, 8)) == repr(by_reader.first(name, 8)) == repr(numbers)
            assert native.boxes_of(name) == by_reader.boxes_of(name) == value.chunks
            assert native.files_of(name) == by_reader.files_of(name) and len(native.files_of(name)) == value.parts
        else:
            assert repr(native.value(name)) == repr(by_reader.value(name)) == repr(value)


def test_elements_with_which_torch_cannot_compute(tmp_path: Path) -> None:
    state = {}
    for dtype in OPAQUE:
        state[str(dtype)] = torch.empty(2, 3, dtype=dtype)
        bytes_of(state[str(dtype)])[:] = bytes(range(6 * dtype.itemsize))
    save(state, checkpoint_id=tmp_path)
    native, by_reader = NativeListing(LocalStore(tmp_path)), ReaderListing(Checkpoint(tmp_path))
    for name, value in state.items():
        expected = ["0x0100", "0x0302", "0x0504"] if value.dtype.itemsize == 2 else ["0x00", "0x01", "0x02"]
        assert native.first(name, 8) == by_reader.first(name, 8) == expected
        done = CliRunner().invoke(app, ["show", str(tmp_path), name])
        assert done.exit_code == 0 and expected[1] in done.output


NUMBERS = [
    name for name, stored in STORED.items() if hasattr(torch, name) and not stored.opaque and name != "float8_e8m0fnu"
]


@pytest.mark.parametrize("compression", [False, True])
def test_every_dtype_and_shape(tmp_path: Path, compression: bool) -> None:
    torch.manual_seed(1)
    whole = torch.randn(3, 11).abs() * 3
    shapes = {"empty": torch.zeros(2, 0), "scalar": torch.tensor(2.5), "long": torch.arange(300_000.0).view(3, -1)}
    state: dict[str, Any] = {name: whole.to(dtype_from_name(name)) for name in NUMBERS}
    large = list(range(3000))  # too large for the root
    save({**state, **shapes, "small": {"a": (1, None)}, "large": large}, storage_writer=FileSystemWriter(
        tmp_path, compression=compression
    ))  # fmt: skip
    agree(tmp_path)
    assert NativeListing(LocalStore(tmp_path)).value("large") == large


@pytest.mark.parametrize("compression", [False, True])
@pytest.mark.parametrize("cuts", [[3, 3, 3, 3], [5, 1, 6], [12]])
def test_a_first_row_in_several_chunks(tmp_path: Path, cuts: list[int], compression: bool) -> None:
    whole = torch.randn(40, 12)
    chunks = {box.offsets: (box, whole[box.slices()].contiguous()) for box in Box.whole(whole.shape).split(1, cuts)}
    writer = FileSystemWriter(tmp_path, compression=compression, single_file_per_rank=False)
    save({"w": ChunkedTensor(whole.shape, whole.dtype, chunks, None)}, storage_writer=writer)
    agree(tmp_path)
    listing = NativeListing(LocalStore(tmp_path))
    assert len(listing.boxes_of("w")) == len(cuts) and listing.first("w", 8) == whole[0, :8].double().tolist()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_released_versions(path: Path) -> None:
    agree(path)


def test_sizes_of_dtypes_are_those_of_torch() -> None:
    for name, stored in STORED.items():
        assert not hasattr(torch, name) or getattr(torch, name).itemsize == stored.itemsize


def test_damage_is_found(tmp_path: Path) -> None:
    save({"w": torch.ones(4), "large": "x" * 10_000}, checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:4096] + bytes(len(data) - 4096))
    with pytest.raises(CheckpointCorruptError, match="'w': what .* is not what was saved"):
        NativeListing(LocalStore(tmp_path)).first("w", 8)
    file.write_bytes(data[:4096])
    with pytest.raises(CheckpointCorruptError, match="shorter"):
        NativeListing(LocalStore(tmp_path)).value("large")
    file.unlink()
    with pytest.raises(CheckpointNotFoundError, match="is gone"):
        NativeListing(LocalStore(tmp_path)).first("w", 8)


def test_commands_that_only_look_do_not_import_torch(tmp_path: Path) -> None:
    """Those of a step of a run, too: what its manager says of it is a value."""
    state = {"w": torch.ones(3, 4), "b": torch.ones(3).bfloat16(), "step": 7, "large": list(range(3000))}
    one, run = str(tmp_path / "run" / "global_step1"), str(tmp_path / "run")
    save({**state, "checkpoint_manager": '{"saved": 5.0, "metrics": {"loss": 1}}'}, checkpoint_id=one)
    commands = [
        ["ls", one], ["ls", one, "--json"], ["ls", run], ["show", one, "w"], ["show", one, "b"], ["show", one, "step"],
        ["show", one, "large"], ["verify", one], ["diff", one, one], ["--version"], ["verify", "--help"],
    ]  # fmt: skip
    script = f"""
import sys
sys.modules["torch"] = None  # who imports it learns of it
from typer.testing import CliRunner
from terrazzo.cli import app
for command in {commands!r}:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, (command, done.output, done.exception)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(terrazzo.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
