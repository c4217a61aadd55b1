"""The trace of a step: what was done for which group, with its bytes, as text and for trace viewers."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from torch import nn

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
    assert len(viewed) == len(kinds) and {"name", "ph", "ts", "dur", "pid", "tid"} <= viewed[0].keys()
    loss_of(model, mine(x), mine(y)).backward()
    assert len(steps.operations) == len(kinds), "the trace ended with its context"
    with pytest.raises(FSDPError, match="not sharded"), trace(nn.Linear(1, 1)):
        pass


def test_trace(tmp_path):
    run_ranks(2, check_trace, str(tmp_path))
