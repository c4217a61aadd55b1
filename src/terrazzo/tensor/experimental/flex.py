"""`flex_attention` over sequences that are sharded over ranks, in a block of `context_parallel`.

A score or mask function gets positions in the whole sequence. With "ring" each rank gathers all keys and values,
and has its own queries; with "ulysses" it has all positions of its own heads. A block mask is the whole sequence's, and
is made again for this rank's queries or heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from terrazzo.errors import UnsupportedCallError

_masks: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def moved_functions(
    score_mod: Callable[..., Tensor] | None, block_mask: Any, rows: Tensor | None, heads: tuple[int, int], key: Any
) -> tuple[Callable[..., Tensor] | None, Any]:
    """The score function and the block mask for queries at the positions `rows` (None: all), and for some heads.

    `heads` are the first one and their number; `key` identifies the rows and heads among those of other calls.
    """
    first, count = heads

    def at(i: Tensor) -> Tensor:
        return i if rows is None else rows[i]

    score = score_mod
    if score_mod is not None:
        score = lambda s, b, h, i, j: score_mod(s, b, h + first, at(i), j)  # noqa: E731
    if block_mask is None:
        return score, None
    queries, keys = block_mask.seq_lengths
    if rows is not None and queries != keys:
        raise UnsupportedCallError("flex_attention in context_parallel: the block mask must be of the whole sequence")
    found = _masks.setdefault(block_mask, {})
    if key not in found:
        inner = block_mask.mask_mod
        batch, all_heads = block_mask.kv_num_blocks.shape[:2]
        found[key] = create_block_mask(
            lambda b, h, i, j: inner(b, h + first, at(i), j) if all_heads > 1 else inner(b, h, at(i), j),
            batch if batch > 1 else None,
            count if all_heads > 1 else None,
            queries if rows is None else len(rows),
            keys,
            device=str(block_mask.kv_num_blocks.device),
            BLOCK_SIZE=block_mask.BLOCK_SIZE,
        )
    return score, found[key]


def rows_of(runs: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """The positions in these runs."""
    return torch.cat([torch.arange(start, start + n, device=device) for start, n in runs])
