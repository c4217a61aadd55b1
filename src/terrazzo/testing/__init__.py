"""Tests of distributed code on local ranks that start once per session: `run_ranks` and `run_fresh`.

from terrazzo.testing import run_ranks

def check_sum(scale):                    # at module level
    x = torch.ones(2) * scale
    torch.distributed.all_reduce(x)
    return x.sum().item()

def test_sum():
    assert run_ranks(2, check_sum, 3.0) == [12.0, 12.0]
"""

from terrazzo.testing.pool import Outcome, RanksFailed, close_all, preload, run_fresh, run_ranks

__all__ = ["Outcome", "RanksFailed", "close_all", "preload", "run_fresh", "run_ranks"]
