"""The random numbers that a captured program draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from terrazzo._torch.graphs import without_modes
from terrazzo.errors import CaptureError
from terrazzo.tensor import random


class Draws:
    """The random keys that a program draws, as inputs of its graph.

    Draws are identified by the state of the generator before the draw: a part that runs again from a saved state
    (activation checkpointing) draws the same key again. The first run shows how many there are. Each further run starts
    from other states, so that a state that the program sets itself is not mistaken for one that it found.
    """

    def __init__(self, fake: Any) -> None:
        self.fake = fake
        self.sources: list[tuple[Any, torch.Generator | None]] = []
        self._numbers: Sequence[torch.Tensor] | None = None  # None in the first run
        self._known: dict[Any, int] = {}
        self._running = False
        # For each generator its state before the run, and after the last new draw.
        self._starts: dict[torch.Generator, torch.Tensor] = {}
        self._next: dict[torch.Generator, bytes] = {}

    @contextmanager
    def run(self, numbers: Sequence[torch.Tensor] | None) -> Iterator[None]:
        """A run of the program, which draws these numbers. Then generators are as before: others use them, too."""
        self._numbers = numbers
        self._known, self._starts, self._next = {}, {}, {}
        with without_modes():
            for source in {torch.default_generator, *(_source(generator) for _, generator in self.sources)}:
                self._start(source)
        self._running = True
        try:
            yield
            with without_modes():
                if any(_state(source) != state for source, state in self._next.items()):
                    raise _sets_state()
        finally:
            self._running = False
            with without_modes():
                for source, state in self._starts.items():
                    source.set_state(state)

    def _start(self, source: torch.Generator) -> None:
        self._starts[source] = source.get_state()
        if self._numbers is not None:
            random.next_number(source)
        self._next[source] = _state(source)

    def draw(self, mesh: Any, generator: torch.Generator | None) -> torch.Tensor:
        """The key that the program draws next."""
        with without_modes():  # keys are real numbers, also under fake tensors
            index = self._index(mesh, generator)
        return torch.zeros((), dtype=torch.int64, device="cpu") if self._numbers is None else self._numbers[index]

    def _index(self, mesh: Any, generator: torch.Generator | None) -> int:
        source = _source(generator)
        if source not in self._starts:
            self._start(source)
        state = _state(source)
        index, is_new = self._known.get((source, state)), False
        if index is None:
            index = self._known[source, state] = len(self._known)
            if not self._running or self._numbers is not None and index >= len(self._numbers):
                raise CaptureError("it draws random numbers in its backward", operation="a random operation")
            if self._next[source] != state:
                raise _sets_state()
            if self._numbers is None:
                self.sources.append((mesh, generator))
            is_new = True
        random.next_number(generator)
        if is_new:
            self._next[source] = _state(source)
        return index


def _sets_state() -> CaptureError:
    return CaptureError("it sets the state of a random generator", operation="torch.manual_seed")


def _source(generator: torch.Generator | None) -> torch.Generator:
    return torch.default_generator if generator is None else generator


def _state(source: Any) -> bytes:
    return bytes(source.get_state().cpu().numpy())
