"""Helpers that scripts import from inside DeepSpeed."""

from __future__ import annotations

import logging

from terrazzo.deepspeed.accelerator import get_accelerator

LOGGER = logging.getLogger("terrazzo.deepspeed")


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log how much memory of the accelerator tensors have, and at most had."""
    if force:
        found = get_accelerator()
        now, peak = found.memory_allocated() / 2**30, found.max_memory_allocated() / 2**30
        LOGGER.info("%s: %.2f GiB, at most %.2f GiB", message, now, peak)


__all__ = ["see_memory_usage"]
