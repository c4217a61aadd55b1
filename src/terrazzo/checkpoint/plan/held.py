"""What a rank holds and could write, in the library's own form; and its part, when all holders are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from terrazzo.checkpoint.native.plans import Form, Piece, WritePlan
from terrazzo.checkpoint.plan.ownership import Negotiation, Share
from terrazzo.errors import CheckpointError
from terrazzo.layout.box import Box
from terrazzo.layout.chunking import chunk_span


class Holding(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A chunk of a tensor; or a value as `ObjectBytes`, if it has no form.

    `holders` are the ranks of the group that hold the same chunk or value (None: unknown).
    """

    name: str
    form: Form | None
    value: Any
    holders: tuple[int, ...] | None


class Held:
    """Everything that a rank holds, and its side of the agreement on which rank writes what.

    `claimed` are the holdings that other ranks may hold, too, in the order of the negotiation's claims; the rank writes
    all others. `ties` maps the index of a holding to that of an earlier one with the same memory; `paths` maps names to
    their paths in the nested state dict.
    """

    def __init__(
        self,
        holdings: Sequence[Holding],
        claimed: Sequence[int],
        negotiation: Negotiation,
        ties: dict[int, int],
        paths: dict[str, tuple[Any, ...]] | None,
        *,
        split_from: int,
        lowest_rank: bool,
    ) -> None:
        self.negotiation = negotiation
        self._holdings = holdings
        self._claimed = claimed
        self._ties = ties
        self._paths = paths
        self._split_from = split_from
        self._lowest_rank = lowest_rank

    def __len__(self) -> int:
        return len(self._holdings)

    def settled(self, holders: Sequence[tuple[int, ...]]) -> WritePlan:
        """The plan of this rank's part."""
        shares = self.negotiation.shares(holders, split_from=self._split_from, lowest_rank=self._lowest_rank)
        claimed = set(self._claimed)
        pieces = [
            Piece(holding.name, holding.form, holding.value, number)
            for number, holding in enumerate(self._holdings)
            if number not in claimed
        ]
        for share in shares:
            number = self._claimed[share.claim]
            holding = self._holdings[number]
            if share.parts > 1:
                pieces += _part_of(holding, number, share)
            else:
                pieces.append(Piece(holding.name, holding.form, holding.value, number))
        return WritePlan(pieces, self._ties, self._paths)


def _part_of(holding: Holding, number: int, share: Share) -> list[Piece]:
    form = holding.form
    if form is None:
        raise CheckpointError(f"{holding.name!r}: only tensors can be split among ranks")
    split = split_of(form.box, share.index, share.parts)
    if split is None:
        return []
    dim, start, box = split
    part = Form(form.dtype, form.shape, box, box.numel * form.dtype.itemsize, form.requires_grad)
    value = holding.value.narrow(dim, start, box.lengths[dim])
    return [Piece(holding.name, part, value, number, share.index)]


def split_of(box: Box, index: int, parts: int) -> tuple[int, int, Box] | None:
    """One of `parts` parts of a box with about equal size: the dim along which the box is cut, where the part begins in
    it, and the part; None if there are fewer.

    >>> split_of(Box((0, 4), (2, 8)), 1, 4)
    (1, 2, Box(offsets=(0, 6), lengths=(2, 2)))
    """
    # The first dim that is long enough, so that the parts are as contiguous as possible.
    dim = next((d for d, length in enumerate(box.lengths) if length >= parts), None)
    if dim is None:
        dim = max(range(box.ndim), key=lambda d: box.lengths[d])
    start, length = chunk_span(box.lengths[dim], parts, index)
    if length == 0:
        return None
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[dim] += start
    lengths[dim] = length
    return dim, start, Box(tuple(offsets), tuple(lengths))
