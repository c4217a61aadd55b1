"""How formats are copied from any checkpoint: what is small is read together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.checkpoint import Checkpoint, save
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.formats.source import Source
from terrazzo.checkpoint.run.locate import reader_for
from terrazzo.checkpoint.torch_api.storages import Boxes
from terrazzo.errors import CheckpointCorruptError

MANY = 600


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state: dict[str, Any] = {f"layers.{i}.w": torch.full((2, 3), float(i)) for i in range(MANY)}
    state |= {"alone": torch.tensor(1.5), "empty": torch.empty(0, 3), "large": torch.arange(100_000.0)}
    save(state, checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("to", ["torch_save", "huggingface", "dcp", "native"])
def test_a_conversion_reads_small_tensors_together(
    to: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, read = [], Boxes.read

    def counted(self: Boxes, wanted: Iterable[Any]) -> None:
        wanted = list(wanted)
        requests.append([name for name, *_ in wanted])
        read(self, wanted)

    monkeypatch.setattr(Boxes, "read", counted)
    convert(saved, tmp_path / "copy", to)
    monkeypatch.undo()
    assert len(requests) < 20 and sum(map(len, requests)) < MANY + 20, requests
    copy, original = Checkpoint(tmp_path / "copy"), Checkpoint(saved)
    assert set(copy) == set(original)
    for name in original:
        assert torch.equal(copy[name][...], original[name][...]), name


def test_any_order(saved: Path) -> None:
    source = Source(reader_for(saved))
    for i in [5, 3, 4, 5, 6, 7, 8, 9, 2, 599, 0, 1, 2, 3]:
        assert source.whole(f"layers.{i}.w").eq(i).all()


def test_only_the_damaged_tensor_is_an_error(saved: Path) -> None:
    [file] = saved.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[data.index(torch.full((2, 3), 9.0).numpy().tobytes())] ^= 1
    file.write_bytes(data)
    source = Source(reader_for(saved))
    for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 10):  # the ninth is read ahead with some of them
        assert source.whole(f"layers.{i}.w").eq(i).all()
    with pytest.raises(CheckpointCorruptError, match=r"layers\.9\.w"):
        source.whole("layers.9.w")
