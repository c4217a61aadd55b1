"""Files of `torch.save`: read without loading them, in parts; and written one tensor at a time."""

from __future__ import annotations

import argparse
import collections
import io
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.checkpoint.formats.stored import Asked, StoredBox, chunk_at, file_at, read_rows
from terrazzo.checkpoint.formats.torch_archive import Archive, StoredTensor, open_archive, read_value, replace_tensors
from terrazzo.checkpoint.formats.torch_save import UnwrittenTensor, write_archive
from terrazzo.checkpoint.formats.windows import Window
from terrazzo.checkpoint.native.tensors import bytes_of
from terrazzo.checkpoint.stores import LocalStore
from terrazzo.checkpoint.stores.base import Upload
from terrazzo.checkpoint.stores.memory import MemoryStore
from terrazzo.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, UnsafePickleError
from terrazzo.layout.box import Box

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def opened(path: Path, start: int = 0, length: int | None = None) -> Archive:
    store = LocalStore(path.parent)
    return open_archive(Window(store, file_at(store, path.name), start, length))


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert type(actual) is type(expected) and actual.dtype == expected.dtype
        assert actual.requires_grad == expected.requires_grad or not isinstance(expected, torch.nn.Parameter)
        assert actual.shape == expected.shape
        assert bytes(bytes_of(actual.detach().contiguous())) == bytes(bytes_of(expected.detach().contiguous()))
    elif isinstance(expected, dict):
        assert type(actual) is type(expected) and list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert type(actual) is type(expected) and len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


def sample() -> dict[str, Any]:
    base = torch.arange(60.0).reshape(6, 10)
    value: dict[str, Any] = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES}
    value |= {
        "view": base[2:4, 1:5],
        "transposed": base.t(),
        "expanded": torch.ones(1).expand(4),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "nested": [torch.ones(1), {"x": (1, torch.zeros(2), "y")}],
        "module": torch.nn.BatchNorm1d(3).state_dict(),
        "step": 7,
        "large": torch.randn(200, 300),
    }
    return value


@pytest.mark.parametrize("zipped", [True, False])
def test_everything_comes_back(zipped: bool, tmp_path: Path) -> None:
    value = sample()
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    back = opened(tmp_path / "a.pt").materialised()
    assert_same(back, value)
    assert isinstance(back["module"], collections.OrderedDict)
    assert back["module"]._metadata == value["module"]._metadata


