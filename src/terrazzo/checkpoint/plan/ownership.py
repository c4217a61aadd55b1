"""Decide which rank writes what: every chunk is written by one of its holders, with balanced bytes.

Values that several ranks have are checked to be equal.

Each rank has *claims*: chunks that it could write. For a distributed tensor the layout says which ranks hold the same
chunk. For a plain tensor or an object this is unknown: usually all ranks have it (DDP), but not always (pipeline
stages). So each rank sends the coordinator a small message with a digest for each group of holders:

    all digests of a group are equal    each member computes the same assignment by itself
    some differ                         a second message has a number for each claim of that group, and the
                                        coordinator answers which ranks hold what

The digest of claims without a layout includes their values. So a random state or a position in the data that differs
between ranks is found before anything is written, and is an error that names it. For values that commonly differ
(`Claim.lenient`), the lowest rank's is saved instead, with a warning.
"""

from __future__ import annotations

import heapq
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from terrazzo.checkpoint.native.format import checksum
from terrazzo.checkpoint.native.root import TENSOR
from terrazzo.checkpoint.native.rows import Row, form_of
from terrazzo.checkpoint.native.tensors import bytes_of
from terrazzo.errors import CheckpointError, DivergentValueError, DivergentValueWarning
from terrazzo.layout.box import Box, row_major_windows
from terrazzo.layout.chunking import chunk_span

_NAMED = 10


class Claim(msgspec.Struct, frozen=True):
    """A chunk or a value that this rank could write.

    `identity` is the same on all ranks that could write it. `holders` are their ranks in the group, in order, or None
    if they must be found by communication; then `content` is a digest of the value (None: values need not be equal).
    With `lowest`, the lowest holder's value is saved; with `lenient`, it is if the values differ. `tied` is the
    identity of another claim with the same memory.
    """

    name: str
    identity: int
    nbytes: int
    holders: tuple[int, ...] | None
    content: int | None = None
    lowest: bool = False
    lenient: bool = False
    tied: int = 0


class Note(msgspec.Struct, array_like=True, frozen=True):
    """A rank's message about one of its groups of claims: the group, the number of claims, the digests."""

    group: int
    members: int
    claims: int
    contents: int


def _group_id(holders: tuple[int, ...] | None) -> int:
    return 0 if holders is None else checksum(np.array(holders, dtype="<i8").tobytes()) | 1


def _digest(numbers: Iterable[int]) -> int:
    return checksum(np.fromiter(numbers, dtype=np.uint64).tobytes())


