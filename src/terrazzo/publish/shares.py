"""Which rank publishes what: each box once, by one of the ranks that have it, about as many bytes each.

Every rank tells the others once what it has, and all work out the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from terrazzo.checkpoint.native.coverage import check_coverage
from terrazzo.checkpoint.native.dtypes import dtype_from_name, dtype_name
from terrazzo.checkpoint.native.manifest import TENSOR, TensorEntry
from terrazzo.errors import CheckpointError, DivergentValueError, PublishError
from terrazzo.layout import Box
from terrazzo.publish.parts import About, Parts


class _Row(msgspec.Struct, array_like=True, frozen=True):
    """A box that a rank has."""

    tensor: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    is_plain: bool
    is_buffer: bool


class _Table(msgspec.Struct, array_like=True, frozen=True):
    """What a rank has."""

    tensors: list[tuple[str, str, tuple[int, ...]]]  # name, dtype, shape
    rows: list[_Row]
    aliases: dict[str, str]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank publishes of its parts.

    Attributes:
        own: the places of the parts that it publishes.
        compared: the places of plain parameters that other ranks have, too, and which have to be the same there.
        peers: for each of these, what it is called among the ranks.
        abouts: all tensors of all ranks.
        aliases: other names of tied ones.
    """

    own: tuple[int, ...]
    compared: tuple[int, ...]
    peers: tuple[str, ...]
    abouts: dict[str, About]
    aliases: dict[str, str]


def described(parts: Parts) -> bytes:
    """What this rank has, for the other ranks."""
    numbers = {name: number for number, name in enumerate(parts.abouts)}
    return msgspec.msgpack.encode(
        _Table(
            [(name, dtype_name(about.dtype), about.shape) for name, about in parts.abouts.items()],
            [
                _Row(numbers[part.name], part.box.offsets, part.box.lengths, part.is_plain, part.is_buffer)
                for part in parts.parts
            ],
            dict(parts.aliases),
        )
    )


def share_of(descriptions: Sequence[bytes], me: int) -> Share:
    """What position `me` publishes, from what all ranks have said of themselves, in their order."""
    tables = [msgspec.msgpack.decode(each, type=_Table) for each in descriptions]
    abouts = _agreed(tables)
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}  # rank, place
    for rank, table in enumerate(tables):
        for place, row in enumerate(table.rows):
            key = table.tensors[row.tensor][0], Box(row.offsets, row.lengths)
            holders.setdefault(key, []).append((rank, place))
    _check_whole(abouts, list(holders))
    load = [0] * len(tables)
    own: list[int] = []
    compared: list[tuple[int, str]] = []
    for (name, box), found in holders.items():
        rows = [tables[rank].rows[place] for rank, place in found]
        if any(row.is_buffer and row.is_plain for row in rows):
            owner, place = found[0]  # running statistics may differ: the lowest rank's count
        else:
            owner, place = min(found, key=lambda each: (load[each[0]], each[0]))
            if len(found) > 1 and any(row.is_plain for row in rows):
                compared += [(mine, f"{name}{box.offsets}") for rank, mine in found if rank == me]
        load[owner] += box.numel * abouts[name].dtype.itemsize
        if owner == me:
            own.append(place)
    aliases = {alias: name for table in tables for alias, name in table.aliases.items() if alias not in abouts}
    return Share(
        tuple(sorted(own)), tuple(mine for mine, _ in compared), tuple(peer for _, peer in compared), abouts, aliases
    )


def _agreed(tables: Sequence[_Table]) -> dict[str, About]:
    """All tensors; ranks may have different ones (stages of a pipeline), but not differently."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, table in enumerate(tables):
        for name, dtype, shape in table.tensors:
            first = found.setdefault(name, (dtype, shape))
            if first != (dtype, shape):
                raise DivergentValueError(
                    f"{name} is {dtype} {list(shape)} on position {rank}, and {first[0]} {list(first[1])} on one before"
                )
    return {name: About(dtype_from_name(dtype), shape) for name, (dtype, shape) in found.items()}


def _check_whole(abouts: dict[str, About], keys: Sequence[tuple[str, Box]]) -> None:
    """Raise unless the boxes make up each tensor exactly."""
    by_name: dict[str, list[Box]] = {name: [] for name, about in abouts.items() if 0 not in about.shape}
    for name, box in keys:
        by_name[name].append(box)
    names = list(by_name)
    entries = [TensorEntry(name, dtype_name(abouts[name].dtype), abouts[name].shape, TENSOR) for name in names]
    rows: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for name in names:
        rows.setdefault(len(abouts[name].shape), []).extend((box.offsets, box.lengths) for box in by_name[name])
    highest = max(rows, default=0)
    boxes = [np.array(rows.get(d, []), dtype=np.int64).reshape(len(rows.get(d, [])), 2, d) for d in range(highest + 1)]
    try:
        check_coverage(entries, np.array([len(by_name[name]) for name in names], dtype=np.int64), boxes)
    except CheckpointError as error:
        raise PublishError(
            f"these ranks do not have each element of each tensor: make the Publisher on all ranks that have a part of "
            f"the model ({error})"
        ) from error


def refuse_differences(digests: Sequence[bytes]) -> None:
    """Raise if a plain parameter is not the same on all ranks that have it; from what each rank said of its own."""
    seen: dict[str, tuple[int, int]] = {}
    wrong = []
    for rank, said in enumerate(digests):
        for name, digest in msgspec.msgpack.decode(said, type=dict[str, int]).items():
            first = seen.setdefault(name, (rank, digest))
            if first[1] != digest:
                wrong.append(f"{name} on positions {first[0]} and {rank}")
    if wrong:
        raise DivergentValueError(
            f"plain parameters differ between ranks: {', '.join(wrong[:10])}{' and more' if wrong[10:] else ''}; which "
            f"of them is the model's?  Make them distributed tensors, or the same"
        )
