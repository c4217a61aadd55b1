"""What a rank reads, in the library's own form: immutable data that the native format carries out.

PyTorch's items (`ReadItem`) are made from these only where a planner or a reader of a user's own wants to see them: a
name and an index for every tensor cost more than all the rest of a plan.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from operator import mul
from typing import Protocol

import msgspec
import torch

from terrazzo.checkpoint.native.chunks import Overlap
from terrazzo.layout.box import Box


class Target(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Memory of the state dict, `box` of the tensor stored as `source`, and what fills it.

    `name` is the state dict's own, and `number` tells the boxes of one tensor apart. Targets that are alike share
    their `parts`.
    """

    name: str
    source: str
    tensor: torch.Tensor
    box: Box
    parts: Sequence[Overlap]
    number: int = 0

    def part(self, overlap: Overlap) -> torch.Tensor:
        """The memory that one of the parts fills."""
        tensor, lengths = self.tensor, overlap.lengths
        if tensor.shape == lengths:
            return tensor
        # A third of the cost of `narrow`, which checks what holds here: an overlap is within its box.
        strides = tensor.stride()
        start = tensor.storage_offset() + sum(map(mul, overlap.in_box, strides))
        return tensor.as_strided(lengths, strides, start)


class Value(msgspec.Struct, frozen=True):
    """A value of the state dict that is not a tensor, and the name under which it is stored."""

    name: str
    source: str


class ReadPlan(msgspec.Struct, frozen=True):
    """What a rank reads."""

    targets: Sequence[Target]
    values: Sequence[Value] = ()


class Receiver(Protocol):
    """What a load gives the values that it has read: the planner."""

    @property
    def allow_pickle(self) -> bool:
        """Whether values that were stored as pickles may be unpickled."""
        ...

    def put_value(self, name: str, value: io.BytesIO) -> None:
        """Put a value that has been read into the state dict."""
        ...


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """A box of a tensor; the tensor itself if that is all of it."""
    shape = tensor.shape
    if shape != lengths:
        for dim, length in enumerate(lengths):
            if shape[dim] != length:
                tensor = tensor.narrow(dim, offsets[dim], length)
    return tensor
