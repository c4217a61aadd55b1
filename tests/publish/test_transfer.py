"""Plans of direct transfers: every wanted element comes once, in messages that fit."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from terrazzo.errors import PublishError
from terrazzo.layout import Box
from terrazzo.publish.channel import AskedBox, packed, plan_messages
from terrazzo.publish.host_copy import Snapshot
from terrazzo.publish.parts import ListedBox, ModelPart


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
    senders = data.draw(st.integers(1, 3))
    limit = data.draw(st.integers(4, 40))
    held = [[] for _ in range(senders)]
    has = [[] for _ in range(senders)]
    wanted, whole = [], {}
    for name, shape in (("a", (5, 4)), ("b", (7,)), ("c", (2, 3, 2))):
        whole[name] = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        for rank, box in data.draw(cuts(shape, senders)):
            held[rank].append(ListedBox(name, box.offsets, box.lengths))
            has[rank].append(ModelPart(name, box, whole[name][box.slices()], False, False))
        wanted += [(name, box, torch.float32) for rank, box in data.draw(cuts(shape, 2)) if rank == 0]
        if data.draw(st.booleans()):  # all of it, too
            wanted.append((name, Box.whole(shape), torch.float32))
    snapshots = [Snapshot(parts, None) for parts in has]
    for parts, snapshot in zip(has, snapshots, strict=True):
        snapshot.take(parts)
    found = [torch.full(box.lengths, -1.0) for _, box, _ in wanted]
    for message in plan_messages(held, wanted, dict.fromkeys(whole, torch.float32), limit):
        sent = packed(message.asked, snapshots[message.sender], limit)
        assert sent.numel() == message.nbytes <= max(limit, 4)
        for asked, target, view in zip(message.asked, message.targets, message.views(sent), strict=True):
            part = found[target][asked.box.relative_to(wanted[target][1]).slices()]
            assert part.eq(-1).all()
            part.copy_(view)
    for (name, box, _), values in zip(wanted, found, strict=True):
        assert values.equal(whole[name][box.slices()])


def test_numbers_travel_in_the_shorter_dtype():
    held, box = [[ListedBox("w", (0,), (8,))]], Box((0,), (8,))
    for published, wanted, travels in (
        (torch.float32, torch.bfloat16, "bfloat16"),
        (torch.bfloat16, torch.float32, "bfloat16"),
    ):
        (message,) = plan_messages(held, [("w", box, wanted)], {"w": published}, 100)
        assert message.asked[0].dtype == travels and message.nbytes == 16


def test_no_more_is_sent_at_once_than_is_allowed():
    part = ModelPart("w", Box((0,), (80,)), torch.zeros(80), False, False)
    asked = [AskedBox(0, (at,), (40,), "float32") for at in (0, 40)]
    assert packed(asked, Snapshot([part], None), 320).numel() == 320
    with pytest.raises(PublishError, match="320 bytes at once, and at most 319"):
        packed(asked, Snapshot([part], None), 319)
    with pytest.raises(PublishError, match="the same bucket_bytes"):  # of one box, too
        packed([AskedBox(0, (0,), (80,), "float32")], Snapshot([part], None), 319)


def test_what_two_senders_have_leaves_no_hole_of_its_size():
    held = [[ListedBox("w", (0,), (2,))], [ListedBox("w", (0,), (2,))]]
    with pytest.raises(PublishError, match="several senders have elements"):
        plan_messages(held, [("w", Box((0,), (4,)), torch.float32)], {"w": torch.float32}, 100)


def test_what_nobody_has_is_an_error():
    with pytest.raises(PublishError, match="4 elements"):
        plan_messages(
            [[ListedBox("w", (0,), (4,))]], [("w", Box((0,), (8,)), torch.float32)], {"w": torch.float32}, 100
        )
