"""`verify` of other systems' checkpoints: by their own checksums, or by those that `seal` wrote beside them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from typer.testing import CliRunner

from checkpoint.formats.deepspeed import made
from terrazzo.checkpoint import save, seal, verify
from terrazzo.checkpoint.formats import HuggingFaceWriter
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.stores import MemoryStore
from terrazzo.cli import app
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError

WHOLE = {"w": torch.arange(5000.0), "half": torch.ones(7, dtype=torch.bfloat16)}


def _torch_save(path: Path) -> Path:
    torch.save({**WHOLE, "step": 3}, path / "a.pt")
    return path / "a.pt"


def _legacy(path: Path) -> Path:
    torch.save({**WHOLE, "step": 3}, path / "a.pt", _use_new_zipfile_serialization=False)
    return path / "a.pt"


def _dcp(path: Path) -> Path:
    dcp.save({**WHOLE, "step": 3}, checkpoint_id=path, no_dist=True)
    return path


def _safetensors(path: Path) -> Path:
    save_file(WHOLE, path / "any.safetensors")
    return path / "any.safetensors"


def _huggingface(path: Path) -> Path:
    save_file(WHOLE, path / "model.safetensors")
    return path


def _deepspeed(path: Path) -> Path:
    made.write(path, 3)
    return path / "tag"


def _universal(path: Path) -> Path:
    made.write_universal(path, 2)
    return path / "tag"


ALL = [_torch_save, _legacy, _dcp, _safetensors, _huggingface, _deepspeed, _universal]


def largest(path: Path) -> Path:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_size)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [_torch_save, _dcp, _deepspeed, _universal])
def test_zip_archives_are_verified_by_their_own_checksums(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify(path) == []
        file = largest(path)
        data = file.read_bytes()
        needles = [torch.arange(9.0, 12.0).numpy().tobytes(), b"torch._utils", b"deepspeed"]  # in tensors and pickles
        places = [data.index(needle) for needle in needles if needle in data]
        assert places
        for at in places:
            flip(file, at)
            found = verify(path)
            assert [damage.file for damage in found] == [file.name], at
            flip(file, at)
        assert verify(path) == []


@pytest.mark.parametrize("write", [_legacy, _safetensors, _huggingface])
def test_of_files_without_checksums_the_structure_is_verified(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.warns(UserWarning, match="terrazzo seal"):
        assert verify(path) == []
    if write is not _legacy:
        file = largest(path)
        with open(file, "ab") as end:
            end.write(b"more")
        with pytest.warns(UserWarning, match="structure"):
            (damage,) = verify(path)
        assert "belong to no tensor" in str(damage)
        file.write_bytes(file.read_bytes()[:-50])
        (damage,) = verify(path)
        assert "damaged safetensors header" in str(damage)
    result = CliRunner().invoke(app, ["verify", str(path)])
    assert (result.exit_code, "not all was checked" in result.output) == ((0, True) if write is _legacy else (1, False))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", ALL)
def test_a_seal_finds_every_change(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    result = CliRunner().invoke(app, ["seal", str(path), "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["bytes"] == sum(file.stat().st_size for file in files)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify(path) == []
        for file in files:
            for at in {0, file.stat().st_size // 2, file.stat().st_size - 1}:
                flip(file, at)
                name = file.name if path.is_file() else str(file.relative_to(path))
                try:
                    found = verify(path)
                except CheckpointError:  # it is no checkpoint any more
                    assert at == 0
                else:
                    assert [damage.file for damage in found] == [name]
                flip(file, at)
        whole = files[0].read_bytes()
        files[0].write_bytes(whole + b"1")
        if not path.is_file() or write in (_torch_save, _legacy):
            assert "bytes, and had" in str(verify(path)[0])
        files[0].write_bytes(whole)
        assert verify(path) == []
    if path.is_dir():
        (path / "new").write_bytes(b"1")
        with pytest.warns(UserWarning, match="new came after it was sealed"):
            assert verify(path) == []


def test_what_is_not_sealed(tmp_path: Path) -> None:
    path = _torch_save(tmp_path)
    file_size = path.stat().st_size
    flip(path, file_size // 2)
    with pytest.raises(CheckpointCorruptError, match="is not sealed"):
        seal(path)
    assert os.listdir(tmp_path) == ["a.pt"]
    save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "own")
    with pytest.raises(CheckpointFormatError, match="checksums of its own"):
        seal(tmp_path / "own")


def test_a_damaged_seal_is_an_error(tmp_path: Path) -> None:
    path = _torch_save(tmp_path)
    seal(path)
    beside = tmp_path / "a.pt.seal.terrazzo"
    text = beside.read_text()
    document = json.loads(text)
    (about,) = document["files"].values()
    for wrong in (
        text[:-9],
        json.dumps({**document, "block": 0}),
        json.dumps({**document, "block": 1 << 50}),
        json.dumps({**document, "files": {"../a.pt": about}}),
        json.dumps({**document, "files": {"a.pt": {**about, "sums": []}}}),
        json.dumps({**document, "files": {"a.pt": {**about, "size": 1 << 62}}}),
    ):
        beside.write_text(wrong)
        with pytest.raises(CheckpointCorruptError, match="seal.terrazzo is damaged"):
            verify(path)
    beside.write_text(json.dumps({**document, "version": 2}))
    with pytest.raises(CheckpointFormatError, match="version 2"):
        verify(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_who_replaces_a_sealed_checkpoint_removes_its_seal(tmp_path: Path) -> None:
    new = {"w": torch.ones(9), "half": torch.zeros(3)}

    def dcp_again(path: Path) -> None:
        save(new, storage_writer=_dcp_writer(path), no_dist=True)

    def huggingface_again(path: Path) -> None:
        save(new, storage_writer=HuggingFaceWriter(path), no_dist=True)

    def huggingface_in_shards(path: Path) -> None:
        save(new, storage_writer=HuggingFaceWriter(path, always_index=True), no_dist=True)

    def converted(path: Path) -> None:
        save(new, checkpoint_id=tmp_path / "new", no_dist=True)
        convert(tmp_path / "new", path, "torch_save", overwrite=True)

    for write, again in (
        (_dcp, dcp_again),
        (_huggingface, huggingface_again),
        (_huggingface, huggingface_in_shards),
        (_torch_save, converted),
    ):
        folder = tmp_path / again.__name__
        folder.mkdir()
        path = write(folder)
        seal(path)
        again(path)
        assert not list(folder.glob("*seal*")), again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            assert verify(path) == []


def test_in_a_store() -> None:
    store = MemoryStore()
    save({"w": torch.ones(4)}, checkpoint_id=None, storage_writer=_dcp_writer(store), no_dist=True)
    assert seal(store) > 0 and verify(store) == []
    (name,) = [entry.key for entry in store.list() if entry.key.endswith(".distcp")]
    data = bytearray(store.get(name)[0])
    data[300] ^= 1
    store.put(name, data)
    assert [damage.file for damage in verify(store)] == [name]


def _dcp_writer(store: MemoryStore | Path) -> Any:
    from terrazzo.checkpoint.formats import DCPWriter

    return DCPWriter(store)
