"""How parts lie in what is sent and received, and that an exchange of equal parts names no sizes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.comm import collectives
from terrazzo.comm.axis import Axis
from terrazzo.comm.buffers import concatenate, flat_parts
from terrazzo.layout.chunking import chunk_sizes


@st.composite
def cuts(draw: st.DrawFn) -> tuple[torch.Tensor, int, tuple[int, ...]]:
    """A tensor, a dim of it, and sizes that add up to its length: by one rule, or any."""
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    any_sizes = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple)
    one_rule = st.builds(chunk_sizes, st.integers(0, 9), st.integers(1, 6))
    sizes = draw(st.one_of(any_sizes, one_rule))
    shape[dim] = sum(sizes)
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return (x.mT.contiguous().mT if x.ndim > 1 and draw(st.booleans()) else x), dim, sizes


@given(cuts())
def test_parts_lie_one_after_the_other_and_come_back(case) -> None:
    x, dim, sizes = case
    flat = flat_parts(x, dim, sizes)
    expected = [part.reshape(-1) for part in x.split_with_sizes(list(sizes), dim)]
    assert torch.equal(flat, torch.cat(expected))
    assert torch.equal(concatenate(flat, x.shape, dim, sizes), x)


class Recorder:
    """A process group that notes the sizes that it is given."""

    def __init__(self) -> None:
        self.sizes: list[tuple[list[int], list[int]]] = []

    def alltoall_base(self, out, buffer, out_sizes, buffer_sizes, options):
        self.sizes.append((out_sizes, buffer_sizes))
        return SimpleNamespace(wait=lambda *args: True)


@pytest.mark.parametrize("ranks", [4, 4096])
def test_sizes_are_named_only_where_they_differ(ranks) -> None:
    """A backend takes a microsecond for each size that is named."""
    group = Recorder()
    axis = Axis(group, ranks, 1, tuple(range(ranks)), "simulated", "cpu")
    one, some = (1,) * ranks, chunk_sizes(2 * ranks - 1, ranks)
    collectives.all_to_all(torch.ones(1, ranks), axis, 1, one, 0, one)
    collectives.reduce_scatter(torch.ones(3, ranks), axis, 1, one)
    collectives.all_gather(torch.ones(3, 1), axis, 1, one)
    assert group.sizes == [([], [])] * 3
    group.sizes.clear()
    collectives.all_to_all(torch.ones(1, 2 * ranks - 1), axis, 1, some, 0, one)
    assert group.sizes == [([2] * ranks, list(some))]
