"""Plans of direct transfers: every wanted element comes once, in messages that fit, in one order for all."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from terrazzo.errors import PublishError
from terrazzo.layout import Box
from terrazzo.publish.transfer import Held, Message, Wanted, plan_messages


@st.composite
def cuts(draw, shape, ranks):
    """Boxes that make up a tensor, each with one of the ranks."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 3))):
        chosen = draw(st.integers(0, len(boxes) - 1))
        box = boxes.pop(chosen)
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.lengths[dim]))
        boxes += [part for part in box.split(dim, (at, box.lengths[dim] - at)) if not part.is_empty]
    return [(draw(st.integers(0, ranks - 1)), box) for box in boxes]


@given(st.data())
def test_all_that_is_wanted_arrives_once(data):
    senders, receivers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    limit = data.draw(st.integers(4, 40))
    held = [[] for _ in range(senders)]
    wanted = [[] for _ in range(receivers)]
    whole = {}
    for name, shape in (("a", (5, 4)), ("b", (7,)), ("c", (2, 3, 2))):
        whole[name] = torch.arange(torch.Size(shape).numel()).view(shape)
        for rank, box in data.draw(cuts(shape, senders)):
            held[rank].append(Held(name, box.offsets, box.lengths))
        for rank, box in data.draw(cuts(shape, receivers)):
            wanted[rank].append(Wanted(name, box.offsets, box.lengths, "float32"))
        if data.draw(st.booleans()):  # another receiver wants all of it, too
            wanted[0].append(Wanted(name, (0,) * len(shape), shape, "float32"))
    dtypes = dict.fromkeys(whole, torch.float32)
    messages = plan_messages(held, wanted, dtypes, limit)
    for to, boxes in enumerate(wanted):
        for place, want in enumerate(boxes):
            box = Box(want.offsets, want.lengths)
            found = torch.full(box.lengths, -1)
            for message in messages:
                for piece in message.pieces:
                    if message.receiver == to and piece.target == place:
                        source = held[message.sender][piece.source]
                        assert source.name == want.name
                        assert Box(source.offsets, source.lengths).contains(piece.box)
                        part = found[piece.box.relative_to(box).slices()]
                        assert part.eq(-1).all()
                        part.copy_(whole[want.name][piece.box.slices()])
            assert found.equal(whole[want.name][box.slices()])
    for message in messages:
        assert message.nbytes <= max(limit, 4)
        assert all(piece.start % 16 == 0 for piece in message.pieces)
    # What one rank plans for itself is its part of what all do, in the same order.
    for rank in range(senders):
        assert plan_messages(held, wanted, dtypes, limit, sender=rank) == of(messages, sender=rank)
    for rank in range(receivers):
        assert plan_messages(held, wanted, dtypes, limit, receiver=rank) == of(messages, receiver=rank)


def of(messages: tuple[Message, ...], **ranks: int) -> tuple[Message, ...]:
    return tuple(each for each in messages if all(getattr(each, key) == rank for key, rank in ranks.items()))


def test_numbers_travel_in_the_shorter_dtype():
    held, box = [[Held("w", (0,), (8,))]], ((0,), (8,))
    for published, wanted, travels in (
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.bfloat16, "float32", torch.bfloat16),
    ):
        (message,) = plan_messages(held, [[Wanted("w", *box, wanted)]], {"w": published}, 100)
        assert message.pieces[0].dtype == travels and message.nbytes == 16


def test_what_nobody_has_is_an_error():
    with pytest.raises(PublishError, match="4 elements"):
        plan_messages([[Held("w", (0,), (4,))]], [[Wanted("w", (0,), (8,), "float32")]], {"w": torch.float32}, 100)
