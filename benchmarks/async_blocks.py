"""How long `async_save` holds training up, against one copy of the state to the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import terrazzo.checkpoint as ours
from benchmarks.cases import Implementations, Prepared


def async_blocks(
    state: dict[str, Any], where: str | Path, others: Mapping[str, Callable[[], Any]] | None = None
) -> Implementations:
    """Ours and a copy, for a state of DTensors and a place to save it to; and what else begins a save of as much."""
    sources = [value.to_local() for value in state.values()]
    pinned = any(source.device.type != "cpu" for source in sources)
    copies = [torch.empty_like(source, device="cpu", pin_memory=pinned).fill_(0) for source in sources]
    saving: list[Future[Any]] = []

    def wait() -> None:
        while saving:
            saving.pop().result()
        dist.barrier()

    def begins(begin: Callable[[], Any]) -> Prepared:
        return Prepared(lambda: saving.append(begin()), wait)

    def copy() -> None:
        for target, source in zip(copies, sources, strict=True):
            target.copy_(source)

    def save() -> Any:
        return ours.async_save(state, checkpoint_id=where)

    saving.append(save())
    made = {"terrazzo": begins(save), "copy": Prepared(copy, wait)}
    return made | {name: begins(begin) for name, begin in (others or {}).items()}
