"""Which stored chunks a box needs, and which part of each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import msgspec

from terrazzo.checkpoint.native.chunks import Chunks, GridChunks, Overlap
from terrazzo.errors import CheckpointError
from terrazzo.layout.box import Box


class Coverage(msgspec.Struct, frozen=True, gc=False):
    """The overlaps of stored chunks with a box, and how many elements of the box no chunk has."""

    parts: tuple[Overlap, ...]
    missing: int


def complete_parts(source: str, box: Box, coverage: Coverage) -> tuple[Overlap, ...]:
    """The parts that make up a box of the tensor stored as `source`; raises if some of it is missing."""
    if coverage.missing:
        raise CheckpointError(
            f"{source!r}: {coverage.missing} of the {box.numel} elements that are needed are not in the checkpoint, "
            f"which is incomplete"
        )
    return coverage.parts


class Overlaps:
    """Finds overlaps, and remembers them: in a model many tensors have the same shape and are cut the same way."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[Box, Coverage]] = {}
        # The same by the table itself, which is faster; the table is kept, so that its number stays its own.
        self._tables: dict[int, tuple[Chunks, dict[Box, Coverage]]] = {}

    def of(self, chunks: Chunks | Sequence[Any], box: Box) -> Coverage:
        """The chunks that share elements with `box`, and what they share: of a table, or of a list of PyTorch's."""
        table = self._tables.get(id(chunks))
        if table is None:
            if not isinstance(chunks, Chunks):
                return _overlaps([(number, _box(chunk)) for number, chunk in enumerate(chunks)], box)
            # Grids that are equal are mostly one object, so what is known of one is not looked for by what it says.
            fresh: dict[Box, Coverage] = {}
            if not isinstance(chunks, GridChunks):
                fresh = self._known.setdefault(chunks.identity(), fresh)
            table = self._tables[id(chunks)] = chunks, fresh
        chunks, known = table
        found = known.get(box)
        if found is None:
            number = chunks.number_of(box) if isinstance(chunks, GridChunks) else -1
            if number >= 0:
                found = known[box] = Coverage((whole_chunk(number, box),), 0)
            else:
                found = known[box] = _overlaps(chunks.near(box), box)
        return found


def _box(chunk: Any) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))  # of PyTorch's class, too


def whole_chunk(number: int, box: Box) -> Overlap:
    """The overlap of a chunk with itself."""
    start = _start(len(box.lengths))
    return Overlap(number, box, start, start, box.lengths)


@cache
def _start(ndim: int) -> tuple[int, ...]:
    return (0,) * ndim


def _overlaps(chunks: list[tuple[int, Box]], box: Box) -> Coverage:
    found = []
    missing = box.numel
    for number, chunk in chunks:
        common = chunk.intersect(box)
        if common is not None:
            missing -= common.numel
            in_chunk, in_box = common.relative_to(chunk).offsets, common.relative_to(box).offsets
            found.append(Overlap(number, chunk, in_chunk, in_box, common.lengths))
    return Coverage(tuple(found), missing)
