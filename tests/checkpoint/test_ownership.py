"""Who writes what: every claim once, by a holder, the same on all ranks, bytes balanced; and chunks that cover."""

from __future__ import annotations

import random
import sys
import zlib
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import checkpoint_scale as scale
from terrazzo.checkpoint.native.merging import faults_of, merge
from terrazzo.checkpoint.native.parts import make_part
from terrazzo.checkpoint.native.root import Root, TensorEntry
from terrazzo.checkpoint.plan.ownership import Agreement, Claim, answers, assign, groups_unsure
from terrazzo.errors import CheckpointError, DivergentValueError, DivergentValueWarning
from terrazzo.layout.box import Box


def settle(all_claims: list[list[Claim]]) -> tuple[list[list[tuple[int, ...]]], int]:
    """The holders that each rank finds, and how many messages it took."""
    world = len(all_claims)
    sides = [Agreement(claims, rank, world) for rank, claims in enumerate(all_claims)]
    unsure = groups_unsure([side.notes() for side in sides])
    if not unsure:
        return [side.holders() for side in sides], 1
    replies = answers([side.numbers(unsure) for side in sides])
    return [side.holders(unsure, reply) for side, reply in zip(sides, replies, strict=True)], 2


def claim(name: str, nbytes: int = 10, holders: tuple[int, ...] | None = None, content: int | None = 0) -> Claim:
    return Claim(name, zlib.crc32(name.encode()), nbytes, holders, content)


def test_the_usual_case_takes_one_message() -> None:
    claims = [[claim("a"), claim("b"), claim(f"own{rank}", holders=(rank,))] for rank in range(4)]
    holders, messages = settle(claims)
    assert messages == 1
    assert holders == [[(0, 1, 2, 3), (0, 1, 2, 3), (rank,)] for rank in range(4)]


def test_keys_that_differ_take_two() -> None:
    claims = [
        [claim("all"), claim("first")],
        [claim("all"), claim("pair", holders=(1, 2))],
        [claim("pair", holders=(1, 2)), claim("all")],
        [],
    ]
    holders, messages = settle(claims)
    assert messages == 2
    assert holders == [[(0, 1, 2), (0,)], [(0, 1, 2), (1, 2)], [(1, 2), (0, 1, 2)], []]


def test_a_layout_that_a_rank_does_not_share_is_not_believed() -> None:
    """Rank 1 should hold `pair` by its layout, but does not have it in its state dict."""
    holders, _ = settle([[claim("pair", holders=(0, 1))], []])
    assert holders == [[(0,)], []]


def test_values_that_differ_are_named() -> None:
    with pytest.raises(DivergentValueError, match="'b'"):
        settle([[claim("a", content=1), claim("b", content=1)], [claim("a", content=1), claim("b", content=2)]])


