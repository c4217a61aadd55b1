"""Box arithmetic against masks and index arrays of numpy."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.errors import LayoutError
from terrazzo.layout.box import Box, boxes_of_flat_range, make_up


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 5), max_size=4)))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(start for start, _ in bounds), tuple(end - start for start, end in bounds))


@st.composite
def shape_and_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes())
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


def mask(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    result = np.zeros(shape, dtype=int)
    result[box.slices()] += 1
    return result


@given(shape_and_boxes(2))
def test_set_operations(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, b) = case
    mask_a, mask_b = mask(a, shape), mask(b, shape)
    common = a.intersect(b)
    np.testing.assert_array_equal(mask(common, shape) if common else np.zeros(shape), mask_a * mask_b)
    assert common is None or not common.is_empty
    rest = a.subtract(b)
    # The masks add up, so the pieces are disjoint as well as complete.
    np.testing.assert_array_equal(sum([mask(piece, shape) for piece in rest], np.zeros(shape)), mask_a * (1 - mask_b))
    assert len(rest) <= max(1, 2 * len(shape)) and not any(piece.is_empty for piece in rest)
    assert a.contains(b) == bool((mask_a >= mask_b).all())
    assert a.numel == mask_a.sum() and a.is_empty == (not mask_a.any()) and a.ndim == len(shape)
    assert a.ends == tuple(o + n for o, n in zip(a.offsets, a.lengths, strict=True))
    assert Box.whole(shape).contains(a) and mask(Box.whole(shape), shape).all()


@given(st.data())
def test_relative_boxes_pick_the_same_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    outer = data.draw(boxes_in(shape))
    inner = data.draw(boxes_in(outer.lengths)).shifted(outer.offsets)
    values = np.arange(prod(shape)).reshape(shape)
    relative = inner.relative_to(outer)
    np.testing.assert_array_equal(values[outer.slices()][relative.slices()], values[inner.slices()])
    assert relative.shifted(outer.offsets) == inner


@given(st.data())
def test_split(data: st.DataObject) -> None:
    shape = data.draw(shapes().filter(bool))
    box = data.draw(boxes_in(shape))
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, box.lengths[dim]), max_size=4)))
    sizes = tuple(int(n) for n in np.diff([0, *cuts, box.lengths[dim]]))
    pieces = box.split(dim, sizes)
    assert tuple(piece.lengths[dim] for piece in pieces) == sizes
    values = np.arange(prod(shape)).reshape(shape)
    np.testing.assert_array_equal(
        np.concatenate([values[piece.slices()] for piece in pieces], dim), values[box.slices()]
    )


@given(shape_and_boxes(1))
def test_flat_ranges_are_the_longest_runs(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = case
    ranges = box.flat_ranges(shape)
    expected = np.arange(prod(shape)).reshape(shape)[box.slices()].ravel()
    np.testing.assert_array_equal([i for start, stop in ranges for i in range(start, stop)], expected)
    assert all(stop < start for (_, stop), (start, _) in pairwise(ranges))


@given(st.data())
def test_boxes_of_a_flat_range(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    boxes = boxes_of_flat_range(shape, start, stop)
    values = np.arange(prod(shape)).reshape(shape)
    found = np.concatenate([values[box.slices()].ravel() for box in boxes]) if boxes else np.arange(0)
    np.testing.assert_array_equal(found, np.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert not any(box.is_empty for box in boxes)


@given(shape_and_boxes(1))
def test_flat_ranges_and_boxes_are_inverse(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = case
    covered = np.zeros(shape, dtype=int)
    for start, stop in box.flat_ranges(shape):
        for piece in boxes_of_flat_range(shape, start, stop):
            covered += mask(piece, shape)
    np.testing.assert_array_equal(covered, mask(box, shape))


def test_a_scalar_is_one_element() -> None:
    scalar = Box.whole(())
    assert scalar == Box((), ()) and scalar.numel == 1 and not scalar.is_empty
    assert scalar.intersect(scalar) == scalar and scalar.subtract(scalar) == () and scalar.slices() == ()
    assert scalar.flat_ranges(()) == ((0, 1),) and boxes_of_flat_range((), 0, 1) == (scalar,)


def test_boxes_are_values() -> None:
    assert len({Box((0, 1), (2, 3)), Box((0, 1), (2, 3)), Box((0, 1), (2, 2))}) == 2


def test_refuses_what_is_no_box() -> None:
    cases = [
        (lambda: Box((0,), (1, 2)), "one length per offset"),
        (lambda: Box((0,), (-1,)), "negative"),
        (lambda: Box((-1,), (1,)), "negative"),
        (lambda: Box((0,), (1,)).intersect(Box((), ())), "different numbers of dims"),
        (lambda: Box((0,), (1,)).contains(Box((), ())), "different numbers of dims"),
        (lambda: Box((0,), (4,)).relative_to(Box((1,), (3,))), "does not lie inside"),
        (lambda: Box((0,), (4,)).shifted((1, 2)), "another number of dims"),
        (lambda: Box((0,), (4,)).split(0, (1, 2)), "must add up"),
        (lambda: Box((0,), (4,)).split(0, (5, -1)), "negative"),
        (lambda: Box((0,), (4,)).split(1, (4,)), "no dim 1"),
        (lambda: Box((0,), (4,)).flat_ranges((3,)), "does not lie inside a tensor"),
        (lambda: Box((0,), (4,)).flat_ranges((4, 1)), "does not lie inside a tensor"),
        (lambda: boxes_of_flat_range((2, 2), 1, 5), "not a range"),
        (lambda: boxes_of_flat_range((2, 2), 3, 2), "not a range"),
    ]
    for call, message in cases:
        with pytest.raises(LayoutError, match=message):
            call()


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape that is cut again and again, and mostly changed a little afterwards."""
    shape = draw(shapes())
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.lengths[dim]))
        boxes += box.split(dim, (at, box.lengths[dim] - at))
    if draw(st.booleans()) and shape:
        number = draw(st.integers(0, len(boxes) - 1))
        moved = [max(start + draw(st.integers(-1, 1)), 0) for start in boxes[number].offsets]
        boxes[number] = Box(tuple(moved), boxes[number].lengths)
    return shape, draw(st.permutations(boxes))


@given(st.one_of(tilings(), shape_and_boxes(3)))
def test_boxes_make_up_a_shape_if_each_element_is_in_one(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    inside = [box for box in boxes if all(end <= n for end, n in zip(box.ends, shape, strict=True)) or box.is_empty]
    once = bool((sum([mask(box, shape) for box in inside if not box.is_empty], np.zeros(shape, int)) == 1).all())
    assert make_up(Box.whole(shape), boxes) == (once and len(inside) == len(boxes))


def test_boxes_whose_corners_cancel_in_no_dim_are_no_way_to_use_up_memory() -> None:
    assert not make_up(Box.whole((100,) * 64), [Box((n,) * 64, (1,) * 64) for n in range(100)])
    whole = Box.whole((2,) * 12)  # but a grid in many dims is one
    boxes = [whole]
    for dim in range(12):
        boxes = [part for box in boxes for part in box.split(dim, (1, 1))]
    assert make_up(whole, boxes)
    assert not make_up(whole, [*boxes[1:], boxes[1]])
