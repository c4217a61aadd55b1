"""The division of gradients: by which factors, before the reduction, by the backend in the reduction, or after it.

Float32 and bfloat16 have enough range for any sum, so the backend divides, if it can, which saves a pass over the
gradients. Float16 overflows at 65504, and its smallest numbers become zero if they are divided. So about the square
root of the factor, rounded to a power of two, is applied before the sum, and the rest after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch

from terrazzo.comm.wire import ScaledSum


class Ways(Enum):
    """How a backend or a custom collective can reduce."""

    EXACT = "sums, and means that are computed in single precision and rounded once"  # `terrazzo.comm` on CPU
    NATIVE = "sums, means, and sums with a factor"  # NCCL
    SUMS = "sums"


@dataclass(frozen=True, slots=True)
class Division:
    """How gradients are divided and reduced."""

    before: float | None = None  # divisor before the reduction
    shards: str | ScaledSum = "sum"  # op over the ranks that shard
    replicas: str = "sum"  # op over the replicas
    after: float | None = None  # divisor after the reduction

    def divisor_so_far(self, shards: int) -> float:
        """The number by which gradients have been divided once they are reduced over `shards` ranks.

        >>> Division(before=4.0, after=2.0).divisor_so_far(4), Division(shards="avg").divisor_so_far(4)
        (4.0, 4.0)
        """
        before = 1.0 if self.before is None else self.before
        if isinstance(self.shards, ScaledSum):
            return before / self.shards.factor
        return before * shards if self.shards == "avg" else before


@lru_cache(maxsize=256)
def division_of(
    dtype: torch.dtype, ways: Ways, shards: int, replicas: int, factor: float | None, sums_already: bool = False
) -> Division:
    """The division for gradients of `dtype` over `shards` times `replicas` ranks.

    >>> division_of(torch.float32, Ways.NATIVE, 4, 2, None)
    Division(before=None, shards='avg', replicas='avg', after=None)
    >>> division_of(torch.float32, Ways.SUMS, 4, 2, None)
    Division(before=None, shards='sum', replicas='sum', after=8.0)
    >>> division_of(torch.float16, Ways.NATIVE, 4, 2, None)
    Division(before=4.0, shards='sum', replicas='sum', after=2.0)

    Args:
        dtype: The dtype in which they are reduced.
        ways: How they can be reduced.
        shards: The number of ranks that shard.
        replicas: The number of replicas of each shard.
        factor: The divisor of the sum; None: the number of ranks.
        sums_already: Whether every rank already has the sum, so that the reduction adds copies of it.
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
