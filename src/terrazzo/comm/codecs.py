"""How tensors are sent in fewer bytes: values of 8 or 4 bits, and scales that several values share.

A codec turns a tensor into *parts*, tensors of bytes. Values share a scale within the last dim only, in blocks or a
whole row, and every part is cut along the dim along which the tensor is: so the parts of a rank's chunk are that rank's
chunks of the parts, and what is decoded does not depend on the number of ranks. Where the last dim is cut, each rank's
chunk is encoded by itself (`terrazzo.comm.encoded`): its first block begins where the chunk does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from terrazzo.comm.flat import Shape
from terrazzo.layout.drawing import ShownAsCall

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INF = float("inf")


class Codec(ShownAsCall, ABC):
    """How a tensor is sent. Equal codecs compare equal, and have the same hash."""

    @abstractmethod
    def size(self, shape: Shape) -> list[Shape]:
        """The shapes of the parts of a tensor of this shape; the size of a part is its bytes.

        A part has the tensor's dims except the last, and one or more instead of that.
        """

    @abstractmethod
    def encode(self, values: Tensor) -> list[Tensor]:
        """The parts (uint8) of a tensor. If its last dim is cut, it is called with chunks of that, padded with zeros to
        the longest; they and the parts may have further dims in front."""

    @abstractmethod
    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out`, of any floating-point dtype, from the parts; both may have further dims in front."""

    def refuses(self, shape: Shape, dtype: torch.dtype, dim: int, n: int) -> str:
        """What is allowed instead, if a tensor of this shape and dtype that is cut along `dim` into `n` chunks cannot
        be encoded; else empty."""
        return "" if dtype in _FLOATS else "it encodes float32, bfloat16 and float16"


@dataclass(frozen=True, slots=True)
class Plain(Codec):
    """The values themselves, in a dtype."""

    dtype: torch.dtype

    def size(self, shape: Shape) -> list[Shape]:
        return [(*shape, self.dtype.itemsize)]

    def encode(self, values: Tensor) -> list[Tensor]:
        return [values.to(self.dtype).contiguous().unsqueeze(-1).view(torch.uint8)]

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(_as(parts[0], self.dtype).squeeze(-1))

    def refuses(self, shape: Shape, dtype: torch.dtype, dim: int, n: int) -> str:
        return ""


