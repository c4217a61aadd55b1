"""The native format: an independent reader written from docs/format.md, and checkpoints of released versions."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import ceil, prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from safetensors.torch import load_file

from checkpoint.golden_state import golden_state
from terrazzo.checkpoint import (
    Checkpoint,
    DefaultLoadPlanner,
    DefaultStager,
    FileSystemWriter,
    LazyTensor,
    async_save,
    load,
    save,
    verify,
)
from terrazzo.checkpoint.native.root import Root, encode_root
from terrazzo.errors import CheckpointCorruptError, CheckpointFormatError, CheckpointMismatchError

GOLDEN = sorted((Path(__file__).parents[1] / "golden").iterdir())


def read_as_documented(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The head and all chunks, by nothing but the specification."""
    data = (path / "manifest.terrazzo").read_bytes()
    magic, version, zero, head_size, size, head_sum, *zeros, own_sum = struct.unpack_from("<8sIIQQQQQQ", data)
    assert (magic, version, zero, zeros, size) == (b"TERRAZZO", 1, 0, [0, 0], len(data)) and size == 64 + head_size
    assert xxhash.xxh3_64_intdigest(data[:56]) == own_sum
    assert xxhash.xxh3_64_intdigest(data[64:]) == head_sum
    head = msgspec.msgpack.decode(data[64:], ext_hook=lambda code, payload: (code, bytes(payload)))
    assert set(head["features"]) <= {"zstd"}
    by_hash = {xxhash.xxh3_64_intdigest(entry[0].encode()): entry for entry in head["tensors"]}
    tensors = {e[0]: torch.zeros(e[2], dtype=torch.uint8 if e[1] not in NUMERIC else getattr(torch, e[1]))
               for e in head["tensors"]}  # fmt: skip
    seen = dict.fromkeys(tensors, 0)
    for number, (files, index_file, index_size, index_sum, inline) in enumerate(head["parts"]):
        index = (path / index_file).read_bytes() if index_file else inline
        assert len(index) == index_size and xxhash.xxh3_64_intdigest(index) == index_sum
        for name, offsets, lengths, content in chunks_as_documented(path, files, index, by_hash):
            entry = by_hash[xxhash.xxh3_64_intdigest(name.encode())]
            whole = tensors[name]
            if content:
                part = torch.frombuffer(bytearray(content), dtype=whole.dtype).reshape(lengths)
                whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] = part
            seen[name] += prod(lengths)
            layout, owners = head["layouts"][entry[4]], np.frombuffer(head["owners"][entry[5]], "<u4")
            if isinstance(layout, list):  # the chunk of the grid that it is in belongs to this part
                counts = [max(ceil(n / step), 1) for n, step in zip(entry[2], layout, strict=True)]
                place = [o // step for o, step in zip(offsets, layout, strict=True)]
                chunk = int(np.ravel_multi_index(place, counts)) if counts else 0
                assert owners[chunk] == number and len(owners) == prod(counts)
    assert all(seen[name] == value.numel() for name, value in tensors.items())
    return head, tensors


NUMERIC = {str(dtype).removeprefix("torch.") for dtype in
           [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
            torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64, torch.complex128]}  # fmt: skip


def chunks_as_documented(path: Path, files: list, index: bytes, by_hash: dict) -> Iterator[tuple]:
    """Name, offsets, lengths and bytes of each chunk of a part."""
    if not index:
        return
    magic, n, b, s, f = struct.unpack_from("<8sQQQQ", index)
    assert magic == b"TZINDEX1"
    position = 40

    def column(kind: str, count: int) -> list[int]:
        nonlocal position
        array = np.frombuffer(index, kind, count, position)
        position += array.nbytes
        return array.tolist()

    hashes, starts, sizes, boxes, sums = (column("<u8", count) for count in (n, n, n, b, s))
    chunk_files, blocks, ndims, codecs, frames = (column("<u4", count) for count in (n, n, n, n, f))
    assert position + 4 * (f % 2) == len(index) and hashes == sorted(hashes)
    contents = []
    for name, size, header_size, header_sum in files:
        content = (path / name).read_bytes()
        assert len(content) == size and xxhash.xxh3_64_intdigest(content[:header_size]) == header_sum
        contents.append(content)
    next_box, next_sum, next_frame = iter(boxes), iter(sums), iter(frames)
    for row in range(n):
        offsets = [next(next_box) for _ in range(ndims[row])]
        lengths = [next(next_box) for _ in range(ndims[row])]
        name, dtype = by_hash[hashes[row]][:2]
        at, content = starts[row], b""
        for block in range(ceil(sizes[row] / blocks[row])):
            raw = min(blocks[row], sizes[row] - block * blocks[row])
            length = next(next_frame) if codecs[row] else raw
            stored = contents[chunk_files[row]][at : at + length]
            assert xxhash.xxh3_64_intdigest(stored) == next(next_sum)
            if codecs[row] and length != raw:
                item = getattr(torch, dtype).itemsize
                shuffled = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw)
                stored = np.frombuffer(shuffled, np.uint8).reshape(item, -1).T.tobytes()
            content += stored
            at += length
        yield name, offsets, lengths, content


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def flat_tensors(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            found[prefix + name] = value
        elif isinstance(value, dict):
            found |= flat_tensors(value, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("compression", [False, True])
def test_the_specification_suffices_to_read_what_we_write(tmp_path: Path, compression: bool) -> None:
    state = golden_state() | {"large": torch.arange(300_000.0), "wide": torch.randn(4, 20_000)}
    state |= {f"many.{n}": torch.full((3,), float(n)) for n in range(300)}  # too many for an index in the root
    save(state, storage_writer=FileSystemWriter(tmp_path, compression=compression))
    assert len(list(tmp_path.glob("index-*"))) == 1
    assert verify(tmp_path) == []
    head, tensors = read_as_documented(tmp_path)
    for name, value in flat_tensors(state).items():
        assert same_bits(tensors[name], value), name
    inline = {name: data for name, _, data in head["objects"]}
    assert msgspec.msgpack.decode(inline["objects.text"]) == "käse"
    assert bytes(tensors["objects.long"].numpy()) == msgspec.msgpack.encode("z" * 5000)
    assert head["paths"]["objects.text"] == ["objects", "text"]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_released_versions_stay_readable(path: Path) -> None:
    assert verify(path) == []
    expected = golden_state()
    loaded = Checkpoint(path).state_dict()
    for name, value in flat_tensors(expected).items():
        assert same_bits(flat_tensors(loaded)[name], value), name
    assert loaded["objects"] == expected["objects"]
    target = {name: torch.zeros_like(value) for name, value in expected["tensors"].items()}
    load({"tensors": target}, checkpoint_id=path)
    assert all(same_bits(target[name], value) for name, value in expected["tensors"].items())


def test_there_is_a_golden_checkpoint_of_the_present_version() -> None:
    assert any(read_as_documented(path)[0]["writer"].startswith("terrazzo") for path in GOLDEN)


def test_names_of_chunks_and_alignment(tmp_path: Path) -> None:
    state = {"odd": torch.zeros(3, dtype=torch.uint8), "page": torch.zeros(2048)}
    save(state | {"d": torch.zeros(5, dtype=torch.float64)}, checkpoint_id=tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    header = msgspec.json.decode(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    assert header.pop("__metadata__")["terrazzo"] == "1"
    assert {name: entry["data_offsets"][0] for name, entry in header.items()} == {"page": 0, "d": 8192, "odd": 8232}
    assert load_file(path)["d"].shape == (5,)


def test_data_files_are_valid_safetensors_under_any_name(tmp_path: Path) -> None:
    """Also under names that look like a chunk of another tensor, or like what the header has itself."""
    mesh_like = torch.arange(12.0).reshape(4, 3)
    names = ["__metadata__", "w", "w[0:2,0:3]", "w[0:2,0:3]#2", "", "a/b", "käse", '"', "w#zstd"]
    state = {name: mesh_like + number for number, name in enumerate(names)}
    for compression in (False, True):
        path = tmp_path / str(compression)
        save(state, storage_writer=FileSystemWriter(path, compression=compression), no_dist=True)
        (file,) = path.glob("*.safetensors")
        assert len(load_file(file)) == len(names)
        target = {name: torch.zeros(4, 3) for name in names}
        load(target, checkpoint_id=path, no_dist=True)
        assert all(torch.equal(target[name], value) for name, value in state.items())


def test_every_dtype_of_torch(tmp_path: Path) -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    dtypes -= {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}  # these have a scale besides
    state, target = {}, {}
    for dtype in dtypes:
        raw = torch.randint(0, 2, (24 * dtype.itemsize,), dtype=torch.uint8)
        state[str(dtype)] = raw.view(dtype).reshape(4, 6)
        target[str(dtype)] = torch.zeros(24 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(4, 6)
    for compression in (False, True):
        save(state, storage_writer=FileSystemWriter(tmp_path, compression=compression), no_dist=True)
        load(target, checkpoint_id=tmp_path, no_dist=True)
        checkpoint = Checkpoint(tmp_path)
        for name, value in state.items():
            assert same_bits(target[name], value), name
            part = checkpoint[name][1:3, 2:5]
            assert part.dtype == value.dtype and torch.equal(bits_of(part), bits_of(value)[1:3, 2:5]), name
        (file,) = tmp_path.glob("*.safetensors")
        assert len(load_file(file)) == len(state)
    with pytest.raises(CheckpointMismatchError, match="int4"):
        load({"torch.int4": torch.zeros(4, 6)}, checkpoint_id=tmp_path, no_dist=True)
    turned = {name: value.t() for name, value in state.items()}
    for stager in (None, DefaultStager()):
        async_save(turned, checkpoint_id=tmp_path, async_stager=stager, no_dist=True).result()
        found = {name: value.reshape(6, 4) for name, value in target.items()}
        load(found, checkpoint_id=tmp_path, no_dist=True)
        for name, value in state.items():
            assert torch.equal(bits_of(found[name]), bits_of(value).t()), name


@pytest.mark.parametrize("lossy", [False, True])
def test_what_torch_cannot_convert_is_not_loaded_as_other_numbers(lossy: bool, tmp_path: Path) -> None:
    raw = torch.arange(12, dtype=torch.uint8)
    save({"f": torch.arange(12.0), "u": raw.view(torch.uint4)}, checkpoint_id=tmp_path, no_dist=True)
    target = torch.full((12,), 7, dtype=torch.uint8)
    for name, asked in (
        ("f", target.view(torch.uint4)),
        ("f", target.view(torch.float4_e2m1fn_x2)),
        ("u", target),
        ("u", target.view(torch.int4)),
    ):
        with pytest.raises(CheckpointMismatchError, match="torch cannot convert"):
            planner = DefaultLoadPlanner(allow_lossy_dtype=lossy)
            load({name: asked}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert target.eq(7).all()


def bits_of(value: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return value.view(kinds[value.dtype.itemsize])


def test_an_unknown_dtype_costs_that_tensor_only_and_an_unknown_feature_all(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "b": torch.ones(4, dtype=torch.float8_e5m2)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / "manifest.terrazzo"
    root = Root(path.read_bytes(), "test")

    def rewrite(**changes: Any) -> None:
        path.write_bytes(encode_root(msgspec.structs.replace(root.head, **changes)))

    strange = [msgspec.structs.replace(t, dtype="float3") if t.name == "b" else t for t in root.head.tensors]
    rewrite(tensors=strange)
    target = {"a": torch.zeros(3)}
    load(target, checkpoint_id=tmp_path, no_dist=True)
    assert target["a"].eq(1).all()
    with pytest.raises(CheckpointFormatError, match="float3"):
        load({"b": torch.zeros(4, dtype=torch.float8_e5m2)}, checkpoint_id=tmp_path, no_dist=True)
    rewrite(features=["zstd", "folding"])
    with pytest.raises(CheckpointFormatError, match="folding"):
        load(target, checkpoint_id=tmp_path, no_dist=True)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b", "..", "x\0"])
def test_a_file_name_does_not_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    save({"a": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / "manifest.terrazzo"
    head = Root(path.read_bytes(), "test").head
    part = head.parts[0]
    for strange in (
        msgspec.structs.replace(part, files=[msgspec.structs.replace(part.files[0], name=name)]),
        msgspec.structs.replace(part, index_file=name),
    ):
        path.write_bytes(encode_root(msgspec.structs.replace(head, parts=[strange])))
        with pytest.raises(CheckpointCorruptError, match="not in its folder"):
            load({"a": torch.zeros(3)}, checkpoint_id=tmp_path, no_dist=True)


# ------------------------------------------------------------------ Checkpoint


def test_lazy_tensors_read_only_what_is_indexed(tmp_path: Path) -> None:
    big = torch.arange(4_000_000.0).reshape(2000, 2000)
    save({"m": {"big": big, "s": torch.tensor(4)}, "step": 3}, checkpoint_id=tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert sorted(checkpoint) == ["m.big", "m.s", "step"] and "m.big" in checkpoint and len(checkpoint) == 3
    lazy = checkpoint["m.big"]
    assert isinstance(lazy, LazyTensor) and lazy.shape == big.shape and lazy.nbytes == big.nbytes
    assert checkpoint["step"] == 3 and checkpoint["m.s"][...] == 4
    before = checkpoint.bytes_read
    assert torch.equal(lazy[10:20], big[10:20])
    assert checkpoint.bytes_read - before <= 2 * 262144  # ten rows, and the rest of their blocks of checksums
    indices = [..., 5, -1, slice(None, None, 3), (slice(3, 9, 2), slice(-5, None)), (0, 0), (slice(4, 2), 1),
               (..., 7), torch.tensor([3, 1]), (slice(None), [1, 2])]  # fmt: skip
    for index in indices:
        assert torch.equal(lazy[index], big[index]), index
    for index in [(0, 0, 0), 2000, (0, -2001)]:
        with pytest.raises(IndexError):
            lazy[index]
    with pytest.raises(KeyError):
        checkpoint["absent"]
    assert torch.equal(checkpoint.state_dict()["m"]["big"], big)
