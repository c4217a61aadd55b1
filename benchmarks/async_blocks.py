"""How long `async_save` holds training up, against one copy of the state in memory."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import terrazzo.checkpoint as ours
from benchmarks.cases import Implementations, Prepared


def async_blocks(state: dict[str, Any], where: str | Path) -> Implementations:
    """The two implementations, for a state of DTensors and a place to save it to."""
    sources = [value.to_local() for value in state.values()]
    copies = [torch.empty_like(source).fill_(0) for source in sources]
    saving: list[Future[Any]] = []

    def wait() -> None:
        while saving:
            saving.pop().result()
        dist.barrier()

    def save() -> None:
        saving.append(ours.async_save(state, checkpoint_id=where))

    def copy() -> None:
        for target, source in zip(copies, sources, strict=True):
            target.copy_(source)

    save()
    return {"terrazzo": Prepared(save, wait), "copy": Prepared(copy, wait)}
