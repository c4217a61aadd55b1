"""What a rank holds and could write, in the library's own form; and its part, when all holders are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from terrazzo.checkpoint.native.root import TENSOR
from terrazzo.checkpoint.native.rows import Row, form_of
from terrazzo.checkpoint.plan.ownership import Negotiation, Share
from terrazzo.errors import CheckpointError
from terrazzo.layout.box import Box
from terrazzo.layout.chunking import chunk_span


class Held:
    """Everything that a rank holds, and its side of the agreement on which rank writes what.

    `claimed` are the numbers of the rows that other ranks may hold, too, in the order of the negotiation's claims; the
    rank writes all others. `paths` maps names to their paths in the nested state dict.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        claimed: Sequence[int],
        negotiation: Negotiation,
        paths: dict[str, tuple[Any, ...]] | None,
        *,
        split_from: int,
        lowest_rank: bool,
    ) -> None:
        self.negotiation = negotiation
        self.paths = paths
        self._rows = rows
        self._claimed = claimed
        self._split_from = split_from
        self._lowest_rank = lowest_rank

    def __len__(self) -> int:
        return len(self._rows)

    def settled(self, holders: Sequence[tuple[int, ...]]) -> list[Row]:
        """The rows that this rank writes."""
        shares = self.negotiation.shares(holders, split_from=self._split_from, lowest_rank=self._lowest_rank)
        claimed = set(self._claimed)
        found = [row for number, row in enumerate(self._rows) if number not in claimed]
        for share in shares:
            row = self._rows[self._claimed[share.claim]]
            found += _part_of(row, share) if share.parts > 1 else [row]
        return found


def _part_of(row: Row, share: Share) -> list[Row]:
    if row.kind != TENSOR:
        raise CheckpointError(f"{row.name!r}: only tensors can be split among ranks")
    form = row.form
    split = split_of(form.box, share.index, share.parts)
    if split is None:
        return []
    dim, start, box = split
    return [
        msgspec.structs.replace(
            row,
            form=form_of(form.dtype, form.shape, box, form.requires_grad),
            value=row.value.narrow(dim, start, box.lengths[dim]),
            key=(row.key, share.index),
            tied=None if row.tied is None else (row.tied, share.index),
        )
    ]


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
