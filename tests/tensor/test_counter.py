"""Random bits by position: right for every box of a tensor of any size, and as random as counting can tell."""

from __future__ import annotations

import math
import random as python_random
from collections.abc import Sequence

import pytest
import torch

from terrazzo.layout import Box
from terrazzo.tensor import counter

HALF = 1 << 31
WORDS = 1 << 18
KEYS = [0, 1, 2, (1 << 62) - 1, 0x1234_5678_9ABC_DEF]


def words(box: Box, shape: Sequence[int], key: int = 7, number: int = 0) -> torch.Tensor:
    """The words of a box, as numbers in [0, 2**32)."""
    run = counter.indices_of(box, shape)
    out = torch.empty(run.lengths, dtype=torch.int64)
    for at, piece in counter.words_of(run, key, "cpu"):
        out[at] = piece.word(number).long() + HALF
    return out.view(box.lengths)


def stream(key: int, start: int = 0, count: int = WORDS, number: int = 0) -> torch.Tensor:
    return words(Box((start,), (count,)), (1 << 40,), key, number)


def word_of(key: int, index: int, number: int) -> int:
    """The word of one element, in Python's integers."""

    def signed(value: int) -> int:
        return (value + HALF) % (1 << 32) - HALF

    keys = counter.key_words(key, index >> 32, number)
    z = position = signed(index)
    constants = zip(keys, (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB, 0x85EBCA6B), (16, 15, 14, 15), strict=True)
    for i, (added, multiplier, bits) in enumerate(constants):
        z = signed(added + z * multiplier)
        z = signed(z + (z >> bits)) if i == 3 else z ^ (z >> bits)
    return signed(z + position * 0x9E3779B1) + HALF


def test_a_word_is_the_hash_of_key_and_index() -> None:
    for key in KEYS:
        for start in (0, (1 << 31) - 3, (1 << 32) - 3, (1 << 39) - 5):
            for number in (0, 1, 3):
                expected = [word_of(key, start + i, number) for i in range(6)]
                assert stream(key, start, 6, number).tolist() == expected


@pytest.mark.parametrize("shape", [(6,), (5, 7), (1, 5, 1, 7, 1), (3, 4, 5), (4, 1), (1,), ()])
def test_every_box_has_its_part_of_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = words(Box.whole(shape), shape)
    assert whole.flatten().tolist() == stream(7, 0, math.prod(shape)).tolist()
    for limit in (counter.PIECE, 4, 1):
        monkeypatch.setattr(counter, "PIECE", limit)
        choose = python_random.Random(limit)
        for _ in range(20):
            offsets = tuple(choose.randrange(n) for n in shape)
            box = Box(offsets, tuple(choose.randint(1, n - o) for o, n in zip(offsets, shape, strict=True)))
            assert torch.equal(words(box, shape), whole[box.slices()])


def test_boxes_of_a_tensor_of_more_than_2_to_the_32_elements() -> None:
    shape = (3, 5, 1 << 30, 3)
    for box in (
        Box((0, 1, (1 << 30) - 2, 0), (2, 2, 2, 2)),
        Box((1, 0, 357913941 - 3, 1), (1, 1, 9, 2)),
        Box((0, 1, 357913930, 0), (1, 1, 30, 3)),  # contiguous, over a multiple of 2**32
        Box((2, 4, (1 << 30) - 1, 0), (1, 1, 1, 3)),
    ):
        found = words(box, shape)
        for place in torch.cartesian_prod(*[torch.arange(n) for n in box.lengths]).tolist():
            at = [p + o for p, o in zip(place, box.offsets, strict=True)]
            index = ((at[0] * 5 + at[1]) * (1 << 30) + at[2]) * 3 + at[3]
            assert found[tuple(place)] == word_of(7, index, 0)


def test_pieces_share_their_upper_bits_and_keep_to_the_limit() -> None:
    run = counter.indices_of(Box((0, 1000), (5000, 2000)), (5000, 3_000_000))
    seen = 0
    for at, piece in counter.pieces_of(run, 10_000):
        assert math.prod(piece.lengths) <= 10_000 and piece.first >> 32 == piece.last >> 32
        assert piece.first == 1000 + at[0].start * 3_000_000 + at[1].start
        seen += math.prod(piece.lengths)
    assert seen == 5000 * 2000


# ------------------------------------------------------------------ quality: distances are in standard errors


def far(cells: torch.Tensor, kinds: int) -> float:
    """How far the counts of `cells` are from even ones, by chi-square."""
    counts = torch.bincount(cells, minlength=kinds).double()
    even = cells.numel() / kinds
    return abs((counts - even).square().sum().item() / even - (kinds - 1)) / math.sqrt(2 * (kinds - 1))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double() - (HALF - 0.5), b.double() - (HALF - 0.5)
    return abs((a * b).mean().item()) / ((1 << 64) / 12) * math.sqrt(a.numel())


