"""Transitions, executed on all simulated ranks at once, end in what the target layout says, with few bytes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.errors import LayoutError
from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard, moved_bytes, plan_transition
from terrazzo.layout.transition import (
    AllReduce,
    AllToAll,
    Exchange,
    Gather,
    ReduceScatter,
    Slice,
    ToPartial,
)
from tests.layout.test_layout import Mesh

Coord = tuple[int, ...]


def local_values(whole: np.ndarray, layout: Layout) -> np.ndarray:
    """This coordinate's part; terms are made so that their sum is the whole."""
    part = whole[layout.box().slices()]
    for m, p in enumerate(layout.placements):
        if isinstance(p, Partial):
            part = part if layout.coord[m] == 0 else np.zeros_like(part)
    return part


class Simulation:
    """All ranks of a mesh in one process."""

    def __init__(self, mesh_shape: Coord) -> None:
        self.mesh_shape = mesh_shape
        self.coords = list(product(*(range(n) for n in mesh_shape)))

    def line(self, me: Coord, dims: tuple[int, ...]) -> list[Coord]:
        lines = [me]
        for m in dims:
            lines = [(*c[:m], i, *c[m + 1 :]) for c in lines for i in range(self.mesh_shape[m])]
        return lines

    def step(self, held: dict[Coord, np.ndarray], steps: dict[Coord, object]) -> dict[Coord, np.ndarray]:
        kinds = {(type(s), s.mesh_dims) for s in steps.values()}
        assert len(kinds) == 1, f"ranks disagree on the step: {kinds}"
        return {c: self._one(c, held, steps) for c in self.coords}

    def _one(self, me: Coord, held: dict[Coord, np.ndarray], steps: dict[Coord, object]) -> np.ndarray:
        step = steps[me]
        line = self.line(me, step.mesh_dims)
        index = line.index(me)
        match step:
            case Slice(dim=dim, sizes=sizes):
                return np.split(held[me], np.cumsum(sizes)[:-1], dim)[index]
            case Gather(dim=dim, sizes=sizes):
                assert tuple(held[c].shape[dim] for c in line) == sizes
                return np.concatenate([held[c] for c in line], dim)
            case AllReduce():
                return sum(held[c] for c in line)
            case ReduceScatter(dim=dim, sizes=sizes):
                return np.split(sum(held[c] for c in line), np.cumsum(sizes)[:-1], dim)[index]
            case AllToAll(split_dim=split_dim, split_sizes=split_sizes, concat_dim=concat_dim, concat_sizes=sizes):
                assert tuple(held[c].shape[concat_dim] for c in line) == sizes
                pieces = [np.split(held[c], np.cumsum(split_sizes)[:-1], split_dim)[index] for c in line]
                return np.concatenate(pieces, concat_dim)
            case ToPartial():
                return held[me] if index == 0 else np.zeros_like(held[me])
            case Exchange(receive=receive, shape=shape):
                result = np.full(shape, np.nan)
                for c, box in zip(line, receive, strict=True):
                    sent = steps[c].send[self.line(c, step.mesh_dims).index(me)]
                    assert (box is None) == (sent is None)
                    if box is not None:
                        result[box.slices()] = held[c][sent.slices()]
                return result
        raise AssertionError(step)


def check(mesh_shape: Coord, shape: Coord, src, dst, src_order=None, dst_order=None) -> list[object]:
    """Run the transition everywhere; return one rank's steps."""
    whole = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    simulation = Simulation(mesh_shape)
    layouts = {
        c: (
            Layout.of(Mesh(mesh_shape, c), src, shape, src_order),
            Layout.of(Mesh(mesh_shape, c), dst, shape, dst_order),
        )
        for c in simulation.coords
    }
    plans = {c: plan_transition(*pair) for c, pair in layouts.items()}
    assert len({len(p) for p in plans.values()}) == 1
    held = {c: local_values(whole, pair[0]) for c, pair in layouts.items()}
    for i in range(len(plans[simulation.coords[0]])):
        held = simulation.step(held, {c: p[i] for c, p in plans.items()})
    for c, (_, target) in layouts.items():
        expected_box = whole[target.box().slices()]
        terms = tuple(m for m, p in enumerate(target.placements) if isinstance(p, Partial))
        total = sum(held[k] for k in simulation.line(c, terms))
        assert held[c].shape == expected_box.shape
        assert np.array_equal(total, expected_box), f"{layouts[c][0]} -> {target} at {c}"
        if not terms:
            assert np.array_equal(held[c], expected_box)
    return list(plans[simulation.coords[0]])


PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial()]


@pytest.mark.parametrize("shape", [(4, 8), (5, 6), (2, 3), (1, 0)])
def test_every_pair_on_a_line(shape: Coord) -> None:
    for src, dst in product(PLACEMENTS, repeat=2):
        check((4,), shape, [src], [dst])


@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (3, 1)])
def test_every_pair_on_a_square(shape: Coord) -> None:
    for src in product(PLACEMENTS, repeat=2):
        for dst in product(PLACEMENTS, repeat=2):
            check((2, 2), shape, src, dst)


@st.composite
def transitions(draw: st.DrawFn):
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=2, max_size=3)))
    choices = [Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))]
    pick = st.lists(st.sampled_from(choices), min_size=len(mesh_shape), max_size=len(mesh_shape))
    orders = st.permutations(range(len(mesh_shape)))
    return mesh_shape, shape, draw(pick), draw(pick), tuple(draw(orders)), tuple(draw(orders))


@settings(max_examples=150, deadline=None)
@given(transitions())
def test_any_pair_on_any_mesh_with_any_shard_order(case) -> None:
    check(*case)


@pytest.mark.parametrize(
    ("src", "dst", "kinds"),
    [
        ([Shard(0), Shard(0)], [Replicate(), Replicate()], [Gather]),
        ([Partial(), Partial()], [Replicate(), Replicate()], [AllReduce]),
        ([Shard(0), Replicate()], [Shard(1), Replicate()], [AllToAll]),
        ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Exchange]),
        ([Partial(), Replicate()], [Shard(0), Replicate()], [ReduceScatter]),
        ([Replicate(), Replicate()], [Shard(0), Partial()], [Slice, ToPartial]),
        # What shrinks the data comes before what enlarges it.
        ([Partial(), Shard(0)], [Shard(1), Replicate()], [ReduceScatter, Gather]),
        ([Replicate(), Partial()], [Shard(0), Replicate()], [Slice, AllReduce]),
        ([Shard(0), Shard(0)], [Shard(0), Replicate()], [Gather]),
    ],
)
def test_the_fewest_steps(src, dst, kinds) -> None:
    assert [type(s) for s in check((2, 2), (8, 8), src, dst)] == kinds


def test_a_change_of_shard_order_is_one_exchange() -> None:
    steps = check((2, 3), (12, 2), [Shard(0), Shard(0)], [Shard(0), Shard(0)], (0, 1), (1, 0))
    assert [type(s) for s in steps] == [Exchange]


def test_bytes_of_a_transition() -> None:
    mesh = Mesh((4,), (0,))

    def bytes_of(src: Placement, dst: Placement) -> int:
        return moved_bytes(Layout.of(mesh, [src], (8, 8)), Layout.of(mesh, [dst], (8, 8)), 4)

    whole = 8 * 8 * 4
    assert bytes_of(Shard(0), Replicate()) == whole * 3 // 4
    assert bytes_of(Shard(0), Shard(1)) == whole // 4 * 3 // 4
    assert bytes_of(Partial(), Replicate()) == 2 * whole * 3 // 4
    assert bytes_of(Partial(), Shard(0)) == whole * 3 // 4
    assert bytes_of(Replicate(), Shard(0)) == bytes_of(Replicate(), Partial()) == 0


def test_a_transition_keeps_the_tensor() -> None:
    mesh = Mesh((2,), (0,))
    with pytest.raises(LayoutError, match="keeps mesh and shape"):
        plan_transition(Layout.of(mesh, [Shard(0)], (4, 4)), Layout.of(mesh, [Shard(0)], (4, 5)))


# ------------------------------------------------------------------ terms of several reductions

REDUCE = {"sum": np.sum, "avg": np.mean, "product": np.prod, "max": np.max, "min": np.min}


