"""The viewer's data, against what torch itself says of who holds what, and against what the ranks have saved."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, save
from terrazzo.errors import LayoutError, UnsupportedValueError
from terrazzo.layout import Box, Layout, Replicate, Shard, grid_of
from terrazzo.layout.drawing import runs_text
from terrazzo.view.data.checkpoint_data import checkpoint_data
from terrazzo.view.data.diff_data import diff_data
from terrazzo.view.data.layout_data import SketchedMesh, layout_data, mesh_of, placements_of, shape_of
from terrazzo.view.statistics import statistics
from view.samples import HOSTILE, SHARDED, save_hostile, save_sharded

# ------------------------------------------------------------------ layouts


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    return shape, mesh, [draw(st.sampled_from(kinds)) for _ in mesh]


@given(layouts())
def test_a_layout_is_what_torch_computes(case):
    shape, mesh, placements = case
    torchs = [TorchShard(p.dim) if isinstance(p, Shard) else TorchReplicate() for p in placements]
    data = layout_data(Layout.of(SketchedMesh(mesh), placements, shape))
    held = _held(data["grid"])
    for rank, coordinate in enumerate(product(*map(range, mesh))):
        lengths, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), torchs)
        numel = int(np.prod(lengths))
        assert data["elements"][rank] == numel
        assert held.get(rank) == ((tuple(offsets), tuple(lengths)) if numel else None)


def _held(grid):
    """The box of each rank, as the page's grid has it."""
    spans = [
        list(zip(starts, [*starts[1:], size], strict=False))
        for starts, size in zip(grid["starts"], grid["shape"], strict=True)
    ]
    found = {}
    for cell, holders in zip(product(*spans), grid["holders"], strict=True):
        for rank in holders:
            assert rank not in found, "a rank holds one part"
            found[rank] = tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell)
    return found


def test_a_layout_of_ranks_that_do_not_exist():
    layout = Layout.of(mesh_of("dp=64,tp=8"), placements_of("S(0),S(1)"), shape_of("4096,4096"))
    data = layout_data(layout, itemsize=2, title="512 ranks")
    assert len(data["grid"]["holders"]) == 512 and data["ranks"] == list(range(512))
    assert set(data["elements"]) == {64 * 512} and data["mesh"] == [["dp", 64], ["tp", 8]]
    assert "dp: S(0), tp: S(1)" in data["caption"]


@pytest.mark.parametrize(
    ("read", "text"),
    [(mesh_of, "dp=0"), (mesh_of, ""), (mesh_of, "dp=2,dp=2"), (mesh_of, "a=70000,b=70000"), (placements_of, "S(x)"),
     (placements_of, ""), (placements_of, "P(median)"), (shape_of, "4,-1"), (shape_of, "4;5")],
)  # fmt: skip
def test_what_is_no_layout_is_refused(read, text):
    with pytest.raises(LayoutError):
        read(text)


def test_boxes_that_form_no_grid():
    assert grid_of((4, 4), {0: Box((0, 0), (4, 2)), 1: Box((0, 2), (2, 2)), 2: Box((2, 2), (2, 2))}) is None
    assert grid_of((4,), {0: Box((2,), (2,))}) is None
    assert grid_of((), {5: Box((), ()), 3: Box((), ())}).holders == ((5, 3),)
    assert grid_of((0, 2), {0: Box((0, 0), (0, 2))}).holders == ()
    assert runs_text([]) == "" and runs_text([3]) == "3" and runs_text([1, 2, 9]) == "1-2, 9"


# ------------------------------------------------------------------ checkpoints


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("sharded") / "one")
    run_ranks(4, save_sharded, path)
    return path


