"""Tests of distributed code on local ranks that start once per session: `run_ranks` and `run_fresh`.

from terrazzo.testing import run_ranks

def check_sum(scale):                    # at module level
    x = torch.ones(2) * scale
    torch.distributed.all_reduce(x)
    return x.sum().item()

def test_sum():
    assert run_ranks(2, check_sum, 3.0) == [12.0, 12.0]

`all_ranks` has all ranks in one process, with real values, for learning and debugging. `check_rule` compares the
sharding rule of an operation with one device.
"""

from typing import TYPE_CHECKING

from terrazzo import _late
from terrazzo.testing.pool import Outcome, RanksFailed, close_all, preload, run_fresh, run_ranks

if TYPE_CHECKING:
    from terrazzo.testing.in_process import AllRanks, Ranked, all_ranks
    from terrazzo.testing.rules import RuleReport, check_rule

# What imports tensors is imported when it is asked for: ranks start faster without.
__getattr__, __dir__ = _late.late(
    "terrazzo.testing", {"in_process": ["AllRanks", "Ranked", "all_ranks"], "rules": ["RuleReport", "check_rule"]}
)

__all__ = [
    "AllRanks",
    "Outcome",
    "Ranked",
    "RanksFailed",
    "RuleReport",
    "all_ranks",
    "check_rule",
    "close_all",
    "preload",
    "run_fresh",
    "run_ranks",
]
