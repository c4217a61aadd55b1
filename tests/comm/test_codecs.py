"""Codecs against plain loops over numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from terrazzo.comm.codecs import MXFP8, NVFP4, Codec, Float8Rows, Int8Blocks, Plain

CODECS = [Int8Blocks(), Int8Blocks(block=32), Float8Rows(), MXFP8(), NVFP4()]
LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def there_and_back(codec: Codec, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    parts = codec.encode(values)
    assert [part.dtype for part in parts] == [torch.uint8] * len(parts)
    assert [tuple(part.shape) for part in parts] == [tuple(shape) for shape in codec.size(tuple(values.shape))]
    found = torch.full(values.shape, 7.0, dtype=dtype)
    codec.decode(parts, found)
    return found


def nearest(values: list[float], codes: list[float]) -> list[float]:
    """The nearest of the codes; of two that are as near the one with the even place."""
    found = []
    for x in values:
        best = min(range(len(codes)), key=lambda i: (abs(abs(x) - codes[i]), i % 2))
        found.append(math.copysign(codes[best], x))
    return found


def float8(x: float) -> float:
    return float(torch.tensor(x).to(torch.float8_e4m3fn))


def by_hand(codec: Codec, row: list[float]) -> list[float]:
    """What a row of numbers is after encoding and decoding, in double precision."""
    if isinstance(codec, Float8Rows):
        scale = max(map(abs, row)) / 448 or 1.0
        return [float8(x / scale) * scale for x in row]
    found: list[float] = []
    for start in range(0, len(row), codec.block):
        block = row[start : start + codec.block]
        largest = max(map(abs, block))
        if isinstance(codec, Int8Blocks):
            scale = largest / 127 or 1.0
            found += [round(x / scale) * scale for x in block]
        elif isinstance(codec, MXFP8):
            scale = 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 1.0
            found += [float8(x / scale) * scale for x in block]
        else:
            of_row = max(map(abs, row)) / 6 / 448 or 1.0
            scale = float8(largest / 6 / of_row) * of_row or 1.0
            found += [x * scale for x in nearest([x / scale for x in block], LEVELS)]
    return found


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_values_are_those_of_a_loop_over_numbers(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 5, 70, generator=generator) * torch.logspace(-3, 3, 5)[:, None]
    values[0, 1, :40] = 0
    values[1, 2, 40:] = 0
    values[1, 3] = 0
    found = there_and_back(codec, values)
    wanted = torch.tensor([[by_hand(codec, row.tolist()) for row in matrix] for matrix in values])
    # In single precision a quotient may be rounded to the next value, where two are as near.
    off = ~torch.isclose(found, wanted, rtol=1e-5, atol=0)
    assert off.float().mean() < 0.005
    assert ((found - values).abs() <= (wanted - values).abs() * 1.001 + 1e-7 * values.abs()).all()
    half = there_and_back(codec, values.bfloat16(), torch.bfloat16)
    torch.testing.assert_close(half, there_and_back(codec, values.bfloat16()).bfloat16(), rtol=0, atol=0)
    for shape in ((0, 8), (4, 0), (3, 2), (2, 3, 33), (4, 1)):
        few = torch.randn(shape, generator=generator)
        torch.testing.assert_close(there_and_back(codec, few), few, rtol=0.3, atol=0.3)


@pytest.mark.parametrize("codec", [*CODECS, Plain(torch.bfloat16)], ids=str)
def test_what_is_not_finite_stays_so(codec: Codec) -> None:
    """Loss scalers and checks for overflows see it."""
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
        values[1, 5] = bad
        found = there_and_back(codec, values)
        assert not found[1, 5].isfinite() and found[0].isfinite().all() and found[2].isfinite().all()


def test_sizes() -> None:
    sizes = {codec: sum(math.prod(shape) for shape in codec.size((64, 512))) for codec in CODECS}
    rows, values = 64, 64 * 512
    assert list(sizes.values()) == [
        values + values // 256 * 4,
        values + values // 32 * 4,
        values + rows * 4,
        values + values // 32,
        values // 2 + values // 16 + rows * 4,
    ]


def test_what_cannot_be_encoded() -> None:
    for codec in CODECS:
        assert not codec.refuses((8, 512), torch.float32, 0, 4)
        assert "float32, bfloat16 and float16" in codec.refuses((8, 512), torch.int64, 0, 4)
