"""Changes of elements, as they are found in boxes of other layouts."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given

from terrazzo.layout import Box
from terrazzo.publish.delta import in_box


@st.composite
def boxes(draw, shape):
    offsets = [draw(st.integers(0, length - 1)) for length in shape]
    lengths = [draw(st.integers(1, length - offset)) for length, offset in zip(shape, offsets, strict=True)]
    return Box(tuple(offsets), tuple(lengths))


@given(st.data())
def test_positions_in_a_window_are_found_in_any_box(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    window, box = data.draw(boxes(shape)), data.draw(boxes(shape))
    changed = data.draw(st.lists(st.booleans(), min_size=window.numel, max_size=window.numel))
    whole = torch.zeros(shape)
    places = torch.tensor([place for place, is_changed in enumerate(changed) if is_changed], dtype=torch.int64)
    values = torch.arange(1.0, len(places) + 1)
    whole[window.slices()] = torch.zeros(window.numel).index_put((places,), values).view(window.lengths)
    found = torch.zeros(box.lengths)
    where, inside = in_box(places, window, box)
    found.view(-1)[where] = values[inside]
    assert found.equal(whole[box.slices()])
