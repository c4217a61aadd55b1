"""The random numbers that a captured program draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from terrazzo._torch.graphs import without_modes
from terrazzo.errors import CaptureError
from terrazzo.tensor import random


class Draws:
    """The random keys that a program draws, as inputs of its graph.

    Draws are identified by the state of the generator before the draw: a part that runs again from a saved state
    (activation checkpointing) draws the same key again. Each further run of the program starts from other states, so
    that a state that the program sets itself is not mistaken for one that it found.
    """

    def __init__(self) -> None:
        self.sources: list[tuple[Any, torch.Generator | None]] = []
        self._numbers: Sequence[torch.Tensor] | None = None  # None until it is known how many are drawn
        self._starts = {torch.default_generator: torch.default_generator.get_state()}
        self._known: dict[Any, int] = {}
        # For each generator its state after the last new draw.
        self._next: dict[Any, bytes] = {torch.default_generator: _state(torch.default_generator)}

    def draw(self, mesh: Any, generator: torch.Generator | None) -> torch.Tensor:
        """The key that the program draws next."""
        with without_modes():  # keys are real numbers, also under fake tensors
            index = self._index(mesh, generator)
        return torch.zeros((), dtype=torch.int64, device="cpu") if self._numbers is None else self._numbers[index]

    def _index(self, mesh: Any, generator: torch.Generator | None) -> int:
        source = torch.default_generator if generator is None else generator
        state = _state(source)
        if source not in self._starts:
            self._starts[source] = source.get_state()
            self._next[source] = state
        index = self._known.get((source, state))
        if index is not None:
            random.next_number(generator)
            return index
        if self._next[source] != state:
            raise CaptureError("it sets the state of a random generator", operation="torch.manual_seed")
        index = self._known[source, state] = len(self._known)
        if self._numbers is None:
            self.sources.append((mesh, generator))
        elif index >= len(self._numbers):
            raise CaptureError("it draws random numbers in its backward", operation="a random operation")
        random.next_number(generator)
        self._next[source] = _state(source)
        return index

    def restart(self, numbers: Sequence[torch.Tensor]) -> None:
        """Start another run, which draws these numbers."""
        self._numbers = numbers
        self._known.clear()
        with without_modes():
            for source, state in self._starts.items():
                source.set_state(state)
                random.next_number(source)
                self._next[source] = _state(source)

    def end(self) -> None:
        """Restore the generators' states from before the capture."""
        for source, state in self._starts.items():
            source.set_state(state)

    def check_end(self) -> None:
        """Raise if the run changed a generator's state in another way than by drawing."""
        with without_modes():
            if any(_state(source) != state for source, state in self._next.items()):
                raise CaptureError("it sets the state of a random generator", operation="torch.manual_seed")


def _state(source: Any) -> bytes:
    return bytes(source.get_state().cpu().numpy())