def test_parts_are_where_torch_says_that_their_ranks_hold_them(sharded):
    data = checkpoint_data(Checkpoint(sharded), "one")
    assert data["by_rank"] and len(data["files"]) == 4 and data["about"]["ranks"] == 4
    seen = set()
    for name, kind, owner in zip(data["names"], data["kind"], data["owner"], strict=True):
        about = data["kinds"][kind]
        if about["dtype"] is None:
            assert name == "step" and owner == -1
            continue
        shape, placements = SHARDED[name]
        assert (
            about["shape"] == list(shape) and about["dtype"] == "float32" and about["bytes"] == 4 * int(np.prod(shape))
        )
        torchs = [TorchShard(p.dim) if isinstance(p, Shard) else TorchReplicate() for p in placements]
        boxes = _boxes(about)
        assert len(boxes) == about["parts"] == len(data["owners"][owner])
        for (offsets, lengths), rank in zip(boxes, data["owners"][owner], strict=True):
            coordinate = [rank // 2, rank % 2]
            expected = _compute_local_shape_and_global_offset(shape, (2, 2), coordinate, torchs)
            assert (tuple(lengths), tuple(offsets)) == expected, name
        assert sum(int(np.prod(lengths)) for _, lengths in boxes) == int(np.prod(shape)), "each element once"
        seen.add(name)
    assert seen == set(SHARDED)


def _boxes(about):
    if "boxes" in about["cut"]:
        return about["cut"]["boxes"]
    ranges = [range(0, max(size, 1), step) for size, step in zip(about["shape"], about["cut"]["steps"], strict=True)]
    return [
        (
            offsets,
            [
                min(step, size - at)
                for at, size, step in zip(offsets, about["shape"], about["cut"]["steps"], strict=True)
            ],
        )
        for offsets in product(*ranges)
    ]


def test_tensors_alike_share_what_is_said_of_them(tmp_path):
    save({f"layers.{i}.{n}": torch.zeros(2, 3) for i in range(50) for n in "ab"}, checkpoint_id=tmp_path / "many")
    data = checkpoint_data(Checkpoint(tmp_path / "many"), "many")
    assert len(data["names"]) == 100 and len(data["kinds"]) == 1 and len(data["owners"]) == 1
    assert data["names"][:3] == ["layers.0.a", "layers.0.b", "layers.1.a"]


@pytest.mark.parametrize("format", ["dcp", "torch_save", "safetensors"])
def test_checkpoints_of_other_formats(format, tmp_path):
    from terrazzo.checkpoint.formats.convert import convert

    save({"w": torch.arange(6.0).reshape(2, 3)}, checkpoint_id=tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "other", format)
    data = checkpoint_data(Checkpoint(tmp_path / "other"), "other")
    kind = data["kinds"][data["kind"][data["names"].index("w")]]
    assert kind["shape"] == [2, 3] and kind["bytes"] == 24 and not data["by_rank"]
    json.dumps(data, allow_nan=False)


def test_hostile_names_are_only_data(tmp_path):
    save_hostile(tmp_path / "hostile")
    data = checkpoint_data(Checkpoint(tmp_path / "hostile"), "hostile")
    assert set(HOSTILE) < set(data["names"])


# ------------------------------------------------------------------ differences


def test_differences_are_those_that_numpy_finds(sharded, tmp_path):
    path = str(tmp_path / "other")
    run_ranks(4, save_sharded, path, 0.5)
    one, other = Checkpoint(sharded), Checkpoint(path)
    data = diff_data(one, other, ("a", "b"))
    assert [row["name"] for row in data["rows"]] == ["model.uneven", "step"] and data["equal"] == len(SHARDED) - 1
    gap = np.abs(one["model.uneven"][...].numpy().astype(float) - other["model.uneven"][...].numpy().astype(float))
    row = data["rows"][0]
    assert row["differing"] == np.count_nonzero(gap) and row["elements"] == gap.size and row["largest"] == gap.max()
    assert data["rows"][1]["what"] == "7 and 8" and data["rows"][1]["differing"] is None
    again = diff_data(one, other, ("a", "b"), tolerance=0.75)
    assert [row["name"] for row in again["rows"]] == ["step"]


def test_differences_of_kinds(tmp_path):
    save({"only": torch.ones(2), "shape": torch.ones(2), "kind": 3, "w": torch.tensor([1.0, float("inf")])},
         checkpoint_id=tmp_path / "a")  # fmt: skip
    save({"shape": torch.ones(3), "kind": torch.ones(1), "w": torch.tensor([1.0, 2.0]), "new": 1},
         checkpoint_id=tmp_path / "b")  # fmt: skip
    data = diff_data(Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b"), ("a", "b"))
    rows = {row["name"]: row for row in data["rows"]}
    assert rows["only"]["in"] == [True, False] and rows["new"]["in"] == [False, True]
    assert rows["shape"]["what"] == "shapes [2] and [3]" and "tensor in one" in rows["kind"]["what"]
    assert rows["w"]["differing"] == 1 and rows["w"]["largest"] == "inf"
    json.dumps(data, allow_nan=False)


# ------------------------------------------------------------------ statistics


@pytest.mark.parametrize("window", [64, 1 << 20])
@pytest.mark.parametrize(
    "values",
    [
        torch.randn(7, 11, generator=torch.Generator().manual_seed(1)),
        torch.tensor([[1.0, float("nan")], [float("inf"), -3.0]]),
        torch.arange(100, dtype=torch.int16).reshape(4, 25),
        torch.full((9,), 2.5).bfloat16(),
        torch.tensor([True, False, True]),
        torch.tensor([1e308, -1e308], dtype=torch.float64),
        torch.tensor(4.0),
        torch.zeros(0, 3),
        torch.tensor([float("nan")]),
    ],
    ids=lambda values: f"{values.dtype}-{list(values.shape)}",
)
def test_statistics_are_numpys(values, window, tmp_path):
    save({"w": values}, checkpoint_id=tmp_path / "one")
    found = statistics(Checkpoint(tmp_path / "one")["w"], bins=10, window=window)
    plain = values.double().numpy().reshape(-1)
    finite = plain[np.isfinite(plain)]
    assert found["elements"] == plain.size and found["finite"] == finite.size
    assert found["nan"] == np.isnan(plain).sum() and found["infinite"] == np.isinf(plain).sum()
    assert found["zeros"] == (plain == 0).sum() and sum(found["counts"]) == finite.size
    json.dumps(found, allow_nan=False)
    if not finite.size:
        assert found["min"] is None and found["counts"] == []
        return
    assert (found["min"], found["max"]) == (finite.min(), finite.max())
    if finite.max() < 1e300:
        assert found["mean"] == pytest.approx(finite.mean()) and found["std"] == pytest.approx(finite.std())
    if finite.min() < finite.max():
        assert found["counts"] == np.histogram(finite, bins=np.array(found["edges"]))[0].tolist()
        if finite.max() < 1e300:  # numpy's own overflow
            np.testing.assert_allclose(found["edges"], np.linspace(finite.min(), finite.max(), 11), atol=1e-12)


def test_statistics_of_complex_values_are_of_their_magnitudes(tmp_path):
    save({"w": torch.tensor([3 + 4j, 0j])}, checkpoint_id=tmp_path / "one")
    found = statistics(Checkpoint(tmp_path / "one")["w"])
    assert (found["min"], found["max"], found["zeros"]) == (0.0, 5.0, 1)


def test_statistics_of_bits_are_refused(tmp_path):
    save({"w": torch.zeros(4, dtype=torch.uint8).view(torch.uint4)}, checkpoint_id=tmp_path / "one")
    with pytest.raises(UnsupportedValueError, match="uint4"):
        statistics(Checkpoint(tmp_path / "one")["w"])


def test_statistics_read_in_pieces(tmp_path, monkeypatch):
    save({"w": torch.randn(1000, 8)}, checkpoint_id=tmp_path / "one")
    tensor = Checkpoint(tmp_path / "one")["w"]
    sizes = []
    read = type(tensor).read
    monkeypatch.setattr(type(tensor), "read", lambda self, box: (sizes.append(box.numel), read(self, box))[1])
    statistics(tensor, window=4096)
    assert max(sizes) * 8 <= 4096 and sum(sizes) == 2 * 8000