class Agreement:
    """Everything that a rank holds, and its side of the agreement on which rank writes what.

    Args:
        claims: what other ranks may hold, too.
        rank: this rank, of `world` in the group.
        rows: everything that it holds.
        claimed: the numbers of the rows that the claims are of; the rank writes all others.
        paths: the path of each name in the nested state dict.
        split_from: see `assign`, as for `lowest_rank`.
    """

    def __init__(
        self,
        claims: Sequence[Claim],
        rank: int,
        world: int,
        rows: Sequence[Row] = (),
        claimed: Sequence[int] = (),
        paths: dict[str, tuple[Any, ...]] | None = None,
        *,
        split_from: int = sys.maxsize,
        lowest_rank: bool = False,
    ) -> None:
        self.rows = rows
        self.paths = paths
        self._claims = claims
        self._rank = rank
        self._world = world
        self._claimed = claimed
        self._split_from = split_from
        self._lowest_rank = lowest_rank
        self._groups: dict[tuple[int, ...] | None, list[Claim]] = {}  # by their holders
        for claim in claims:
            if claim.holders != (rank,):
                self._groups.setdefault(claim.holders, []).append(claim)

    def notes(self) -> list[Note]:
        """The notes to send to the coordinator."""
        notes = []
        for holders, claims in self._groups.items():
            ordered = sorted(claims, key=lambda claim: claim.identity)
            notes.append(
                Note(
                    group=_group_id(holders),
                    members=self._world if holders is None else len(holders),
                    claims=_digest(number for claim in ordered for number in (claim.identity, claim.tied)),
                    contents=_digest(claim.content or 0 for claim in ordered),
                )
            )
        return notes

    def numbers(self, unsure: Sequence[int]) -> bytes:
        """For the coordinator: the claims of groups whose members' notes differ."""
        claims = self._claims_of(unsure)
        return np.array([(c.identity, c.content or 0) for c in claims], dtype="<u8").tobytes()

    def settled(self, unsure: Sequence[int] = (), answer: bytes = b"") -> list[Row]:
        """The rows that this rank writes; `answer` is the coordinator's answer to `numbers`, if any."""
        shares = assign(
            self._claims,
            self.holders(unsure, answer),
            self._rank,
            split_from=self._split_from,
            lowest_rank=self._lowest_rank,
            ties=self._ties(unsure),
        )
        claimed = set(self._claimed)
        found = [row for number, row in enumerate(self.rows) if number not in claimed]
        for share in shares:
            row = self.rows[self._claimed[share.claim]]
            found += _part_of(row, share) if share.parts > 1 else [row]
        return found

    def holders(self, unsure: Sequence[int] = (), answer: bytes = b"") -> list[tuple[int, ...]]:
        """The holders of each claim, in order of claims.

        Raises `DivergentValueError`, on every holder, for values that differ but must be equal.
        """
        everyone = tuple(range(self._world))
        holders = {}
        if unsure:
            claims = self._claims_of(unsure)
            found = msgspec.msgpack.decode(answer, type=_FoundHolders)
            divergent = [c for c, bad in zip(claims, found.divergent, strict=True) if bad]
            refused = [claim.name for claim in divergent if not claim.lenient]
            if refused:
                raise DivergentValueError(
                    f"ranks hold different values of {_listed(refused)}. A checkpoint has one value per name: wrap "
                    f"values that are each rank's own in terrazzo.checkpoint.PerRank (or name them in "
                    f"DefaultSavePlanner(per_rank=...)), or name those of which the lowest rank's is right in "
                    f"DefaultSavePlanner(lowest_rank_wins=...)"
                )
            _tell([claim.name for claim in divergent])
            holders = {c.identity: found.sets[number] for c, number in zip(claims, found.numbers, strict=True)}
            holders |= {claim.identity: holders[claim.identity][:1] for claim in divergent}
        return [
            holders[claim.identity]
            if claim.identity in holders and claim.holders != (self._rank,)
            else (everyone if claim.holders is None else claim.holders)
            for claim in self._claims
        ]

    def _ties(self, unsure: Sequence[int]) -> dict[int, int]:
        """The claims that share memory with another one on all their holders, and that one."""
        if not any(claim.tied for claim in self._claims):
            return {}
        sure = {holders for holders in self._groups if _group_id(holders) not in unsure}
        places = {(claim.holders, claim.identity): place for place, claim in enumerate(self._claims)}
        return {
            place: places[claim.holders, claim.tied]
            for place, claim in enumerate(self._claims)
            if claim.tied and claim.holders in sure and (claim.holders, claim.tied) in places
        }

    def _claims_of(self, unsure: Sequence[int]) -> list[Claim]:
        return [c for holders, claims in self._groups.items() if _group_id(holders) in unsure for c in claims]


class _FoundHolders(msgspec.Struct, array_like=True, frozen=True):
    """The holders of a rank's claims: for each the number of a set of ranks, and whether their values differ."""

    sets: list[tuple[int, ...]]
    numbers: list[int]
    divergent: list[bool]


def groups_unsure(notes: Sequence[list[Note]]) -> list[int]:
    """The groups whose members' notes differ."""
    seen: dict[int, tuple[Note, int]] = {}
    unsure = set()
    for of_rank in notes:
        for note in of_rank:
            first, count = seen.get(note.group, (note, 0))
            if note != first:
                unsure.add(note.group)
            seen[note.group] = (first, count + 1)
    unsure |= {group for group, (note, count) in seen.items() if count != note.members}
    return sorted(unsure)


def answers(numbers: Sequence[bytes]) -> list[bytes]:
    """On the coordinator: for each rank, who holds what it sent the numbers of."""
    tables = [np.frombuffer(data, "<u8").reshape(-1, 2) for data in numbers]
    ranks = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    rows = np.concatenate(tables)
    identities, which = np.unique(rows[:, 0], return_inverse=True)
    order = np.lexsort((ranks, which))
    bounds = np.searchsorted(which[order], np.arange(len(identities) + 1))
    sets: dict[tuple[int, ...], int] = {}
    of_identity, divergent = [], []
    for first, last in zip(bounds.tolist(), bounds[1:].tolist(), strict=False):
        members = order[first:last]
        of_identity.append(sets.setdefault(tuple(ranks[members].tolist()), len(sets)))
        divergent.append(bool((rows[members, 1] != rows[members[0], 1]).any()))
    listed = list(sets)
    replies = []
    start = 0
    for table in tables:
        own = which[start : start + len(table)].tolist()
        start += len(table)
        used = {number: place for place, number in enumerate(dict.fromkeys(of_identity[i] for i in own))}
        answer = _FoundHolders(
            [listed[n] for n in used], [used[of_identity[i]] for i in own], [divergent[i] for i in own]
        )
        replies.append(msgspec.msgpack.encode(answer))
    return replies


_told: set[str] = set()


