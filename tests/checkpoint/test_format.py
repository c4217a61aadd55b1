"""The native format: an independent reader written from docs/format.md, and checkpoints of released versions."""

from __future__ import annotations

import struct
from math import ceil, prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from checkpoint.golden_state import golden_state
from terrazzo.checkpoint import Checkpoint, LazyTensor, load, save, verify

GOLDEN = sorted((Path(__file__).parents[1] / "golden").iterdir())


def read_as_documented(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The head and all chunks, by nothing but the specification."""
    data = (path / "manifest.terrazzo").read_bytes()
    magic, version, zero, head_size, size, head_sum, rest_sum, zero2, own_sum = struct.unpack_from("<8sIIQQQQQQ", data)
    assert (magic, version, zero, zero2, size) == (b"TERRAZZO", 1, 0, 0, len(data))
    assert xxhash.xxh3_64_intdigest(data[:56]) == own_sum
    head_bytes, rest = data[64 : 64 + head_size], data[64 + head_size :]
    assert xxhash.xxh3_64_intdigest(head_bytes) == head_sum and xxhash.xxh3_64_intdigest(rest) == rest_sum
    head = msgspec.msgpack.decode(head_bytes, ext_hook=lambda code, payload: (code, bytes(payload)))
    columns = rest[-head_size % 8 :]
    chunks = sum(head["counts"])
    position = 0

    def column(kind: str, count: int) -> np.ndarray:
        nonlocal position
        array = np.frombuffer(columns, kind, count, position)
        position += array.nbytes
        return array

    starts, sums, files = column("<u8", chunks), column("<u8", head["sums"]), column("<u4", chunks)
    most = max(len(shape) for _, _, shape, _ in head["tensors"])
    rows = [sum(c for (_, _, s, _), c in zip(head["tensors"], head["counts"], strict=True) if len(s) == d)
            for d in range(most + 1)]  # fmt: skip
    boxes = [iter(column("<u8" if head["wide"] else "<u4", n * 2 * d).reshape(n, 2, d).tolist())
             for d, n in enumerate(rows)]  # fmt: skip
    assert position == len(columns)
    tensors, chunk, first_sum = {}, 0, 0
    for (name, dtype, shape, _kind), count in zip(head["tensors"], head["counts"], strict=True):
        torch_dtype = getattr(torch, dtype)
        whole = torch.zeros(shape, dtype=torch_dtype)
        for _ in range(count):
            offsets, lengths = next(boxes[len(shape)])
            nbytes = prod(lengths) * torch_dtype.itemsize
            file_name, file_size, header_size, header_sum = head["files"][files[chunk]]
            content = (path / file_name).read_bytes()
            assert len(content) == file_size and xxhash.xxh3_64_intdigest(content[:header_size]) == header_sum
            part = content[starts[chunk] : starts[chunk] + nbytes]
            for block in range(ceil(nbytes / head["block"])):
                begin = block * head["block"]
                assert xxhash.xxh3_64_intdigest(part[begin : begin + head["block"]]) == sums[first_sum]
                first_sum += 1
            if nbytes:
                index = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
                whole[index] = torch.frombuffer(bytearray(part), dtype=torch_dtype).reshape(lengths)
            chunk += 1
        tensors[name] = whole
    return head, tensors


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


def test_the_specification_suffices_to_read_what_we_write(tmp_path: Path) -> None:
    state = golden_state() | {"large": torch.arange(300_000.0)}
    save(state, checkpoint_id=tmp_path)
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
