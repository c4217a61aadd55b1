"""A table of contents whose chunks do not make up a tensor: `verify` says so, and no load takes it for whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from terrazzo.checkpoint import ChunkStorageMetadata, load, save, verify
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.root import Root, encode_root
from terrazzo.errors import CheckpointError

CORNER = [((0, 0), (2, 4)), ((2, 0), (4, 1)), ((2, 1), (4, 3))]  # no grid


class Pieces:
    """A tensor of which this process has all chunks."""

    dtype = torch.float32

    def size(self) -> torch.Size:
        return torch.Size([6, 4])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)) for offsets, lengths in CORNER]

    def __get_tensor_shard__(self, index) -> torch.Tensor:
        assert index.offset is not None
        lengths = dict(CORNER)[tuple(index.offset)]
        return torch.ones(lengths)


@pytest.mark.parametrize("kind", ["plain", "pieces"])
@pytest.mark.parametrize("shape", [(7, 4), (6, 5), (12, 4)])
def test_a_tensor_that_is_larger_than_its_chunks(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    save({"w": torch.ones(6, 4) if kind == "plain" else Pieces(), "other": torch.zeros(3)}, checkpoint_id=tmp_path)
    assert verify(tmp_path) == []
    file = tmp_path / MANIFEST
    head = Root(file.read_bytes(), "it").head
    tensors = [msgspec.structs.replace(each, shape=shape) if each.name == "w" else each for each in head.tensors]
    file.write_bytes(encode_root(msgspec.structs.replace(head, tensors=tensors)))  # its own checksums are right
    found = verify(tmp_path)
    assert any("w" in str(damage) for damage in found), found
    with pytest.raises(CheckpointError):
        load({"w": torch.zeros(shape)}, checkpoint_id=tmp_path)
