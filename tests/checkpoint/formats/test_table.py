"""The one reader of formats that say where tensors lie."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from checkpoint.formats.deepspeed import made
from terrazzo.checkpoint import Checkpoint
from terrazzo.errors import ConflictError


def _torch_save(path: Path) -> Path:
    torch.save({"w": torch.arange(12.0)}, path / "a.pt")
    return path / "a.pt"


def _dcp(path: Path) -> Path:
    dcp.save({"w": torch.arange(12.0)}, checkpoint_id=path, no_dist=True)
    return path


def _safetensors(path: Path) -> Path:
    save_file({"w": torch.arange(12.0)}, path / "model.safetensors")
    return path


def _deepspeed(path: Path) -> Path:
    made.write(path, 3)
    return path / "tag"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [_torch_save, _dcp, _safetensors, _deepspeed])
def test_files_that_are_replaced_while_they_are_read(write: Callable[[Path], Path], tmp_path: Path) -> None:
    place = write(tmp_path)
    checkpoint = Checkpoint(place)
    name = "w" if "w" in checkpoint else "module.a.weight"
    expected = checkpoint[name][...]
    for file in tmp_path.rglob("*"):
        if file.is_file():
            os.utime(file, (1, 1))  # the same size and another time
    with pytest.raises(ConflictError, match="has been replaced while it was read"):
        checkpoint[name][...]
    assert torch.equal(Checkpoint(place)[name][...], expected)