def bits_alike(a: torch.Tensor, b: torch.Tensor) -> float:
    """For each bit of `a` with each of `b`: how far from half the times they are equal, the farthest."""
    left, right = (torch.stack([(x >> i & 1).float() * 2 - 1 for i in range(32)]) for x in (a, b))
    return (left @ right.T).abs().max().item() / math.sqrt(a.numel())


@pytest.mark.parametrize("key", KEYS)
def test_words_are_spread_evenly(key: int) -> None:
    for start, number in ((0, 0), (0, 1), (1 << 32, 2)):
        drawn = stream(key, start, number=number)
        assert abs(drawn.double().mean().item() / (1 << 32) - 0.5) < 5 / math.sqrt(12 * WORDS)
        for shift in (0, 8, 16):
            assert far(drawn >> shift & 0xFFFF, 1 << 16) < 5.5
        repeated = WORDS - drawn.unique().numel()
        expected = WORDS**2 / 2**33
        assert abs(repeated - expected) < 5.5 * math.sqrt(expected), "as many equal words as chance has"


@pytest.mark.parametrize("lag", [1, 2, 3, 8, 64, 1000, 4096, 1 << 16])
def test_neighbours_have_nothing_to_do_with_each_other(lag: int) -> None:
    drawn = stream(11)
    first, second = drawn[lag:], drawn[:-lag]
    assert correlation(first, second) < 5
    for shift in (0, 12, 24):
        assert far((first >> shift & 0xFF) << 8 | second >> shift & 0xFF, 1 << 16) < 5.5
    for combined in (first ^ second, (first - second) & 0xFFFF_FFFF):
        assert far(combined >> 16, 1 << 16) < 5.5 and far(combined & 0xFFFF, 1 << 16) < 5.5
    assert bits_alike(first[: 1 << 17], second[: 1 << 17]) < 5.5


def test_draws_have_nothing_to_do_with_each_other() -> None:
    keys = [5, 6, 7, 5 ^ 1 << 61, 5 + 0x9E3779B97F4A7C15 % (1 << 62), 10]  # also those that differ least
    streams = [stream(key) for key in keys]
    streams += [stream(5, number=1), stream(5, number=2), stream(5, start=1 << 32), stream(5, start=2 << 32)]
    for i, first in enumerate(streams):
        for second in streams[:i]:
            assert correlation(first, second) < 5
            assert far((first ^ second) >> 16, 1 << 16) < 5.5 and far((first ^ second) & 0xFFFF, 1 << 16) < 5.5
    assert bits_alike(streams[0][: 1 << 17], streams[1][: 1 << 17]) < 5.5


def test_each_bit_of_the_index_changes_each_bit_of_the_word_half_the_times() -> None:
    drawn = stream(3, count=1 << 18)
    index = torch.arange(1 << 18)
    for bit in range(17):
        changed = drawn ^ drawn[index ^ 1 << bit]
        for i in range(32):
            # Pairs come twice, so there are half as many.
            assert abs((changed >> i & 1).double().mean().item() - 0.5) < 5.5 * 0.5 / math.sqrt(1 << 17), (bit, i)


def test_even_where_the_first_key_words_of_two_draws_run_into_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws whose first key words differ by a multiple of the first constant start from the same numbers, shifted."""
    first = stream(21)
    plain = counter.key_words(21, 0, 0)
    other = counter.key_words(22, 0, 0)
    shifted = ((plain[0] + 5 * 0xED5AD4BB + HALF) % (1 << 32)) - HALF
    monkeypatch.setattr(counter, "key_words", lambda key, upper, number: (shifted, *other[1:]))
    second = stream(22)
    assert bits_alike(first[5 : 5 + (1 << 17)], second[: 1 << 17]) < 5.5
    assert far((first[5:] ^ second[:-5]) >> 16, 1 << 16) < 5.5


@pytest.mark.parametrize("shape", [(64,), (3, 5), (1, 1, 7)])
def test_few_elements_have_the_same_words(shape: tuple[int, ...]) -> None:
    run = counter.indices_of(Box((2, *[0] * (len(shape) - 1)), shape), (9, *shape[1:]) if len(shape) > 1 else (80,))
    run = run._replace(first=run.first + (5 << 32))
    for key in (0, 1, (1 << 62) - 1):
        many = counter.Words(run, key, counter.lower_index(run, "cpu"))
        few = counter.FewWords(counter.Few.of(run, shape), key)
        for number in range(4):
            assert torch.equal(few.word(number), many.word(number).reshape(shape))
