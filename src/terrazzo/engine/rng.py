"""The random states of a rank: saved with a run, and continued by it."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from terrazzo.engine.seeds import generator_for


def random_state() -> dict[str, Any]:
    """Of everything that draws random numbers in this process."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(words), gauss]}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    numpy = sys.modules.get("numpy")  # who has not imported it draws nothing from it
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state(legacy=True)
        state["numpy"] = [str(kind), torch.from_numpy(keys.astype("int64")), *map(float, rest)]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Continue from a state; generators that it does not know are left alone."""
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
    """Set the states of a rank that was not there when rank 0 saved `state`: its own, and the same every time."""
    known = state["torch"].numpy().tobytes().hex()
    seed = int(torch.randint(2**62, (1,), generator=generator_for(known, "rank", rank)))
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
