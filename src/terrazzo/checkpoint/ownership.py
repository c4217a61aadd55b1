"""Who writes what: every chunk by one of its holders, bytes balanced, values that ranks share checked to be equal.

Each rank has *claims*: chunks that it could write.  For a distributed tensor the layout says which ranks hold
the same chunk.  A plain tensor or an object says nothing; usually all ranks have the same ones (DDP), but not
always (pipeline stages).  So ranks exchange, in one small message, a digest per group of holders:

    all digests of a group agree        each member computes the same assignment by itself
    some differ                         a second message carries a number per claim, which shows who holds what

The digest of claims without a layout covers their values too: a random state or a position in the data that
differs between ranks is found before anything is written, and is an error that names it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from terrazzo.checkpoint.native.format import checksum
from terrazzo.errors import DivergentValueError

Exchange = Callable[[bytes], list[bytes]]
_NAMED = 10


class Claim(msgspec.Struct, frozen=True):
    """Something this rank could write.

    `identity` is the same on all ranks that could write the same thing.  `holders` are their group ranks, in
    order, or None where only an exchange can tell; then `content` stands for the value (None: it need not be
    equal).  With `lowest`, the lowest holder's value is the right one.
    """

    name: str
    identity: int
    nbytes: int
    holders: tuple[int, ...] | None
    content: int | None = None
    lowest: bool = False


class Note(msgspec.Struct, array_like=True, frozen=True):
    """What a rank says about one of its groups of claims: which group, how many members, the digests."""

    group: int
    members: int
    claims: int
    contents: int


@dataclass(slots=True)
class _Group:
    holders: tuple[int, ...] | None
    claims: list[Claim] = field(default_factory=list)

    def note(self, world: int) -> Note:
        ordered = sorted(self.claims, key=lambda claim: claim.identity)
        return Note(
            group=_group_id(self.holders),
            members=world if self.holders is None else len(self.holders),
            claims=_digest(claim.identity for claim in ordered),
            contents=_digest(claim.content or 0 for claim in ordered),
        )


def _group_id(holders: tuple[int, ...] | None) -> int:
    return 0 if holders is None else checksum(np.array(holders, dtype="<i8").tobytes()) | 1


def _digest(numbers: Iterable[int]) -> int:
    return checksum(np.fromiter(numbers, dtype=np.uint64).tobytes())


class Negotiation:
    """One rank's side of the agreement on holders: its note, and what follows from everybody's notes."""

    def __init__(self, claims: Sequence[Claim], rank: int, world: int) -> None:
        self.claims = claims
        self._rank = rank
        self._world = world
        self._groups: dict[tuple[int, ...] | None, _Group] = {}
        for claim in claims:
            if claim.holders != (rank,):
                self._groups.setdefault(claim.holders, _Group(claim.holders)).claims.append(claim)

    def notes(self) -> list[Note]:
        """What to tell the other ranks."""
        return [group.note(self._world) for group in self._groups.values()]

    def settle(self, notes: Sequence[list[Note]], exchange: Exchange) -> list[tuple[int, ...]]:
        """The holders of each claim, in order of claims.  Collective: all ranks call it with the same notes.

        Raises `DivergentValueError`, on every rank that holds one, for values that are not equal.
        """
        if _all_agree(notes):
            everyone = tuple(range(self._world))
            return [everyone if claim.holders is None else claim.holders for claim in self.claims]
        unsure = [claim for group in self._groups.values() for claim in group.claims]
        numbers = np.array([(c.identity, c.content or 0) for c in unsure], dtype="<u8").reshape(-1, 2)
        replies = [np.frombuffer(data, "<u8").reshape(-1, 2) for data in exchange(numbers.tobytes())]
        found, divergent = _holders_by_number(numbers, replies)
        if divergent.any():
            raise _divergence([c.name for c, bad in zip(unsure, divergent.tolist(), strict=True) if bad])
        holders = {claim.identity: ranks for claim, ranks in zip(unsure, found, strict=True)}
        return [holders.get(claim.identity, (self._rank,)) for claim in self.claims]


def _all_agree(notes: Sequence[list[Note]]) -> bool:
    """Whether every group's members all sent the same note."""
    seen: dict[int, tuple[Note, int]] = {}
    for of_rank in notes:
        for note in of_rank:
            first, count = seen.get(note.group, (note, 0))
            if note != first:
                return False
            seen[note.group] = (first, count + 1)
    return all(count == note.members for note, count in seen.values())


def _holders_by_number(own: np.ndarray, replies: Sequence[np.ndarray]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """For each of this rank's claims, the ranks that sent the same identity, and whether one sent another content."""
    held = np.zeros((len(own), len(replies)), dtype=bool)
    divergent = np.zeros(len(own), dtype=bool)
    for rank, reply in enumerate(replies):
        order = np.argsort(reply[:, 0])
        position = np.minimum(np.searchsorted(reply[order, 0], own[:, 0]), max(len(reply) - 1, 0))
        if len(reply):
            match = reply[order][position]
            held[:, rank] = match[:, 0] == own[:, 0]
            divergent |= held[:, rank] & (match[:, 1] != own[:, 1])
    return [tuple(np.nonzero(row)[0].tolist()) for row in held], divergent


def _divergence(names: list[str]) -> DivergentValueError:
    shown = ", ".join(map(repr, names[:_NAMED])) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return DivergentValueError(
        f"ranks hold different values of {shown}. A checkpoint has one value per name: wrap values that are each "
        f"rank's own in terrazzo.checkpoint.PerRank (or name them in DefaultSavePlanner(per_rank=...)), or name "
        f"those of which the lowest rank's is right in DefaultSavePlanner(lowest_rank_wins=...)"
    )


class Share(msgspec.Struct, frozen=True):
    """This rank's part in a claim: `index` of `parts` equal parts."""

    claim: int
    index: int = 0
    parts: int = 1


def assign(
    claims: Sequence[Claim], holders: Sequence[tuple[int, ...]], rank: int, *, split_from: int, lowest_rank: bool
) -> list[Share]:
    """What this rank writes.  Every holder of a claim computes the same, without communication.

    Claims of at least `split_from` bytes are split among all holders; the others go, largest first, to the
    holder that has least so far.  With `lowest_rank`, each goes to its lowest holder.
    """
    shares: list[Share] = []
    shared: dict[tuple[int, ...], list[int]] = {}
    for index, ranks in enumerate(holders):
        if len(ranks) == 1 or lowest_rank or claims[index].lowest:
            if ranks[0] == rank:
                shares.append(Share(index))
        else:
            shared.setdefault(ranks, []).append(index)
    for ranks, indices in shared.items():
        indices.sort(key=lambda i: (-claims[i].nbytes, claims[i].identity))
        loads = [(0, holder) for holder in ranks]
        for index in indices:
            nbytes = claims[index].nbytes
            if nbytes >= split_from:
                shares.append(Share(index, ranks.index(rank), len(ranks)))
                continue
            load, holder = loads[0]
            heapq.heapreplace(loads, (load + nbytes, holder))
            if holder == rank:
                shares.append(Share(index))
    return shares
