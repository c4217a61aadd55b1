"""The trace of a step: what was done for which group, with its bytes, as text and for trace viewers."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp.compare import Model, apart, batches, loss_of, mine, shard_blocks
from ranks import run_ranks
from terrazzo.errors import FSDPError
from terrazzo.fsdp import report, trace


def check_trace(folder: str) -> None:
    model = apart(shard_blocks(Model(), reshard_after_forward=True))
    x, y = next(batches(1))
    loss_of(model, mine(x), mine(y)).backward()
    with trace(model) as steps:
        loss_of(model, mine(x), mine(y)).backward()
    name = steps.timeline().names_of
    kinds = [(e.kind, name(e)) for e in steps.operations]
    groups = ["blocks.0", "blocks.1", "blocks.2"]
    forward = [(e.kind, name(e)) for e in steps.operations if not e.backward]
    gathers = [(e.why, name(e)) for e in steps.operations if e.kind == "gather"]
    assert gathers[0] == ("unshard", "Model") and ("prefetch", "blocks.0") in gathers
    assert [group for kind, group in forward if kind == "free"] == [*groups, "Model"]
    assert [group for kind, group in kinds if kind == "reduce"] == ["blocks.2", "blocks.1", "blocks.0", "Model"]
    assert kinds.index(("reduce", "blocks.2")) < kinds.index(("hand over", "blocks.2"))
    assert steps.total_bytes() == report(model).moved
    assert all(e.end >= e.begin >= 0 for e in steps.operations)
    text = str(steps)
    assert len(text.splitlines()) == len([kind for kind, _ in kinds if kind != "use"]) + 1
    assert "backward  reduce      reduce      blocks.1" in text
    file_of_rank = f"{folder}/trace-{dist.get_rank()}.json"
    steps.save(file_of_rank)
    with open(file_of_rank) as file:
        viewed = json.load(file)["traceEvents"]
    bars = [event["name"] for event in viewed if event["ph"] in "Xb" and not event["name"].startswith("compute")]
    assert bars == [f"{kind} {group}" for kind, group in kinds if kind not in ("use", "write", "queued", "follow")]
    loss_of(model, mine(x), mine(y)).backward()
    assert len(steps.operations) == len(kinds), "the trace ended with its context"
    with pytest.raises(FSDPError, match="not sharded"), trace(nn.Linear(1, 1)):
        pass


def test_trace(tmp_path):
    run_ranks(2, check_trace, str(tmp_path))


def check_profile() -> None:
    """Operations of all groups are in a profile, also those of backward, which on accelerators has another thread."""
    model = apart(shard_blocks(Model(), reshard_after_forward=True))
    x, y = next(batches(1))
    x, y = mine(x), mine(y)
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            loss_of(model, x, y).backward()
        counts = {each.key: each.count for each in found.key_averages()}
        for group in ("blocks.0", "blocks.1", "blocks.2"):
            for kind, times in (("gather", 2), ("copy out", 2), ("free", 2), ("reduce", 1), ("hand over", 1)):
                assert counts[f"fully_shard: {kind} {group}"] == times, (kind, group)
        loss_of(model, x, y).backward()


@pytest.mark.on_late
def test_profiles_name_operations_and_groups():
    run_ranks(2, check_profile)
