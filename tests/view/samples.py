"""What the tests of the viewer show: checkpoints of several ranks, with names that would break a careless page."""

from __future__ import annotations

from pathlib import Path

import torch

from terrazzo.checkpoint import save
from terrazzo.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

HOSTILE = [
    "</script><script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    "a.<!--<script>",
    "__proto__.x",
    "constructor",
    "." * 200,
    "quote\"'&amp;\u2028\u202eback",
    "new\nline",
]
SHARDED = {
    "model.square": ((6, 4), [Shard(0), Shard(1)]),
    "model.uneven": ((5, 3), [Shard(1), Shard(0)]),
    "model.twice": ((7,), [Shard(0), Shard(0)]),
    "model.cube": ((4, 3, 5), [Shard(2), Shard(0)]),
    "model.whole": ((3, 2), [Replicate(), Replicate()]),
    "model.half": ((2, 9), [Replicate(), Shard(1)]),
}


def save_sharded(path: str, by: float = 0.0) -> None:
    """On four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {}
    for number, (name, (shape, placements)) in enumerate(SHARDED.items()):
        torch.manual_seed(number)
        state[name] = distribute_tensor(torch.randn(shape) + by * (number == 1), mesh, placements)
    save({**state, "step": 7 + round(2 * by)}, checkpoint_id=path)


def save_hostile(path: Path) -> None:
    """Every name with a tensor, and one with a value."""
    state = {name: torch.arange(4.0) for name in HOSTILE}
    save({**state, "text": "</pre><script>window.broken = 1</script>"}, checkpoint_id=path)
