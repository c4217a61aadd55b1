"""Weights in float8, in blocks that share a scale, as DeepSeek publishes them: `w` and `w_scale_inv` give numbers.

number = w * w_scale_inv of its block
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import torch

from terrazzo.checkpoint.metadata import TensorStorageMetadata
from terrazzo.checkpoint.native.datafile import row_major_windows
from terrazzo.checkpoint.stores import SMALL, Store
from terrazzo.errors import CheckpointCorruptError
from terrazzo.layout.box import Box

_SCALE: Final = "_scale_inv"
_WINDOW: Final = 1 << 21  # elements that are held as float32 at once
_FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight whose blocks have scales."""

    name: str
    scale: str
    blocks: tuple[int, int]


def find_quantised(
    entries: Mapping[str, TensorStorageMetadata], store: Store, block: int, where: str
) -> dict[str, Quantised]:
    """The quantised weights among the tensors of a checkpoint."""
    found = {}
    blocks: tuple[int, int] | None = None
    for scale, about in entries.items():
        name = scale.removesuffix(_SCALE)
        weight = entries.get(name)
        if name == scale or weight is None or weight.properties.dtype not in _FLOAT8:
            continue
        blocks = blocks or _block_size(store, block)
        expected = [-(-length // each) for length, each in zip(weight.size, blocks, strict=False)]
        if len(weight.size) != 2 or list(about.size) != expected:
            raise CheckpointCorruptError(
                f"{where}: {scale!r} has the shape {list(about.size)}; for {name!r} of the shape {list(weight.size)} "
                f"in blocks of {blocks[0]} x {blocks[1]} it should be {expected}"
            )
        found[name] = Quantised(name, scale, blocks)
    return found


def dequantised(
    weight: Quantised,
    box: Box,
    target: torch.Tensor,
    dtype: torch.dtype,
    read: Callable[[str, Box], torch.Tensor],
) -> None:
    """Fill `target` with a box of a weight, rounded to `dtype`; `read` gives boxes of what is stored."""
    for window in row_major_windows(box.lengths, _WINDOW):
        part = window.shifted(box.offsets)
        values = read(weight.name, part).to(torch.float32)
        spans = [
            (start // each, (start + length - 1) // each + 1)
            for start, length, each in zip(part.offsets, part.lengths, weight.blocks, strict=True)
        ]
        first = tuple(low for low, _ in spans)
        scales = read(weight.scale, Box(first, tuple(high - low for low, high in spans))).to(torch.float32)
        for dim, (start, length, each) in enumerate(zip(part.offsets, part.lengths, weight.blocks, strict=True)):
            scales = scales.index_select(dim, torch.arange(start, start + length, device="cpu") // each - first[dim])
        target[window.slices()].copy_(values.mul_(scales).to(dtype))


def _block_size(store: Store, block: int) -> tuple[int, int]:
    """The blocks that the model's config tells of, or else square ones."""
    try:
        config = msgspec.json.decode(store.get("config.json", SMALL)[0], type=_Config)
    except (FileNotFoundError, ValueError, RecursionError):
        return block, block
    blocks = config.quantization_config.weight_block_size
    return blocks if min(blocks) > 0 else (block, block)


class _Quantisation(msgspec.Struct):
    weight_block_size: tuple[int, int]


class _Config(msgspec.Struct):
    quantization_config: _Quantisation
