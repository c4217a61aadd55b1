"""Layouts: every element of the tensor is held where the placements say, for any mesh, size and order."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.errors import LayoutError
from terrazzo.layout import Box, Layout, Partial, Replicate, Shard


@dataclass(frozen=True)
class Mesh:
    """A mesh seen from one coordinate, without ranks."""

    shape: tuple[int, ...]
    coord: tuple[int, ...] | None

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.coord


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[object], tuple[int, ...]]:
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    choices = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    placements = [draw(st.sampled_from(choices)) for _ in mesh_shape]
    order = tuple(draw(st.permutations(range(len(mesh_shape)))))
    return mesh_shape, shape, placements, order


def brute_force(whole: np.ndarray, mesh_shape, placements, order, coord) -> np.ndarray:
    """torch.chunk's rule applied cut by cut."""
    for m in order:
        if isinstance(placements[m], Shard):
            d = placements[m].dim
            step = -(-whole.shape[d] // mesh_shape[m])
            whole = whole.take(
                range(min(whole.shape[d], coord[m] * step), min(whole.shape[d], (coord[m] + 1) * step)), d
            )
    return whole


@given(placed())
def test_a_box_is_what_the_cuts_leave(case) -> None:
    mesh_shape, shape, placements, order = case
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    for coord in product(*(range(n) for n in mesh_shape)):
        layout = Layout.of(Mesh(mesh_shape, coord), placements, shape, order)
        box = layout.box()
        expected = brute_force(whole, mesh_shape, placements, order, coord)
        assert tuple(layout.local_shape) == expected.shape == box.lengths
        if expected.size:
            assert np.array_equal(whole[box.slices()], expected)
        assert layout.box(coord) == box
        # What is shown of a layout is all of it.
        again = Layout.of(layout.mesh, layout.shown, shape)
        assert again.box() == box and again.shown == layout.shown and again.placements == layout.placements


@given(placed())
def test_part_sizes_add_up(case) -> None:
    mesh_shape, shape, placements, order = case
    layout = Layout.of(Mesh(mesh_shape, (0,) * len(mesh_shape)), placements, shape, order)
    for d in range(len(shape)):
        dims = layout.shard_order(d)
        assert sum(layout.part_sizes(dims, d)) == shape[d]
        assert len(layout.part_sizes(dims, d)) == np.prod([mesh_shape[m] for m in dims], initial=1)


def test_equal_layouts_are_one_object() -> None:
    mesh = Mesh((2, 2), (0, 1))
    a = Layout.of(mesh, [Shard(0), Replicate()], (4, 4))
    assert a is Layout.of(mesh, (Shard(-2), Replicate()), (4, 4))
    assert a is not Layout.of(mesh, [Shard(0), Replicate()], (4, 5))
    assert copy.deepcopy(a) is a
    restored = pickle.loads(pickle.dumps(a))
    assert restored.placements == a.placements and restored.shape == a.shape and restored.mesh == a.mesh
    assert pickle.loads(pickle.dumps(Shard(3))) is Shard(3)
    assert copy.copy(Partial("max")) is Partial("max")


def test_only_the_order_of_cuts_of_one_dim_counts() -> None:
    mesh = Mesh((2, 2, 2), (0, 0, 0))
    shards = [Shard(0), Shard(1), Shard(0)]
    natural = Layout.of(mesh, shards, (8, 8))
    for order in permutations(range(3)):
        layout = Layout.of(mesh, shards, (8, 8), order)
        assert (layout is natural) == (order.index(0) < order.index(2))
    assert Layout.of(mesh, shards, (8, 8), (2, 1, 0)).shard_order(0) == (2, 0)


def test_the_dual_of_terms_is_a_replica() -> None:
    mesh = Mesh((2, 2), (1, 0))
    layout = Layout.of(mesh, [Partial(), Shard(1)], (4, 4))
    assert layout.dual is Layout.of(mesh, [Replicate(), Shard(1)], (4, 4))
    assert layout.dual.dual is layout.dual
    assert layout.varying == (0, 1) and layout.dual.varying == (1,)


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    layout = Layout.of(Mesh((2,), None), [Shard(0)], (4, 4))
    assert tuple(layout.local_shape) == (0,)
    assert layout.box() == Box((0, 0), (0, 0))


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([Shard(0)], "1 placements .* mesh of shape"),
        ([Shard(2), Replicate()], r"Shard\(dim=2\) does not exist in a tensor of shape \(4, 4\)"),
        ([Shard(-3), Replicate()], "does not exist"),
        ([0, Replicate()], "not a placement"),
    ],
)
def test_impossible_layouts_are_refused(placements, message) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.of(Mesh((2, 2), (0, 0)), placements, (4, 4))


def test_placements_refuse_nonsense_and_change() -> None:
    with pytest.raises(LayoutError, match="sum, avg, product, max, min"):
        Partial("mean")
    with pytest.raises(LayoutError, match="int dimension"):
        Shard("0")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="immutable"):
        Shard(0).dim = 1
