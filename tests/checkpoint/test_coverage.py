"""A table of contents whose chunks do not make up a tensor: `verify` says so, and no load takes it for whole."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from terrazzo.checkpoint import Checkpoint, ChunkStorageMetadata, load, save, verify
from terrazzo.checkpoint.formats import DCPWriter
from terrazzo.checkpoint.formats.convert import convert
from terrazzo.checkpoint.formats.stored import Asked, StoredBox, read_rows
from terrazzo.checkpoint.native.format import MANIFEST, checksum
from terrazzo.checkpoint.native.index import decode_index, encode_index
from terrazzo.checkpoint.native.root import Root, encode_root
from terrazzo.checkpoint.native.storage import NativeReader, NativeWriter
from terrazzo.checkpoint.native.verify import verify_store
from terrazzo.checkpoint.stores import Capabilities, MemoryStore
from terrazzo.errors import CheckpointCorruptError, CheckpointError
from terrazzo.layout.box import Box

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


class Halves(Pieces):
    """The numbers 0 to 3 in two chunks, both here."""

    def size(self) -> torch.Size:
        return torch.Size([4])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([at]), torch.Size([2])) for at in (0, 2)]

    def __get_tensor_shard__(self, index) -> torch.Tensor:
        return torch.arange(4.0)[index.offset[0] :][:2]


def root_says_twice(folder: Path) -> None:
    save({"w": Halves()}, checkpoint_id=folder)
    head = Root((folder / MANIFEST).read_bytes(), "it").head
    table = np.array([[[0], [2]], [[0], [2]]], "<i8").tobytes()
    (folder / MANIFEST).write_bytes(encode_root(msgspec.structs.replace(head, layouts=[table])))


def pytorchs_metadata_say_twice(folder: Path) -> None:
    save({"w": Halves()}, storage_writer=DCPWriter(folder))
    file = folder / ".metadata"
    found = pickle.loads(file.read_bytes())
    chunks, none = found.state_dict_metadata["w"].chunks, torch.Size([0])
    chunks[1] = dataclasses.replace(chunks[1], offsets=none)
    found.storage_data = {dataclasses.replace(key, offset=none): at for key, at in found.storage_data.items()}
    file.write_bytes(pickle.dumps(found))


def parts_of_safetensors_overlap(folder: Path) -> None:
    folder.mkdir()
    for number, (start, length) in enumerate([(0, 2), (1, 1), (3, 1)]):  # nothing has element 2
        info = {"w": {"saved_offsets": [start]}}
        file = folder / f"shard-0000{number}-model-00001-of-00003.safetensors"
        save_file({"w": torch.full((length,), float(start))}, file, {"DCP_SHARDING_INFO": json.dumps(info)})


@pytest.mark.parametrize("made", [root_says_twice, pytorchs_metadata_say_twice, parts_of_safetensors_overlap])
def test_chunks_that_overlap_and_leave_a_hole_of_the_same_size(made: Any, tmp_path: Path) -> None:
    path = tmp_path / "it"
    made(path)
    with pytest.raises(CheckpointError, match="overlap"):
        load({"w": torch.zeros(4)}, checkpoint_id=path)
    with pytest.raises(CheckpointError, match="overlap"):
        print(Checkpoint(path)["w"][:3])
    for to in ("native", "dcp", "safetensors", "torch_save"):
        with pytest.raises(CheckpointError, match="overlap"):
            convert(path, tmp_path / f"other-{to}", to=to)
    try:
        damage = [str(each) for each in verify(path)]
    except CheckpointCorruptError as error:  # of files whose headers contradict one another
        damage = [str(error)]
    assert any("overlap" in each and "w" in each for each in damage), damage


def test_an_index_that_has_a_part_of_a_chunk_twice() -> None:
    store = MemoryStore(Capabilities(file_bytes=8))
    save({"w": torch.arange(4.0)}, storage_writer=NativeWriter(store))
    target = {"w": torch.zeros(4)}
    load(target, storage_reader=NativeReader(store))
    assert target["w"].tolist() == [0, 1, 2, 3] and verify_store(store) == []
    head = Root(store.get(MANIFEST)[0], "it").head
    rows = decode_index(head.parts[0].index, "it")
    assert rows.boxes.tolist() == [0, 2, 2, 2]
    index = encode_index(dataclasses.replace(rows, boxes=np.array([0, 2, 0, 2], np.uint64)))
    part = msgspec.structs.replace(head.parts[0], index=index, index_sum=checksum(index))
    store.put(MANIFEST, encode_root(msgspec.structs.replace(head, parts=[part])))
    with pytest.raises(CheckpointCorruptError, match="the index of part 0"):
        load(target, storage_reader=NativeReader(store))
    assert "more than once" in str(verify_store(store))


def test_rows_of_another_format_that_overlap() -> None:
    def locate() -> Any:
        raise AssertionError("not to be read")

    rows = [StoredBox(Box((0,), (2,)), MemoryStore(), locate) for _ in range(2)]
    with pytest.raises(CheckpointCorruptError, match="once"):
        read_rows([Asked("w", Box((0,), (4,)), rows)], [torch.zeros(4)])
