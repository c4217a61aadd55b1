"""What a rank writes and reads: boxes of tensors, and other values.

A **row** is what a rank may write. The planner makes one for all that the rank holds, and keeps those that it writes
(`plan.ownership`). The writer lays them out in files, and writes an index with one row for each.

A **target** is memory that a rank loads into. The planner makes one for each box that the rank holds, with the parts of
stored chunks that it needs; a reader fills it.

PyTorch's items become rows and targets in `torch_api`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import mul
from typing import Any, Final

import msgspec
import torch

from terrazzo.checkpoint.native.chunks import Overlap
from terrazzo.checkpoint.native.format import BLOCK, block_of
from terrazzo.checkpoint.native.index import RAW
from terrazzo.checkpoint.native.objects import ObjectBytes
from terrazzo.checkpoint.native.root import TENSOR, TensorEntry
from terrazzo.checkpoint.native.tensors import dtype_name
from terrazzo.errors import CheckpointError
from terrazzo.layout.box import Box


class Form(msgspec.Struct, frozen=True, gc=False):
    """What rows of many tensors have in common: dtype and shape of the tensor, the row's box, and how it is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    nbytes: int
    block: int = BLOCK  # bytes that have one checksum
    codec: int = RAW
    requires_grad: bool = False


NO_FORM: Final = Form(torch.uint8, (0,), Box((0,), (0,)), 0)  # of a value whose bytes are not known yet


def form_of(dtype: torch.dtype, shape: tuple[int, ...], box: Box, requires_grad: bool = False) -> Form:
    """The form of a box of a tensor, stored as it is; raises if the dtype cannot be stored.

    >>> form_of(torch.float16, (4, 3), Box((2, 0), (2, 3))).nbytes
    12
    """
    dtype_name(dtype)
    block = block_of(box.lengths, dtype.itemsize)
    return Form(dtype, shape, box, box.numel * dtype.itemsize, block, requires_grad=requires_grad)


class Row(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A box of a tensor, or with a kind other than TENSOR the bytes of another value, and what has its data.

    `value` is the tensor of the box, or the value's bytes, also as `ObjectBytes`; for a planner's own data it is
    `source`, which returns the tensor. `holders` are the ranks of the group that hold the same (None: unknown). `key`
    tells the rows of a rank apart; `tied` is the key of an earlier row whose data is the same memory.
    """

    name: str
    form: Form
    value: Any = None
    kind: int = TENSOR
    holders: tuple[int, ...] | None = None
    key: Hashable = None
    tied: Hashable = None
    source: Callable[[], Any] | None = None

    @property
    def entry(self) -> TensorEntry:
        """What tables say of the tensor."""
        return TensorEntry(self.name, dtype_name(self.form.dtype), self.form.shape, self.kind)

    def data(self) -> Any:
        """The tensor, or the bytes of another value."""
        if self.source is not None:
            return self.source()
        return self.value.encoded() if isinstance(self.value, ObjectBytes) else self.value

    def tensor(self) -> torch.Tensor:
        """The tensor; raises if it is not what the form says."""
        data = self.data()
        if isinstance(data, torch.Tensor) and data.dtype == self.form.dtype and data.shape == self.form.box.lengths:
            return data
        got = (
            f"a {data.dtype} tensor of shape {tuple(data.shape)}"
            if isinstance(data, torch.Tensor)
            else type(data).__name__
        )
        raise CheckpointError(
            f"{self.name!r}: the plan promised a {self.form.dtype} tensor of shape {self.form.box.lengths}, but the "
            f"planner's resolve_data gave {got}; a planner that converts data must change the items of its plan as well"
        )

    def cut(self, part: Box) -> Row:
        """The row of a part of a tensor's box, which is relative to it."""
        form, data = self.form, self.data
        box = part.shifted(form.box.offsets)
        smaller = msgspec.structs.replace(form, box=box, nbytes=box.numel * form.dtype.itemsize)
        return msgspec.structs.replace(self, form=smaller, value=None, source=lambda: _sliced(data(), part))


def _sliced(data: Any, part: Box) -> Any:
    return data[part.slices()] if isinstance(data, torch.Tensor) else data


def object_row(
    name: str, kind: int, payload: bytes | ObjectBytes, holders: tuple[int, ...] | None = None, key: Hashable = None
) -> Row:
    """The row of a value that is not a tensor: one-dimensional, of bytes."""
    nbytes = len(payload.encoded() if isinstance(payload, ObjectBytes) else payload)
    return Row(name, Form(torch.uint8, (nbytes,), Box((0,), (nbytes,)), nbytes), payload, kind, holders, key)


class Target(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Memory of the state dict, `box` of the tensor stored as `source`, and the parts of stored chunks that fill it.

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


class ReadPlan(msgspec.Struct, frozen=True):
    """What a rank reads: boxes of tensors, and values that are none, each as its name in the state dict and in the
    checkpoint."""

    targets: Sequence[Target]
    values: Sequence[tuple[str, str]] = ()
