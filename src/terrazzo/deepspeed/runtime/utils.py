"""Helpers that scripts import from `deepspeed.runtime.utils`."""

from __future__ import annotations

import logging

from terrazzo.deepspeed.accelerator import get_accelerator

LOGGER = logging.getLogger("terrazzo.deepspeed")


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory that tensors on the accelerator use, and its maximum so far."""
    if force:
        found = get_accelerator()
        now, peak = found.memory_allocated() / 2**30, found.max_memory_allocated() / 2**30
        LOGGER.info("%s: %.2f GiB, at most %.2f GiB", message, now, peak)


__all__ = ["see_memory_usage"]
