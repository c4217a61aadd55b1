"""Decide which rank publishes what: each box once, by one of the ranks that have it, with similar numbers of bytes.

Every rank sends a description of what it has to the others, and all ranks compute the same result from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from terrazzo.checkpoint.native.dtypes import dtype_from_name, dtype_name
from terrazzo.checkpoint.native.merging import faults_of, refuse
from terrazzo.errors import CheckpointError, DivergentValueError, PublishError
from terrazzo.layout import Box
from terrazzo.publish.parts import Parts, TensorInfo


class _Row(msgspec.Struct, array_like=True, frozen=True):
    """A box of a tensor on a rank."""

    tensor: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    is_plain: bool
    is_buffer: bool


class _Table(msgspec.Struct, array_like=True, frozen=True):
    """The description that a rank sends to the others."""

    tensors: list[tuple[str, str, tuple[int, ...]]]  # name, dtype, shape
    rows: list[_Row]
    aliases: dict[str, str]


@dataclass(frozen=True, slots=True)
class PublishedShare:
    """Which of its parts a rank publishes.

    Attributes:
        own: the indices of the parts that it publishes.
        compared: the indices of plain parameters that other ranks have, too, and that must be equal there.
        peers: for each of these, the name under which ranks compare it.
        infos: all tensors of all ranks.
        aliases: other names of tied tensors.
    """

    own: tuple[int, ...]
    compared: tuple[int, ...]
    peers: tuple[str, ...]
    infos: dict[str, TensorInfo]
    aliases: dict[str, str]


def described(parts: Parts) -> bytes:
    """This rank's encoded description, for the other ranks."""
    numbers = {name: number for number, name in enumerate(parts.infos)}
    return msgspec.msgpack.encode(
        _Table(
            [(name, dtype_name(info.dtype), info.shape) for name, info in parts.infos.items()],
            [
                _Row(numbers[part.name], part.box.offsets, part.box.lengths, part.is_plain, part.is_buffer)
                for part in parts.parts
            ],
            dict(parts.aliases),
        )
    )


def share_of(descriptions: Sequence[bytes], me: int) -> PublishedShare:
    """The share of rank `me`, from the descriptions of all ranks, in order."""
    tables = [msgspec.msgpack.decode(each, type=_Table) for each in descriptions]
    infos = _agreed(tables)
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}  # rank, place
    for rank, table in enumerate(tables):
        for place, row in enumerate(table.rows):
            key = table.tensors[row.tensor][0], Box(row.offsets, row.lengths)
            holders.setdefault(key, []).append((rank, place))
    _check_whole(infos, list(holders))
    load = [0] * len(tables)
    own: list[int] = []
    compared: list[tuple[int, str]] = []
    for (name, box), found in holders.items():
        rows = [tables[rank].rows[place] for rank, place in found]
        if any(row.is_buffer and row.is_plain for row in rows):
            owner, place = found[0]  # buffers such as running statistics may differ: the lowest rank's are published
        else:
            owner, place = min(found, key=lambda each: (load[each[0]], each[0]))
            if len(found) > 1 and any(row.is_plain for row in rows):
                compared += [(mine, f"{name}{box.offsets}") for rank, mine in found if rank == me]
        load[owner] += box.numel * infos[name].dtype.itemsize
        if owner == me:
            own.append(place)
    aliases = {alias: name for table in tables for alias, name in table.aliases.items() if alias not in infos}
    return PublishedShare(
        tuple(sorted(own)), tuple(mine for mine, _ in compared), tuple(peer for _, peer in compared), infos, aliases
    )


def _agreed(tables: Sequence[_Table]) -> dict[str, TensorInfo]:
    """All ranks' tensors. Ranks may have different tensors (stages of a pipeline); dtypes and shapes must agree."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, table in enumerate(tables):
        for name, dtype, shape in table.tensors:
            first = found.setdefault(name, (dtype, shape))
            if first != (dtype, shape):
                raise DivergentValueError(
                    f"{name} is {dtype} {list(shape)} on rank {rank} of the process group, but {first[0]} "
                    f"{list(first[1])} on a lower rank"
                )
    return {name: TensorInfo(dtype_from_name(dtype), shape) for name, (dtype, shape) in found.items()}


def _check_whole(infos: dict[str, TensorInfo], keys: Sequence[tuple[str, Box]]) -> None:
    """Raise unless the boxes make up each tensor exactly."""
    by_name: dict[str, list[Box]] = {name: [] for name, info in infos.items() if 0 not in info.shape}
    for name, box in keys:
        by_name[name].append(box)
    faults: list[tuple[str, str]] = []
    for ndim in {len(infos[name].shape) for name in by_name}:
        names = [name for name in by_name if len(infos[name].shape) == ndim]
        shapes = np.array([infos[name].shape for name in names], dtype=np.int64).reshape(len(names), ndim)
        counts = np.array([len(by_name[name]) for name in names], dtype=np.int64)
        boxes = np.array([(box.offsets, box.lengths) for name in names for box in by_name[name]], dtype=np.int64)
        faults += [
            (names[row], fault) for row, fault in faults_of(shapes, counts, boxes.reshape(int(counts.sum()), 2, ndim))
        ]
    try:
        refuse(sorted(faults))
    except CheckpointError as error:
        raise PublishError(
            "these ranks together do not have all elements of all tensors: construct the Publisher on all ranks that "
            f"have a part of the model ({error})"
        ) from error


def refuse_differences(digests: Sequence[bytes]) -> None:
    """Raise if a plain parameter is not equal on all ranks that have it, from the digests that they sent."""
    seen: dict[str, tuple[int, int]] = {}
    wrong = []
    for rank, said in enumerate(digests):
        for name, digest in msgspec.msgpack.decode(said, type=dict[str, int]).items():
            first = seen.setdefault(name, (rank, digest))
            if first[1] != digest:
                wrong.append(f"{name} on ranks {first[0]} and {rank}")
    if wrong:
        raise DivergentValueError(
            f"plain parameters differ between ranks of the process group: {', '.join(wrong[:10])}"
            f"{' and more' if wrong[10:] else ''}. Make them DTensors, or give them the same values on all ranks"
        )
