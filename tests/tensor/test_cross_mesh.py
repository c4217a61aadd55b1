"""Transfers between meshes, planned without ranks: what asking every rank gives, without asking them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.layout import Box, Layout, Placement, Replicate, Shard
from terrazzo.tensor.cross_mesh import MeshTransfer, boxes_by_rank, plan_transfer

pytestmark = pytest.mark.on_late


@dataclass(frozen=True, eq=False)
class Ranks:
    """A mesh as seen from rank `me`, without ranks."""

    mesh: torch.Tensor
    me: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape)

    def get_coordinate(self) -> tuple[int, ...] | None:
        found = (self.mesh == self.me).nonzero()
        return tuple(found[0].tolist()) if len(found) else None


def by_asking_everybody(src: Layout, dst: Layout, me: int) -> MeshTransfer:
    have, want = boxes_by_rank(src), boxes_by_rank(dst)
    ranks = tuple(sorted({*have, *want}))
    owners: dict[Box, list[int]] = {}
    for rank, box in have.items():
        if not box.is_empty:
            owners.setdefault(box, []).append(rank)
    send: list[Box | None] = [None] * len(ranks)
    receive: list[Box | None] = [None] * len(ranks)
    for turn, receiver in enumerate(sorted(want)):
        for box, holders in owners.items():
            common = want[receiver].intersect(box)
            if common is None or common.is_empty:
                continue
            sender = receiver if receiver in holders else holders[turn % len(holders)]
            if sender == me:
                send[ranks.index(receiver)] = common.relative_to(box)
            if receiver == me:
                receive[ranks.index(sender)] = common.relative_to(want[receiver])
    return MeshTransfer(ranks, tuple(send), tuple(receive), tuple(want[me].lengths) if me in want else (0,))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout, int]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    meshes = []
    for _ in range(2):
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        ranks = draw(st.permutations(range(30)))[: prod(sizes)]
        meshes.append(torch.tensor(ranks).reshape(sizes))
    me = draw(st.sampled_from([*meshes[0].flatten().tolist(), *meshes[1].flatten().tolist()]))
    choices = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    made = []
    for mesh in meshes:
        placements = [draw(st.sampled_from(choices)) for _ in mesh.shape]
        made.append(Layout.of(Ranks(mesh, me), placements, shape, draw(st.permutations(range(mesh.ndim)))))
    return made[0], made[1], me


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_a_transfer_is_what_asking_everybody_gives(pair) -> None:
    assert plan_transfer(*pair) == by_asking_everybody(*pair)


def boxes_made(monkeypatch: pytest.MonkeyPatch, ranks: int, src: list[Placement], dst: list[Placement]) -> int:
    """How many boxes one rank makes to plan a transfer from a line of ranks to a square of others."""
    side = int(ranks**0.5)
    line, square = torch.arange(ranks), torch.arange(ranks).reshape(side, side) + ranks // 2
    me = ranks // 2 + 3
    layouts = [
        Layout.of(Ranks(line, me), src, (4 * ranks, 4 * ranks)),
        Layout.of(Ranks(square, me), dst, (4 * ranks, 4 * ranks)),
    ]
    made = 0
    check = Box.__post_init__

    def counted(box: Box) -> None:
        nonlocal made
        made += 1
        check(box)

    with monkeypatch.context() as patch:
        patch.setattr(Box, "__post_init__", counted)
        plan_transfer(*layouts, me)
    return made


def test_a_rank_makes_the_boxes_that_it_exchanges_and_no_others(monkeypatch) -> None:
    for ranks in (64, 1024):
        # Its own box under either layout, and one for each rank that it exchanges with.
        assert boxes_made(monkeypatch, ranks, [Shard(0)], [Shard(0), Replicate()]) <= 2 + int(ranks**0.5) + 1
        assert boxes_made(monkeypatch, ranks, [Shard(0)], [Replicate(), Replicate()]) <= 2 + ranks + 1
        assert boxes_made(monkeypatch, ranks, [Shard(0)], [Shard(1), Shard(1)]) <= 2 + 2 * ranks
