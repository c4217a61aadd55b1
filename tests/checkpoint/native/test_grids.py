"""Which chunk of a grid a box is."""

from __future__ import annotations

from itertools import product

import pytest

from terrazzo.checkpoint.native.chunks import GridChunks
from terrazzo.layout.box import Box


@pytest.mark.parametrize(
    ("shape", "steps"),
    [((), ()), ((7,), (3,)), ((4, 3), (2, 2)), ((0, 3), (1, 2)), ((5, 1, 4), (2, 1, 4)), ((2,), (5,))],
)
def test_a_box_is_a_chunk_exactly_if_it_is_one_of_the_list(shape: tuple[int, ...], steps: tuple[int, ...]) -> None:
    grid = GridChunks(shape, steps)
    listed = [grid.box(number) for number in range(len(grid))]
    assert [grid.number_of(box) for box in listed] == list(range(len(grid)))
    for offsets in product(*(range(n + 2) for n in shape)):
        for lengths in product(*(range(n + 2) for n in shape)):
            box = Box(offsets, lengths)
            expected = listed.index(box) if box in listed else -1
            assert grid.number_of(box) == expected, box
