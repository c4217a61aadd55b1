"""The random states of a rank, which are saved with a run and restored when it resumes."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from terrazzo.engine.seeds import generator_for


def random_state() -> dict[str, Any]:
    """The states of all random generators in this process."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(words), gauss]}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    numpy = sys.modules.get("numpy")  # a program that has not imported it does not use its generator
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state(legacy=True)
        state["numpy"] = [str(kind), torch.from_numpy(keys.astype("int64")), *map(float, rest)]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a state; generators that it does not contain are left alone."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in state:
        torch.get_device_module(accelerator).set_rng_state(state[accelerator.type])
    if "numpy" in state:
        import numpy

        kind, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), int(position), int(has_gauss), gauss))


def derive_random_state(state: Mapping[str, Any], rank: int) -> None:
    """Seed a rank that did not exist when rank 0 saved `state`: differently from other ranks, but reproducibly."""
    known = state["torch"].numpy().tobytes().hex()
    seed = int(torch.randint(2**62, (1,), generator=generator_for(known, "rank", rank), device="cpu"))
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