def _tell(names: Sequence[str]) -> None:
    """Say once of each name that ranks have different values of it, and which one is kept."""
    new = [name for name in names if name not in _told]
    if not new:
        return
    _told.update(new)
    warnings.warn(
        f"ranks hold different values of {_listed(new)}: the lowest rank's is saved. Wrap values that are each rank's "
        f"own in terrazzo.checkpoint.PerRank, or name them in DefaultSavePlanner(per_rank=...); name them in "
        f"DefaultSavePlanner(lowest_rank_wins=...) if this is what you want, and nothing will be said",
        DivergentValueWarning,
        stacklevel=2,
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


class RowShare(msgspec.Struct, frozen=True):
    """This rank's part in a claim: `index` of `parts` equal parts."""

    claim: int
    index: int = 0
    parts: int = 1


def assign(
    claims: Sequence[Claim],
    holders: Sequence[tuple[int, ...]],
    rank: int,
    *,
    split_from: int,
    lowest_rank: bool,
    ties: Mapping[int, int] | None = None,
) -> list[RowShare]:
    """What this rank writes. Every holder of a claim computes the same, without communication.

    Claims of at least `split_from` bytes are split among all holders; the others go, largest first, to the
    holder that has least so far. With `lowest_rank`, each goes to its lowest holder. With `ties`, a claim goes where
    the one goes that it is tied to.
    """
    shares: list[RowShare] = []
    shared: dict[tuple[int, ...], list[int]] = {}
    for index, ranks in enumerate(holders):
        if len(ranks) == 1 or lowest_rank or claims[index].lowest:
            if ranks[0] == rank:
                shares.append(RowShare(index))
        else:
            shared.setdefault(ranks, []).append(index)
    for ranks, indices in shared.items():
        indices.sort(key=lambda i: (-claims[i].nbytes, claims[i].identity))
        loads = [(0, holder) for holder in ranks]
        together = set(indices) if ties else set()
        mine = set()
        follow: list[int] = []
        for index in indices:
            nbytes = claims[index].nbytes
            if nbytes >= split_from:
                shares.append(RowShare(index, ranks.index(rank), len(ranks)))
            elif ties and ties.get(index) in together:
                follow.append(index)
            else:
                load, holder = loads[0]
                heapq.heapreplace(loads, (load + nbytes, holder))
                if holder == rank:
                    mine.add(index)
                    shares.append(RowShare(index))
        shares += [RowShare(index) for index in follow if ties and ties[index] in mine]
    return shares


def _part_of(row: Row, share: RowShare) -> list[Row]:
    if row.kind != TENSOR:
        raise CheckpointError(f"{row.name!r}: only tensors can be split among ranks")
    form = row.form
    split = split_of(form.box, share.index, share.parts)
    if split is None:
        return []
    dim, start, box = split
    # Of an item that a subclass has changed, the planner has the data.
    is_data = row.value is not None and row.value.shape == form.box.lengths
    return [
        msgspec.structs.replace(
            row,
            form=form_of(form.dtype, form.shape, box, form.requires_grad),
            value=row.value.narrow(dim, start, box.lengths[dim]) if is_data else None,
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


_WINDOW = 4 << 20
# An odd multiplier makes i -> i * _ODD a permutation of the 64-bit integers.
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def digests_of_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """64 bits of each tensor that depend on every element; the host waits once for each device.

    Digests can be compared only if made on the same type of device.

    >>> transposed = torch.tensor([[0, 3], [1, 4], [2, 5]])
    >>> digests_of_tensors([torch.arange(6).reshape(2, 3).T]) == digests_of_tensors([transposed])
    True
    """
    digests: list[int] = []
    on_devices: dict[torch.device, dict[int, torch.Tensor]] = {}  # by the place among the digests
    for i, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            digests.append(_digest_on_host(tensor))
        else:
            digests.append(0)
            on_devices.setdefault(tensor.device, {})[i] = _digest_on_device(tensor)
    for computed in on_devices.values():
        for i, value in zip(computed, torch.stack([*computed.values()]).tolist(), strict=True):
            digests[i] = value & 0xFFFFFFFFFFFFFFFF
    return digests


def _digest_on_host(tensor: torch.Tensor) -> int:
    state = xxhash.xxh3_64()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        state.update(bytes_of(tensor))
    else:
        for box in row_major_windows(tensor.shape, _WINDOW // tensor.dtype.itemsize):
            window = tensor[box.slices()].resolve_conj().resolve_neg().contiguous()
            state.update(bytes_of(window))
    return state.intdigest()


def _digest_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Without copying the data to the host: a sum of the bytes, each times a number that depends on its position."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for box in row_major_windows(tensor.shape, _WINDOW // tensor.dtype.itemsize):
        window = tensor[box.slices()].resolve_conj().resolve_neg().contiguous()
        data = window.reshape(-1).view(torch.uint8).to(torch.int64)
        place = torch.arange(1, data.numel() + 1, device=tensor.device, dtype=torch.int64) * _ODD
        total = total * 31 + ((data + 1) * (place ^ (place >> 29))).sum()  # int64 arithmetic wraps around
    return total