def test_the_zip_form_may_be_anywhere_in_a_file(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(torch.arange(5), stream)
    data = stream.getvalue()
    (tmp_path / "a").write_bytes(b"before" + data + b"after")
    assert torch.equal(opened(tmp_path / "a", 6, len(data)).materialised(), torch.arange(5))


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_in_any_container_are_read_and_storages_are_tensors(zipped: bool, tmp_path: Path) -> None:
    value = {
        "namespace": argparse.Namespace(x=torch.ones(2), empty=argparse.Namespace()),
        "deque": collections.deque([torch.zeros(2)]),
        "storage": torch.arange(3.0).untyped_storage(),
        "typed": torch.arange(3.0).storage(),
    }
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    whole = Window(LocalStore(tmp_path), file_at(LocalStore(tmp_path), "a.pt"))
    for back in (opened(tmp_path / "a.pt").materialised(), read_value(whole)):
        assert torch.equal(back["namespace"].x, torch.ones(2)) and vars(back["namespace"].empty) == {}
        assert torch.equal(back["deque"][0], torch.zeros(2)) and torch.equal(back["typed"], torch.arange(3.0))
        assert torch.equal(back["storage"].view(torch.float32), torch.arange(3.0))


def test_two_tensors_on_one_storage_are_both_read(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    torch.save({"a": base, "b": base[5:]}, tmp_path / "a.pt")
    assert torch.equal(opened(tmp_path / "a.pt").materialised()["b"], base[5:])


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_of_a_gpu_are_read_on_the_cpu(zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    torch.save(torch.arange(4), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert torch.equal(opened(tmp_path / "a.pt").materialised(), torch.arange(4))


# ------------------------------------------------------------------ boxes


def read_from(data: bytes, stored: torch.Tensor, start: int, box: Box, target: torch.Tensor) -> int:
    """Fill `target` with a box of a tensor like `stored`, whose bytes are in a file; how many bytes were read."""
    store = MemoryStore()
    store.put("file", data)
    shape, strides = tuple(stored.shape), stored.stride()
    chunk = chunk_at("x", file_at(store, "file"), start, stored.dtype, shape, strides)
    rows = [StoredBox(Box.whole(shape), store, chunk)]
    return read_rows([Asked("x", box, rows)], [target]).nbytes


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    return shape, order, Box(offsets, lengths)


@settings(max_examples=150, deadline=None)
@given(boxes(), st.sampled_from([torch.float32, torch.int64]), st.booleans(), st.integers(0, 3))
def test_a_box_is_what_slicing_gives(
    drawn: tuple[tuple[int, ...], tuple[int, ...], Box], dtype: torch.dtype, spread: bool, start: int
) -> None:
    shape, order, box = drawn
    whole = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.int32)[: torch.Size(shape).numel()]
    whole = whole.reshape(shape).permute(order)
    inverse = sorted(range(len(order)), key=lambda i: order[i])
    tensor = whole.contiguous().permute(inverse)  # the same values as before, in permuted memory
    data = bytes(start) + bytes(bytes_of(tensor.permute(order)))
    target = torch.full(box.lengths, -1, dtype=dtype)
    if spread and target.dim():
        target = torch.full((*box.lengths[:-1], box.lengths[-1] * 2), -1, dtype=dtype)[..., ::2]
    read_from(data, tensor, start, box, target)
    assert torch.equal(target, tensor[box.slices()].to(dtype))


@pytest.mark.parametrize(
    ("shape", "box", "bound"),
    [
        ((1024, 1024), Box((100, 0), (50, 1024)), 1.0),  # rows
        ((64, 65536), Box((0, 0), (64, 8192)), 1.0),  # wide columns: read run by run
        ((4096, 1024), Box((0, 0), (4096, 512)), 2.0),  # half of each short row: read through
        ((8, 512, 1024), Box((2, 0, 0), (1, 512, 1024)), 1.0),
    ],
)
def test_little_more_than_the_box_is_read(shape: Sequence[int], box: Box, bound: float) -> None:
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(tuple(shape))
    target = torch.empty(box.lengths, dtype=torch.int32)
    read = read_from(bytes(bytes_of(whole)), whole, 0, box, target)
    assert torch.equal(target, whole[box.slices()])
    assert read <= bound * target.nbytes


@pytest.mark.parametrize(
    "view", [lambda t: t[::3, 1::2], lambda t: t[:, :1].expand(8, 5), lambda t: t[:6].unfold(0, 4, 1)]
)
def test_views_of_any_strides_are_read(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    whole = torch.arange(120, dtype=torch.int32).reshape(8, 15)
    stored = view(whole)
    for box in (Box.whole(stored.shape), Box((1,) * stored.dim(), tuple(n - 1 for n in stored.shape))):
        target = torch.full(box.lengths, -1, dtype=torch.int32)
        read_from(bytes(bytes_of(whole)), stored, 4 * stored.storage_offset(), box, target)
        assert torch.equal(target, stored[box.slices()])


# ------------------------------------------------------------------ what is not read


def test_a_whole_module_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(UnsafePickleError, match=r"a\.pt: .*torch\.nn\.modules\.linear\.Linear"):
        opened(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2, dtype=torch.complex64).conj(), "conj"),
    ],
)
def test_other_kinds_of_tensors_are_refused(value: torch.Tensor, what: str, tmp_path: Path) -> None:
    torch.save({"x": value}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=what):
        opened(tmp_path / "a.pt")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("folder/file", "text")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", "text" * 100)
    (tmp_path / "pickle").write_bytes(b"\x80\x02K\x01.")
    (tmp_path / "noise").write_bytes(b"PK\x03\x04" + bytes(100))
    for name in ("other.zip", "packed.zip", "pickle"):
        with pytest.raises(CheckpointFormatError, match=name):
            opened(tmp_path / name)
    with pytest.raises(CheckpointCorruptError, match="noise"):
        opened(tmp_path / "noise")


def test_every_flipped_bit_of_what_matters_is_noticed(tmp_path: Path) -> None:
    """Padding and some fields of a zip archive mean nothing; elsewhere a flip is an error, or the value is right."""
    path = tmp_path / "a.pt"
    value = {"w": torch.arange(40.0), "step": 3}
    torch.save(value, path)
    whole = path.read_bytes()
    noticed = 0
    for position in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        try:
            back = opened(path).materialised()
        except CheckpointError:
            noticed += 1
        else:
            assert_same(back, value)
    assert noticed > 150
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            opened(path)


# ------------------------------------------------------------------ writing


def written(path: Path, value: Any) -> None:
    path.unlink(missing_ok=True)
    file = LocalStore(path.parent).upload(path.name, 0)
    write_archive(file, 0, value)
    file.finish()


def test_torch_loads_what_is_written(tmp_path: Path) -> None:
    value = sample()
    written(tmp_path / "a.pt", value)
    for mapped in (False, True):
        assert_same(torch.load(tmp_path / "a.pt", weights_only=True, mmap=mapped), value)
    assert_same(opened(tmp_path / "a.pt").materialised(), value)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            if "/data/" in info.filename:
                with open(tmp_path / "a.pt", "rb") as raw:
                    raw.seek(info.header_offset + 26)
                    lengths = int.from_bytes(raw.read(2), "little") + int.from_bytes(raw.read(2), "little")
                assert (info.header_offset + 30 + lengths) % 64 == 0


def test_pending_tensors_are_asked_for_piece_by_piece(tmp_path: Path) -> None:
    whole = torch.arange(1000, dtype=torch.int32)
    asked: list[int] = []

    def pieces() -> Any:
        for start in range(0, 1000, 300):
            asked.append(start)
            piece = whole[start : start + 300].clone()
            yield bytes_of(piece)
            piece.zero_()

    written(tmp_path / "a.pt", {"w": UnwrittenTensor(torch.int32, (10, 100), pieces)})
    assert asked == [0, 300, 600, 900]
    assert torch.equal(torch.load(tmp_path / "a.pt")["w"], whole.reshape(10, 100))
    with pytest.raises(ValueError, match="should have 4000 bytes"):
        written(tmp_path / "b.pt", UnwrittenTensor(torch.int32, (1000,), lambda: [bytes_of(whole[:10])]))


class Sparse(Upload):
    """A file on disk in which long runs of zeros are holes."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            if len(buffer) < 1 << 20:
                os.pwrite(self.fd, buffer, offset)
            offset += len(buffer)

    def finish(self) -> None:
        os.close(self.fd)

    def abort(self) -> None:
        raise AssertionError


def test_more_than_four_gibibytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zipfile.crc32", lambda data, crc=0: 0)
    zeros = torch.zeros(64 << 20, dtype=torch.uint8)
    count = (4 << 30) + (128 << 20)
    tail = torch.arange(1000.0)
    file = Sparse(tmp_path / "a.pt")
    pending = UnwrittenTensor(torch.uint8, (count,), lambda: [bytes_of(zeros)] * (count // len(zeros)))
    write_archive(file, 0, {"big": pending, "tail": UnwrittenTensor(torch.float32, (1000,), lambda: [bytes_of(tail)])})
    file.finish()
    back = torch.load(tmp_path / "a.pt", mmap=True)
    assert back["big"].shape == (count,) and torch.equal(back["tail"], tail)
    archive = opened(tmp_path / "a.pt")
    stored = archive.value["big"]
    assert isinstance(stored, StoredTensor) and stored.shape == (count,)
    assert torch.equal(archive.tensor(archive.value["tail"]), tail)
    part = torch.ones(10, dtype=torch.uint8)
    read_rows([Asked("big", Box((count - 10,), (10,)), [archive.row(stored)])], [part])
    assert not part.any()


def test_replacing_tensors_leaves_the_original_alone() -> None:
    value = collections.OrderedDict(a=[1, (2,)])
    copied = replace_tensors(value, lambda tensor: None)
    assert copied == value and copied is not value and copied["a"] is not value["a"]
