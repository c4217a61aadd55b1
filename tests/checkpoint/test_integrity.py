"""Damage is found: any flipped bit and any truncation, of any file, on load and by `verify`."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from checkpoint.faults import FaultySystem
from terrazzo.checkpoint import Checkpoint, FileSystemReader, load, save, verify
from terrazzo.checkpoint.listing import in_order
from terrazzo.checkpoint.stores import LocalStore
from terrazzo.checkpoint.tools.compare import compare
from terrazzo.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)


def state(fill: bool) -> dict:
    kinds = {
        "large": torch.arange(200_000.0).reshape(400, 500),
        "small": torch.arange(7, dtype=torch.int16),
        "half": torch.arange(33).bfloat16(),
    }
    tensors = kinds if fill else {name: torch.zeros_like(value) for name, value in kinds.items()}
    return tensors | {"object": [0.1, "x" * 100] if fill else None, "big": "y" * 9000 if fill else None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save({"s": state(True)}, checkpoint_id=tmp_path)
    return tmp_path


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def interesting_positions(file: Path, rng: random.Random) -> list[int]:
    """Both ends, the header's end, and places all over."""
    size = file.stat().st_size
    header = int.from_bytes(file.read_bytes()[:8], "little") + 8 if file.suffix == ".safetensors" else 64
    chosen = {0, 1, 7, 8, 9, header - 1, header, size - 1, size - 2, *(rng.randrange(size) for _ in range(60))}
    chosen |= {rng.randrange(min(header, size)) for _ in range(30)}
    return sorted(position for position in chosen if position < size)


def test_every_flipped_bit_is_found(path: Path) -> None:
    rng = random.Random(5)
    for file in files_of(path):
        whole = file.read_bytes()
        for position in interesting_positions(file, rng):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << rng.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises((CheckpointCorruptError, CheckpointFormatError)) as caught:
                load({"s": state(False)}, checkpoint_id=path)
            assert file.name in str(caught.value) or str(path) in str(caught.value), position
            found = verify(path)
            assert found and any(damage.file == file.name for damage in found), position
        file.write_bytes(whole)
    assert verify(path) == []


def test_every_truncation_is_found(path: Path) -> None:
    rng = random.Random(6)
    for file in files_of(path):
        whole = file.read_bytes()
        for position in interesting_positions(file, rng):
            file.write_bytes(whole[:position])
            with pytest.raises(CheckpointCorruptError):
                load({"s": state(False)}, checkpoint_id=path)
            assert verify(path), position
        file.write_bytes(whole + b"\0")
        assert verify(path)
        file.write_bytes(whole)


def test_the_report_names_the_tensor_and_the_bytes(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    whole = bytearray(file.read_bytes())
    position = whole.index(torch.tensor([100_000.0, 100_001.0]).numpy().tobytes())
    whole[position] ^= 1
    file.write_bytes(whole)
    (damage,) = verify(path)
    assert damage.name == "s.large" and damage.file == file.name
    assert damage.start is not None and damage.stop is not None and damage.start <= position < damage.stop
    with pytest.raises(CheckpointCorruptError, match="s.large"):
        load({"s": {"large": torch.zeros(400, 500)}}, checkpoint_id=path)
    load({"s": {"small": torch.zeros(7, dtype=torch.int16)}}, checkpoint_id=path)  # what is whole still loads
    target = torch.zeros(400, 500)
    load({"s": {"large": target}}, storage_reader=FileSystemReader(path, verify=False))
    assert (target != state(True)["large"]).sum() == 1


def test_a_slice_is_checked_too(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    whole = bytearray(file.read_bytes())
    position = whole.index(torch.tensor([100_000.0, 100_001.0]).numpy().tobytes())
    whole[position] ^= 1
    file.write_bytes(whole)
    tensor = Checkpoint(path)["s.large"]
    with pytest.raises(CheckpointCorruptError, match="s.large"):
        tensor[200:201]
    assert torch.equal(tensor[399], state(True)["large"][399])


def test_missing_files_and_unknown_versions(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(CheckpointNotFoundError, match=file.name):
        load({"s": state(False)}, checkpoint_id=path)
    assert verify(path)
    file.write_bytes(content)
    manifest = path / "manifest.terrazzo"
    data = bytearray(manifest.read_bytes())
    import xxhash

    for at, value, what in ((8, 2, "format version 2"), (12, 1, "unknown form"), (47, 1, "unknown form")):
        newer = data[:at] + bytes([value]) + data[at + 1 :]
        newer[56:64] = xxhash.xxh3_64_intdigest(bytes(newer[:56])).to_bytes(8, "little")
        manifest.write_bytes(newer)
        for attempt in (
            lambda: load({"s": state(False)}, checkpoint_id=path),
            lambda: save({"s": state(False)}, checkpoint_id=path),
            lambda: verify(path),
        ):
            with pytest.raises((CheckpointFormatError, CheckpointExistsError), match=what):
                attempt()
        assert manifest.read_bytes() == newer and file.is_file()


def test_names_are_listed_as_people_sort_them_whatever_digits_they_have(tmp_path: Path) -> None:
    long = "layers." + "9" * 5000
    save(
        {name: torch.ones(1) for name in ("layers.10", long, "layers.2", "layers.\u00b2", "a")}, checkpoint_id=tmp_path
    )
    assert in_order(Checkpoint(tmp_path)) == ["a", "layers.2", "layers.10", long, "layers.\u00b2"]


def test_tensors_of_other_dtypes_and_shapes_with_the_same_bytes_differ(tmp_path: Path) -> None:
    for number, value in enumerate((torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32))):
        save({"w": value, "same": torch.ones(3)}, checkpoint_id=tmp_path / str(number))
    opened = [Checkpoint(tmp_path / str(number)) for number in range(3)]
    assert [found.what for found in compare(opened[0], opened[1])] == ["shapes [4] and [2, 2]"]
    assert [found.what for found in compare(opened[0], opened[2])] == ["dtypes torch.float32 and torch.int32"]
    assert list(compare(opened[0], opened[0])) == []


def test_a_file_whose_size_cannot_be_asked_for_is_closed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    before = len(os.listdir("/proc/self/fd"))
    system = FaultySystem(at=1, fault="EIO")  # the call after `open`
    with pytest.raises(OSError, match="Input/output"):
        LocalStore(tmp_path, system).get("file")
    assert system.happened == "fstat" and len(os.listdir("/proc/self/fd")) == before


def test_two_values_that_are_read_into_the_same_memory_are_no_damage(tmp_path: Path) -> None:
    """As when a model whose weights are tied loads a checkpoint in which they differ."""
    values = {"head": torch.ones(100), "embedding": torch.zeros(100)}
    save(values, checkpoint_id=tmp_path / "native", no_dist=True)
    torch.save(values, tmp_path / "file.pt")
    for path in (tmp_path / "native", tmp_path / "file.pt"):
        tied = torch.full((100,), 2.0)
        with pytest.raises(CheckpointMismatchError, match="not damaged"):
            load({"head": tied, "embedding": tied}, checkpoint_id=path, no_dist=True)
        assert verify(path) == []
        load({"head": tied, "embedding": torch.empty(100)}, checkpoint_id=path, no_dist=True)
        assert tied.eq(1).all()
