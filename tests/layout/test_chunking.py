"""The chunk rule against torch.chunk itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.errors import LayoutError
from terrazzo.layout.chunking import chunk_sizes, chunk_span


@given(size=st.integers(0, 200), parts=st.integers(1, 40))
def test_same_parts_as_torch_chunk(size: int, parts: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)]
    chunks += [[]] * (parts - len(chunks))
    spans = [chunk_span(size, parts, index) for index in range(parts)]
    assert [list(range(offset, offset + length)) for offset, length in spans] == chunks
    assert chunk_sizes(size, parts) == tuple(length for _, length in spans)
    assert all(offset == size for offset, length in spans if length == 0)


def test_refuses_what_cannot_be_divided() -> None:
    with pytest.raises(LayoutError, match="at least one part"):
        chunk_sizes(3, 0)
    with pytest.raises(LayoutError, match="negative length"):
        chunk_span(-1, 2, 0)
    for index in (-1, 2):
        with pytest.raises(LayoutError, match="no part"):
            chunk_span(4, 2, index)
