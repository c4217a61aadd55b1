"""By what gradients are divided, and when: before they are added over the ranks, by the backend as it adds, or after.

Float32 and bfloat16 have range enough for any sum, so the backend divides, if it can: nobody then goes over the numbers
for that alone.  Float16 ends at 65504, and its smallest numbers vanish when they are divided: there half of the
factor comes before the sum, and half after it, as near to halves as a power of two before allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch

from terrazzo.comm.wire import ScaledSum


class Ways(Enum):
    """What the one who reduces can do."""

    EXACT = "sums, and means that are joined in single precision and rounded once"  # `terrazzo.comm` on CPU
    NATIVE = "sums, means, and sums of what is multiplied first"  # NCCL
    SUMS = "sums"


@dataclass(frozen=True, slots=True)
class Division:
    """How the gradients of all ranks become that of the parameter."""

    before: float | None = None  # gradients are divided by it first
    shards: str | ScaledSum = "sum"  # how they are reduced over the ranks that shard
    replicas: str = "sum"  # and over the replicas
    after: float | None = None  # what came of it is divided by it


@lru_cache(maxsize=256)
def division_of(
    dtype: torch.dtype, ways: Ways, shards: int, replicas: int, factor: float | None, sums_already: bool = False
) -> Division:
    """The division for gradients of `dtype` of `shards` times `replicas` ranks.

    >>> division_of(torch.float32, Ways.NATIVE, 4, 2, None)
    Division(before=None, shards='avg', replicas='avg', after=None)
    >>> division_of(torch.float32, Ways.SUMS, 4, 2, None)
    Division(before=None, shards='sum', replicas='sum', after=8.0)
    >>> division_of(torch.float16, Ways.NATIVE, 4, 2, None)
    Division(before=4.0, shards='sum', replicas='sum', after=2.0)

    Args:
        dtype: In which they are reduced.
        ways: What the one who reduces can do.
        shards: How many ranks shard.
        replicas: How many replicas there are of each shard.
        factor: By what the sum is divided; None: by the number of ranks.
        sums_already: Every rank has the sum already, and what is added up are copies of it.
    """
    ranks = shards * replicas
    total = float(ranks if factor is None else factor) * (ranks if sums_already else 1)
    if total == 1:
        return Division()
    if total == ranks and ways is Ways.EXACT:
        return Division(shards="avg", replicas="avg")
    if dtype is torch.float16:
        before = 1.0
        while total % before == 0 and total / before > before:
            before *= 2
        return Division(_unless_one(before), after=_unless_one(total / before))
    if ways is not Ways.NATIVE:
        return Division(after=total)
    if total == ranks and factor is None:
        return Division(shards="avg", replicas="avg")
    return Division(shards="avg" if total == shards else ScaledSum(1 / total))


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor


__all__ = ["Division", "Ways", "division_of"]