class _Blocks(Codec):
    """Values of one dtype, in blocks of the last dim that have a scale each. The last block may be shorter."""

    block: int | None  # None: the whole row
    values: torch.dtype
    largest: float  # of the values
    scales: torch.dtype

    def size(self, shape: Shape) -> list[Shape]:
        blocks = -(-shape[-1] // self._block(shape))
        return [tuple(shape), (*shape[:-1], blocks, self.scales.itemsize)]

    def encode(self, values: Tensor) -> list[Tensor]:
        if not values.numel():
            return [values.new_empty(shape, dtype=torch.uint8) for shape in self.size(values.shape)]
        blocks = _blocks(values, self._block(values.shape))
        scale = self._scale(torch.cat([_largest(block) for block in blocks], -2))
        found = torch.empty(values.shape, dtype=self.values, device=values.device)
        outs = _blocks(found, self._block(values.shape))
        for block, out, own in zip(blocks, outs, _split_like(blocks, scale), strict=True):
            quotient = block / own.float()
            out.copy_(quotient.round_() if self.values is torch.int8 else quotient)
        return [found.view(torch.uint8), scale.view(torch.uint8)]

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        if not out.numel():
            return
        values, scale = parts[0].view(self.values), _as(parts[1], self.scales).float()
        blocks, outs = (_blocks(x, self._block(out.shape)) for x in (values, out))
        for block, into, own in zip(blocks, outs, _split_like(blocks, scale), strict=True):
            into.copy_(block)  # exactly, and rounded once by the product, which is computed in single precision
            into.mul_(own)

    def _block(self, shape: Shape) -> int:
        return self.block or max(1, shape[-1])

    def _scale(self, largest: Tensor) -> Tensor:
        """The scales of blocks whose largest absolute values are given, in their dtype."""
        scale = largest / self.largest
        return torch.where(scale == 0, 1.0, scale)


@dataclass(frozen=True)
class Int8Blocks(_Blocks):
    """Blocks of int8 with a float32 scale each. An error is at most 1/254 of the largest value in the block."""

    block: int = 256
    values, largest, scales = torch.int8, 127.0, torch.float32


@dataclass(frozen=True)
class Float8Rows(_Blocks):
    """Rows of float8 (e4m3) with a float32 scale each. An error is at most 1/16 of the value, except of values less
    than 1/28,000 of the largest in the row."""

    block = None
    values, largest, scales = torch.float8_e4m3fn, 448.0, torch.float32


@dataclass(frozen=True)
class MXFP8(_Blocks):
    """Blocks of 32 values of float8 (e4m3), with a power of two as scale, in one byte."""

    block = 32
    values, largest, scales = torch.float8_e4m3fn, 448.0, torch.float8_e8m0fnu

    def _scale(self, largest: Tensor) -> Tensor:
        half, exponent = torch.frexp(largest / self.largest)  # the least power that is not less
        exponent = torch.where(half == 0.5, exponent - 1, exponent).add_(127).clamp_(0, 254)
        return torch.where(largest.isfinite(), exponent, 255).to(torch.uint8).view(self.scales)


@dataclass(frozen=True)
class NVFP4(_Blocks):
    """Blocks of 16 values of 4 bits (e2m1, two in a byte as in `torch.float4_e2m1fn_x2`), with a float8 scale each.

    The second scale, in float32, is that of a row and not of the tensor, so that no rank needs to know other ranks'
    rows.
    """

    block = 16
    values, largest, scales = torch.uint8, 6.0, torch.float8_e4m3fn

    def size(self, shape: Shape) -> list[Shape]:
        return [(*shape[:-1], -(-shape[-1] // 2)), super().size(shape)[1], (*shape[:-1], 1, 4)]

    def encode(self, values: Tensor) -> list[Tensor]:
        if not values.numel():
            return [values.new_empty(shape, dtype=torch.uint8) for shape in self.size(values.shape)]
        blocks = _blocks(values, self.block)
        largest = torch.cat([_largest(block) for block in blocks], -2)
        row = largest.amax(-2, keepdim=True) / (self.largest * 448)
        row = torch.where(row == 0, 1.0, row)
        scale = (largest / self.largest / row).to(self.scales)
        codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
        for block, out, own in zip(blocks, _blocks(codes, self.block), _split_like(blocks, scale), strict=True):
            divisor = own.float() * row
            quotient = block / torch.where(divisor == 0, 1.0, divisor)
            out.copy_(torch.bucketize(quotient.abs(), _bounds(values.device), out_int32=True))
            out.add_(quotient.signbit(), alpha=8)
        pairs = codes[..., 0::2].clone()
        pairs[..., : values.shape[-1] // 2].add_(codes[..., 1::2], alpha=16)
        return [pairs, scale.view(torch.uint8), row.view(torch.uint8)]

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        if not out.numel():
            return
        scale = _as(parts[1], self.scales).float() * _as(parts[2], torch.float32)
        out.copy_(torch.nn.functional.embedding(parts[0].int(), _pairs(out.device)).flatten(-2)[..., : out.shape[-1]])
        outs = _blocks(out, self.block)
        for into, own in zip(outs, _split_like(outs, scale), strict=True):
            into.mul_(own)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def _bounds(device: torch.device) -> Tensor:
    """The largest numbers that are rounded to each value of 4 bits but the last; halves are rounded to even codes."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device="cpu")
    middle[1::2] = torch.nextafter(middle[1::2], torch.zeros(3, device="cpu"))
    return middle.to(device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two values of each byte."""
    values = [*_E2M1, *(-x for x in _E2M1)]
    return torch.tensor([[values[byte % 16], values[byte // 16]] for byte in range(256)], device="cpu").to(device)


def _blocks(x: Tensor, block: int) -> list[Tensor]:
    """The last dim in blocks: one view of all whole ones, and one of a shorter one at the end."""
    width = x.shape[-1]
    whole = width - width % block
    views = [x.narrow(-1, 0, whole).unflatten(-1, (whole // block, block))] if whole else []
    return [*views, x.narrow(-1, whole, width - whole).unsqueeze(-2)] if width > whole else views


def _split_like(blocks: Sequence[Tensor], scales: Tensor) -> Sequence[Tensor]:
    """The scales of the blocks in each of these views."""
    return scales.split([view.shape[-2] for view in blocks], -2)


def _largest(block: Tensor) -> Tensor:
    """The largest absolute value of each block, NaN if there is one."""
    return torch.linalg.vector_norm(block, _INF, -1, keepdim=True, dtype=torch.float32)


def _as(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as another dtype, from wherever they lie."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)


__all__ = ["MXFP8", "NVFP4", "Codec", "Float8Rows", "Int8Blocks", "Plain"]
