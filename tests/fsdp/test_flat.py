"""Flat buffers against torch.chunk: what is packed on every rank can be unpacked, and lies where it has to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.comm.flat import FlatPlan

SHAPES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4)


def whole_tensors(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


def chunk_of(tensor: torch.Tensor, n: int, dim: int, rank: int) -> torch.Tensor:
    """The rank's chunk by torch's rule, empty where torch gives fewer chunks."""
    chunks = tensor.chunk(n, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


@given(SHAPES, st.integers(1, 4), st.integers(0, 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_packing_and_unpacking_follow_torch_chunk(shapes, n, dim, equal):
    plans = [FlatPlan(shapes, [dim] * len(shapes), n, rank, equal) for rank in range(n)]
    wholes = whole_tensors(shapes)
    buffers = torch.full((plans[0].total,), torch.nan)
    plans[0].pack(wholes, buffers)
    assert plans[0].total >= sum(w.numel() for w in wholes)
    for rank, (plan, buffer) in enumerate(zip(plans, buffers.split(plans[0].sizes), strict=True)):
        assert buffer.numel() == plan.own_size
        for whole, view, chunk in zip(wholes, plan.own_views(buffer), plan.own_chunks(wholes), strict=True):
            expected = chunk_of(whole, n, dim, rank)
            assert torch.equal(view, expected) and torch.equal(chunk, expected)
            assert view.numel() == 0 or view.untyped_storage().data_ptr() == buffers.untyped_storage().data_ptr()
    targets = [torch.zeros(shape) for shape in shapes]
    plans[0].unpack(buffers, plans[0].pieces(targets))
    assert all(torch.equal(target, whole) for target, whole in zip(targets, wholes, strict=True))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_exact_buffers_hold_nothing_but_elements(n):
    shapes = [(7, 3), (5,), (2, 2, 2)]
    plan = FlatPlan(shapes, [0, 0, 0], n, 0)
    assert plan.total == 7 * 3 + 5 + 8


def test_equal_buffers_are_as_long_as_the_longest():
    plan = FlatPlan([(7, 3), (1,)], [0, 0], 4, 3, equal=True)
    assert plan.sizes == (7,) * 4


def test_packing_converts():
    plan = FlatPlan([(4, 2), (4,)], [0, 0], 2, 0)
    wholes = [torch.randn(4, 2).bfloat16(), torch.randn(4).bfloat16()]
    buffers = torch.empty(plan.total)
    plan.pack(wholes, buffers)
    assert torch.equal(plan.own_views(buffers[: plan.own_size])[0], wholes[0][:2].float())


def test_dims_may_differ_between_tensors():
    shapes, dims = [(4, 6), (3, 5, 2)], [1, 2]
    plan = FlatPlan(shapes, dims, 2, 1)
    wholes = whole_tensors(shapes)
    buffers = torch.empty(plan.total)
    plan.pack(wholes, buffers)
    views = plan.own_views(buffers[plan.sizes[0] :])
    assert torch.equal(views[0], wholes[0][:, 3:]) and torch.equal(views[1], wholes[1][:, :, 1:])