def test_a_group_that_agrees_is_not_asked_again() -> None:
    claims = [[claim("all"), claim("pair", holders=(0, 1))], [claim("pair", holders=(0, 1))]]
    sides = [Agreement(of_rank, rank, 2) for rank, of_rank in enumerate(claims)]
    unsure = groups_unsure([side.notes() for side in sides])
    assert [len(side.numbers(unsure)) // 16 for side in sides] == [1, 0]


def test_of_lenient_values_that_differ_the_lowest_ranks_is_kept_and_said_once() -> None:
    def of_rank(rank: int) -> list[Claim]:
        same = claim("all", content=5)
        return [same, Claim("stat", 77, 10, None, content=0 if rank == 0 else rank // 3, lenient=True)]

    with pytest.warns(DivergentValueWarning, match="'stat': the lowest rank's is saved") as told:
        holders, _ = settle([of_rank(rank) for rank in range(4)])
    assert holders == [[(0, 1, 2, 3), (0,)]] * 4 and len(told) == 1


@pytest.mark.parametrize("lowest", [False, True])
def test_every_claim_is_written_once_and_bytes_balance(lowest: bool) -> None:
    rng = random.Random(3)
    world = 8
    groups = [tuple(range(8)), (0, 4), (1, 5), (2, 6), (3, 7), (0, 1, 2, 3), *((rank,) for rank in range(8))]
    everything = [(claim(f"n{i}", rng.choice([4, 100, 5000, 90_000])), rng.choice(groups)) for i in range(600)]
    written: Counter[int] = Counter()
    loads = {holders: dict.fromkeys(holders, 0.0) for holders in groups}
    for rank in range(world):
        mine = [index for index, (_, holders) in enumerate(everything) if rank in holders]
        rng.shuffle(mine)  # the order of a rank's state dict does not matter
        shares = assign(
            [everything[i][0] for i in mine],
            [everything[i][1] for i in mine],
            rank,
            split_from=90_000,
            lowest_rank=lowest,
        )
        for share in shares:
            index = mine[share.claim]
            written[index] += 1
            loads[everything[index][1]][rank] += everything[index][0].nbytes / share.parts
            assert share.parts == (1 if lowest or everything[index][0].nbytes < 90_000 else len(everything[index][1]))
            if lowest:
                assert everything[index][1][0] == rank
    for index, (item, holders) in enumerate(everything):
        assert written[index] == (len(holders) if not lowest and item.nbytes >= 90_000 else 1)
    if not lowest:  # within each group of holders
        for of_group in loads.values():
            assert max(of_group.values()) - min(of_group.values()) <= 5000


# ------------------------------------------------------------------ coverage


def check(shape: tuple[int, ...], boxes: list[Box]) -> str:
    return "; ".join(fault for _, fault in faults_of([(shape, [(box.offsets, box.lengths) for box in boxes])]))


def shattered(box: Box, rng: random.Random) -> list[Box]:
    """The box cut in ragged pieces that are no grid."""
    if box.numel < 4 or rng.random() < 0.2:
        return [box]
    dim = max(range(box.ndim), key=lambda d: box.lengths[d])
    cut = rng.randrange(1, box.lengths[dim])
    parts = box.split(dim, [cut, box.lengths[dim] - cut])
    return [piece for part in parts for piece in shattered(part, rng)]


def test_coverage_against_counting_elements() -> None:
    rng = random.Random(4)
    for _ in range(300):
        shape = tuple(rng.randrange(1, 7) for _ in range(rng.randrange(1, 4)))
        boxes = shattered(Box.whole(shape), rng)
        rng.shuffle(boxes)
        if rng.random() < 0.7:  # damage it: drop, repeat, or move a piece
            victim = rng.randrange(len(boxes))
            kind = rng.choice(["drop", "repeat", "replace"])
            if kind == "drop":
                boxes.pop(victim)
            elif kind == "repeat":
                boxes.append(boxes[victim])
            else:
                boxes[victim] = rng.choice(boxes)
        count = torch.zeros(shape, dtype=torch.int64)
        for box in boxes:
            count[box.slices()] += 1
        assert (check(shape, boxes) == "") == bool((count == 1).all()), (shape, boxes)


def test_coverage_of_odd_cases() -> None:
    assert check((4,), [Box((2,), (4,)), Box((0,), (0,))]).startswith("a chunk reaches")  # beyond the end
    assert check((0, 3), [Box((0, 0), (0, 3))]) == ""
    assert "2 of 4 elements" in check((4,), [Box((0,), (2,))])
    assert "more than once" in check((4,), [Box((0,), (4,)), Box((1,), (1,))])


# ------------------------------------------------------------------ scale


@pytest.mark.parametrize("shapes", [1, 7, 50])
def test_a_root_of_many_ranks(shapes: int) -> None:
    ranks, tensors = 64, 50
    job = scale.Job(ranks, tensors, shapes)
    data = scale.merge_parts(scale.parts_of(job))
    assert len(data) < 100 * tensors + (300 + 60 * scale.OWN) * ranks  # not of ranks times tensors
    root = Root(data, "test")
    assert root.head.ranks == ranks and len(root.head.tensors) == tensors + scale.OWN * ranks
    for rank in (0, 17, 63):
        state = scale.state_of(rank, job)
        assert scale.plan_save(rank, job, state) == tensors
        index = scale.index_of(rank, job)
        assert scale.read_part(scale.with_index(data, rank, index), index, state) == tensors
    dtype, shape, chunks = root.describe("layers.7.weight")
    assert dtype == "float32" and shape == (4 * ranks, scale.WIDTH + 7 % shapes)
    assert [box.offsets for box in chunks.boxes()] == [(row, 0) for row in range(0, 4 * ranks, 4)]
    assert root.owner_tables[root.tensors["layers.7.weight"].owners].tolist() == list(range(ranks))
    assert root.owner_tables[root.tensors["rank5.bias.3"].owners].tolist() == [5]


def test_finding_what_to_read_takes_few_calls_for_each_tensor() -> None:
    """Where no two have one shape.  It was 112 calls of functions for each."""
    counts = []
    for tensors in (200, 700):
        job = scale.Job(4, tensors, tensors)
        index = scale.index_of(1, job)
        data, state = scale.with_index(scale.merge_parts(scale.parts_of(job)), 1, index), scale.state_of(1, job)
        count = 0

        def see(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(see)
        try:
            assert scale.read_part(data, index, state) == tensors
        finally:
            sys.setprofile(before)
        counts.append(count)
    assert (counts[1] - counts[0]) / 500 <= 70, counts


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_chunks_of_any_ranks_are_found_again(data: st.DataObject) -> None:
    """Grids, uneven ones, halves of halves, on ranks at random: the root says where each chunk is."""
    ranks = data.draw(st.integers(1, 5))
    expected: dict[str, dict[tuple[int, ...], tuple[tuple[int, ...], int]]] = {}
    chosen: list[list[tuple[TensorEntry, tuple[int, ...]]]] = [[] for _ in range(ranks)]
    for number in range(data.draw(st.integers(1, 4))):
        shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
        boxes = [Box.whole(shape)]
        for _ in range(data.draw(st.integers(0, 4)) if 0 not in shape and shape else 0):
            victim = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
            dim = data.draw(st.integers(0, len(shape) - 1))
            parts = data.draw(st.integers(1, victim.lengths[dim]))
            step = -(-victim.lengths[dim] // parts)
            starts = range(0, victim.lengths[dim], step)
            boxes += victim.split(dim, [min(step, victim.lengths[dim] - start) for start in starts])
        entry = TensorEntry(f"t{number}", "float32", shape)
        expected[entry.name] = {}
        for box in boxes:
            rank = data.draw(st.integers(0, ranks - 1))
            chosen[rank].append((entry, box.offsets + box.lengths))
            expected[entry.name][box.offsets] = (box.lengths, rank)
    parts = [
        make_part([e for e, _ in mine], [b for _, b in mine], scale.part_entry(rank), [])
        for rank, mine in enumerate(chosen)
    ]
    root = Root(merge(parts, "0123456789ab"), "test")
    for name, chunks in expected.items():
        owners = root.owner_tables[root.tensors[name].owners].tolist()
        boxes = root.describe(name)[2].boxes()
        found = {box.offsets: (box.lengths, rank) for box, rank in zip(boxes, owners, strict=True)}
        assert found == chunks
    victim = data.draw(st.sampled_from([rank for rank in range(ranks) if chosen[rank]]))
    gone = data.draw(st.integers(0, len(chosen[victim]) - 1))
    missing = chosen[victim].pop(gone)
    kind = data.draw(st.sampled_from(["missing", "twice", "instead"]))
    others = [other for offsets, (other, _) in expected[missing[0].name].items() if offsets != missing[1][: len(other)]]
    if kind == "twice":  # another rank has written it as well
        chosen[victim] += [missing, missing]
    elif kind == "instead" and others:  # what another rank has written, too
        offsets = data.draw(st.sampled_from(sorted(expected[missing[0].name].keys() - {missing[1][: len(others[0])]})))
        chosen[victim].append((missing[0], offsets + expected[missing[0].name][offsets][0]))
    parts[victim] = make_part([e for e, _ in chosen[victim]], [b for _, b in chosen[victim]], scale.part_entry(0), [])
    if 0 in missing[0].shape or (kind != "twice" and not others):
        return
    with pytest.raises(CheckpointError, match="more than once|written by [23]|were not written"):
        merge(parts, "0123456789ab")


def test_a_rank_that_is_missing_is_noticed() -> None:
    with pytest.raises(CheckpointError, match=r"256 of .* elements were not written"):
        scale.merge_parts(scale.parts_of(scale.Job(8, 3, 1))[:-1])