class WithReductions(Simulation):
    """Ranks that reduce by each step's own operation."""

    def _one(self, me: Coord, held: dict[Coord, np.ndarray], steps: dict[Coord, object]) -> np.ndarray:
        step = steps[me]
        if isinstance(step, ToPartial):
            first = self.line(me, step.mesh_dims).index(me) == 0
            other = {"sum": np.zeros_like, "product": np.ones_like}.get(step.op, np.array)
            return held[me] if first else other(held[me])
        if isinstance(step, (AllReduce, ReduceScatter)):
            line = self.line(me, step.mesh_dims)
            total = REDUCE[step.op](np.stack([held[c] for c in line]), axis=0)
            if isinstance(step, AllReduce):
                return total
            return np.split(total, np.cumsum(step.sizes)[:-1], step.dim)[line.index(me)]
        return super()._one(me, held, steps)


def tensor_of(held: dict[Coord, np.ndarray], layouts: dict[Coord, Layout], shape: Coord) -> np.ndarray:
    """The tensor that the ranks hold: its terms are reduced along the last mesh dim first."""
    values = {}
    for c, part in held.items():
        values[c] = np.full(shape, np.nan)
        values[c][layouts[c].box().slices()] = part
    placements = next(iter(layouts.values())).placements
    for m in reversed(range(len(placements))):
        p = placements[m]
        # Replicas are equal; of shards, one has the element, the others have NaN.
        reduce = REDUCE[p.reduce_op] if isinstance(p, Partial) else np.fmax.reduce
        lines: dict[Coord, list[np.ndarray]] = {}
        for c, value in values.items():
            lines.setdefault((*c[:m], 0, *c[m + 1 :]), []).append(value)
        values = {c: reduce(np.stack(line), axis=0) for c, line in lines.items()}
    (whole,) = values.values()
    return whole


def check_reductions(mesh_shape: Coord, src: list[Placement], dst: list[Placement]) -> list[object]:
    shape = (4,)
    simulation = WithReductions(mesh_shape)
    before = {c: Layout.of(Mesh(mesh_shape, c), src, shape) for c in simulation.coords}
    after = {c: Layout.of(Mesh(mesh_shape, c), dst, shape) for c in simulation.coords}
    drawn = np.random.default_rng(0)
    terms = {c: drawn.integers(1, 6, shape).astype(float) for c in simulation.coords}
    held = {}
    for c, layout in before.items():
        alike = tuple(i if isinstance(p, Partial) else 0 for i, p in zip(c, src, strict=True))
        held[c] = terms[alike][layout.box().slices()]
    expected = tensor_of(held, before, shape)
    plans = {c: plan_transition(before[c], after[c]) for c in simulation.coords}
    for i in range(len(plans[simulation.coords[0]])):
        held = simulation.step(held, {c: p[i] for c, p in plans.items()})
    np.testing.assert_allclose(tensor_of(held, after, shape), expected, err_msg=f"{src} -> {dst}")
    for c in simulation.coords:  # every rank has the replicas
        alike = tuple(0 if isinstance(p, Replicate) else i for i, p in zip(c, dst, strict=True))
        np.testing.assert_allclose(held[c], held[alike], err_msg=f"{src} -> {dst}")
    return list(plans[simulation.coords[0]])


def test_terms_of_several_reductions_keep_their_order() -> None:
    choices = [Replicate(), Shard(0), *map(Partial, ("sum", "avg", "product", "max"))]
    for src, dst in product(product(choices, repeat=2), repeat=2):
        check_reductions((2, 2), list(src), list(dst))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_terms_of_several_reductions_on_three_mesh_dims(data: st.DataObject) -> None:
    choices = [Replicate(), Shard(0), *map(Partial, REDUCE)]
    src, dst = (data.draw(st.lists(st.sampled_from(choices), min_size=3, max_size=3)) for _ in range(2))
    check_reductions((2, 3, 2), src, dst)


def test_only_terms_that_do_not_commute_are_reduced_early() -> None:
    sums, most, r = Partial(), Partial("max"), Replicate()
    assert check_reductions((2, 2), [most, sums], [most, Shard(0)]) == [ReduceScatter((1,), 0, (2, 2), "sum")]
    assert check_reductions((2, 2), [sums, most], [sums, r]) == [AllReduce((1,), "max")]
    assert check_reductions((2, 2), [sums, sums], [r, sums]) == [AllReduce((0,), "sum")]
