"""What is found without asking all ranks is what asking all of them gives."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.layout import (
    Box,
    Layout,
    Replicate,
    Shard,
    cells_in,
    coordinates_of_all_shapes,
    first_holders,
    leaves_a_rank_empty,
    replicas,
)
from terrazzo.layout.chunking import chunk_runs, chunk_sizes, chunk_span, chunks_between
from tests.layout.test_layout import Mesh


@st.composite
def layouts(draw: st.DrawFn, count: int = 1) -> list[Layout]:
    """Layouts on one mesh, of tensors of different shapes."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    made = []
    for _ in range(count):
        shape = tuple(draw(st.lists(st.integers(0, 11), max_size=3)))
        choices = [Replicate(), *(Shard(d) for d in range(len(shape)))]
        placements = [draw(st.sampled_from(choices)) for _ in mesh_shape]
        order = tuple(draw(st.permutations(range(len(mesh_shape)))))
        made.append(Layout.of(Mesh(mesh_shape, (0,) * len(mesh_shape)), placements, shape, order))
    return made


def everyone(layout: Layout) -> list[Box]:
    """What each rank holds, in row-major order."""
    return [layout.box(at) for at in product(*(range(n) for n in layout.mesh_shape))]


@settings(deadline=None)
@given(layouts(), st.data())
def test_the_cells_in_a_box_are_those_that_meet_it(made, data) -> None:
    (layout,) = made
    starts = [data.draw(st.integers(0, n)) for n in layout.shape]
    box = Box(tuple(starts), tuple(data.draw(st.integers(0, n - s)) for s, n in zip(starts, layout.shape, strict=True)))
    expected = {}
    for index, cell in enumerate(everyone(layout)):
        common = box.intersect(cell)
        if common is not None and not common.is_empty and not box.is_empty:
            expected[index] = common.relative_to(box)
    found = {first + copy: part for first, part in cells_in(layout, box) for copy in replicas(layout)}
    assert found == expected
    # Each cell comes once, under the first rank that holds it.
    assert len(found) == len(list(cells_in(layout, box))) * len(replicas(layout))


@settings(deadline=None)
@given(layouts())
def test_ranks_that_hold_the_same_cell(made) -> None:
    (layout,) = made
    coordinates = list(product(*(range(n) for n in layout.mesh_shape)))
    cut = [m for m, p in enumerate(layout.placements) if isinstance(p, Shard)]
    firsts = first_holders(layout)
    for index, at in enumerate(coordinates):
        same = [i for i, other in enumerate(coordinates) if all(at[m] == other[m] for m in cut)]
        assert firsts[index] == same[0]
        assert [same[0] + copy for copy in replicas(layout)] == same


@settings(deadline=None)
@given(layouts(count=3))
def test_a_few_coordinates_show_all_shapes(made) -> None:
    coordinates = product(*(range(n) for n in made[0].mesh_shape))
    all_shapes = {tuple(layout.box(at).lengths for layout in made) for at in coordinates}
    assert {tuple(layout.box(at).lengths for layout in made) for at in coordinates_of_all_shapes(made)} == all_shapes
    for layout in made:
        empty = any(box.is_empty for box in everyone(layout)) and not Box.whole(layout.shape).is_empty
        assert leaves_a_rank_empty(layout) == empty


@given(st.integers(0, 40), st.integers(1, 12), st.data())
def test_runs_of_chunks(size, parts, data) -> None:
    runs = chunk_runs(size, parts)
    assert len(runs) <= 3 and runs[0][0] == 0
    for index in range(parts):
        length = [length for first, length in runs if first <= index][-1]
        assert length == chunk_span(size, parts, index)[1] == chunk_sizes(size, parts)[index]
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    spans = [chunk_span(size, parts, index) for index in range(parts)]
    meeting = [i for i, (at, length) in enumerate(spans) if max(at, start) < min(at + length, stop)]
    assert list(chunks_between(size, parts, start, stop)) == meeting


@pytest.mark.parametrize(
    ("length", "coordinates"), [(8192, 1), (4096, 1), (4095, 2), (5000, 2), (5001, 3), (1, 2), (0, 1)]
)
def test_thousands_of_ranks_need_few_coordinates(length, coordinates) -> None:
    layout = Layout.of(Mesh((4096,), (7,)), [Shard(0)], (length, 8))
    assert len(coordinates_of_all_shapes([layout])) == coordinates
