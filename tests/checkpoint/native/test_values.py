"""Values that are not tensors, in data files: in however many chunks; and sizes that no file can have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from terrazzo.checkpoint import Checkpoint, FileSystemWriter, NativeReader, load, save, verify
from terrazzo.checkpoint.native import writer
from terrazzo.checkpoint.native.commit import read_manifest
from terrazzo.checkpoint.native.format import MANIFEST, checksum
from terrazzo.checkpoint.native.index import decode_index, encode_index
from terrazzo.checkpoint.native.listing import NativeListing
from terrazzo.checkpoint.native.root import TENSOR, ObjectEntry, Root, RootHead, encode_root
from terrazzo.checkpoint.native.rows import Row
from terrazzo.checkpoint.stores import LocalStore, MemoryStore, Store
from terrazzo.errors import CheckpointCorruptError, CheckpointError
from terrazzo.layout.box import Box

VALUE = {"names": [f"layer {number}" for number in range(3000)]}  # longer than what the root holds


def in_pieces(ends: tuple[int, ...]) -> Callable[..., Any]:
    """Store objects as rows that end at these bytes, and at the object's end."""
    original = writer._to_files

    def to_files(rows: Sequence[Row], compression: bool) -> tuple[list[Row], list[ObjectEntry]]:
        found, inline = original(rows, compression)
        cut: list[Row] = []
        for row in found:
            bounds = (0, *ends, row.form.nbytes) if row.kind != TENSOR else ()
            for start, end in zip(bounds, bounds[1:], strict=False):
                form = msgspec.structs.replace(row.form, box=Box((start,), (end - start,)), nbytes=end - start)
                cut.append(msgspec.structs.replace(row, form=form, value=row.data()[start:end]))
            cut += [] if bounds else [row]
        return cut, inline

    return to_files


@pytest.mark.parametrize("ends", [(), (16384,), (5000, 6000, 20000)], ids=["one", "a grid", "no grid"])
@pytest.mark.parametrize("kind", [LocalStore, MemoryStore])
def test_a_value_in_several_chunks_is_read(
    ends: tuple[int, ...], kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_to_files", in_pieces(ends))
    store: Store = LocalStore(tmp_path) if kind is LocalStore else MemoryStore()
    save({"value": VALUE["names"], "w": torch.arange(6.0)}, store=store, no_dist=True)
    root = read_manifest(store)
    assert isinstance(root, Root) and len(root.describe("value")[2]) == len(ends) + 1
    state = {"value": None, "w": torch.zeros(6)}
    load(state, store=store, no_dist=True)
    assert state["value"] == VALUE["names"] and torch.equal(state["w"], torch.arange(6.0))
    assert Checkpoint(store)["value"] == NativeListing(store).value("value") == VALUE["names"]
    assert verify(store) == []


def test_what_is_no_value_is_refused(tmp_path: Path) -> None:
    save({"w": torch.ones(3), "value": VALUE["names"]}, checkpoint_id=tmp_path, no_dist=True)
    store = LocalStore(tmp_path)
    for name, what in (("w", "is a tensor"), ("none", "has no value 'none'")):
        with pytest.raises(CheckpointError, match=what):
            list(NativeReader(store).values([name], False))
        with pytest.raises(CheckpointError, match=what):
            NativeListing(store).value(name)


def test_an_index_that_a_tensor_does_not_have() -> None:
    store = MemoryStore()
    save({"w": torch.ones(3, 2)}, store=store, no_dist=True)
    tensor = Checkpoint(store)["w"]
    for index, builtin in ((3, IndexError), ((0, 0, 0), IndexError), (slice(None, None, -1), ValueError)):
        with pytest.raises(builtin) as caught:
            tensor[index]
        assert isinstance(caught.value, CheckpointError)


# ------------------------------------------------------------------ sizes that nothing has

MANY = 250  # tensors whose index is a file


def forged(store: Store, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the root says, as someone would who means harm: its checksums are right."""
    root = read_manifest(store)
    assert isinstance(root, Root)
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(root.head))
    change(tree)
    store.put(MANIFEST, encode_root(msgspec.convert(tree, RootHead, strict=False)))


def saved(folder: Path) -> LocalStore:
    state: dict[str, Any] = {f"w{number}": torch.full((4, 4), float(number)) for number in range(MANY)}
    save(state | {"value": VALUE["names"]}, checkpoint_id=folder, no_dist=True)
    return LocalStore(folder)


def with_shape(shape: list[int], which: Callable[[list[Any]], bool]) -> Callable[[dict[str, Any]], None]:
    """A tensor of this shape, in one chunk."""

    def change(tree: dict[str, Any]) -> None:
        entry = next(entry for entry in tree["tensors"] if which(entry))
        tree["layouts"].append(shape)
        entry[2], entry[4] = shape, len(tree["layouts"]) - 1

    return change


def index_of(size: int) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        assert tree["parts"][0][1], "the index is not in a file"
        tree["parts"][0][2] = size

    return change


def two_parts(tree: dict[str, Any]) -> None:
    tree["parts"].append(tree["parts"][0])


def header_of(size: int) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        tree["parts"][0][0][0][2] = size

    return change


SIZES = {
    "a value": (with_shape([2**40], lambda entry: entry[3] != TENSOR), "value"),
    "a value of two dims": (with_shape([2, 2**12], lambda entry: entry[3] != TENSOR), "value"),
    "a tensor": (with_shape([2**50], lambda entry: entry[3] == TENSOR), "w0"),
    "an index": (index_of(2**40), "w0"),
    "an index of less than nothing": (index_of(-1), "w0"),
    "a header": (header_of(2**40), "w0"),
    "one index of two parts": (two_parts, "w0"),
}


@pytest.mark.parametrize(("change", "name"), SIZES.values(), ids=SIZES.keys())
def test_sizes_that_no_file_has(change: Callable[[dict[str, Any]], None], name: str, tmp_path: Path) -> None:
    store = saved(tmp_path)
    forged(store, change)

    def read(name: str) -> Any:
        found = Checkpoint(store)[name]
        return found[...] if name != "value" else found

    def list_it(name: str) -> Any:
        listing = NativeListing(store)
        return listing.value(name) if name == "value" else listing.first(name, 4)

    for way in (read, list_it):
        with pytest.raises(CheckpointError):
            way(name)


def test_a_compressed_block_is_not_larger_than_any_that_is_written(tmp_path: Path) -> None:
    save({"w": torch.zeros(1024)}, storage_writer=FileSystemWriter(tmp_path, compression=True), no_dist=True)
    store = LocalStore(tmp_path)
    root = read_manifest(store)
    assert isinstance(root, Root)
    rows = decode_index(root.head.parts[0].index, "the test")
    rows.blocks = np.array([1 << 31], np.uint32)
    index = encode_index(rows)

    def change(tree: dict[str, Any]) -> None:
        tree["parts"][0][2:5] = [len(index), checksum(index), index]

    forged(store, change)
    for way in (lambda: Checkpoint(store)["w"][...], lambda: NativeListing(store).first("w", 3)):
        with pytest.raises(CheckpointCorruptError, match="cannot have"):
            way()
