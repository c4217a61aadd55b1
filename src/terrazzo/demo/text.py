"""The text that the demo learns, and characters as numbers.

`text.txt` is this project's own prose: its documentation and the introductions of its modules, as they were when the
demo was made.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 128  # ASCII


@cache
def text() -> str:
    """All of it."""
    return files("terrazzo.demo").joinpath("text.txt").read_text(encoding="ascii")


def encode(characters: str) -> Tensor:
    """Characters as numbers.

    >>> encode("ab")
    tensor([97, 98])
    """
    return torch.tensor(list(characters.encode("ascii")))


def decode(numbers: Tensor) -> str:
    """Numbers as characters.

    >>> decode(torch.tensor([97, 98]))
    'ab'
    """
    return bytes(numbers.tolist()).decode("ascii")


class Passages(Dataset[Tensor]):
    """Overlapping passages of the text, each `length` characters and one more, which is there to be guessed."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._numbers = encode(text())

    def __len__(self) -> int:
        return 2 * (len(self._numbers) - 1) // self._length - 1

    def __getitem__(self, index: int) -> Tensor:
        first = index * self._length // 2
        return self._numbers[first : first + self._length + 1]
