"""Tensors of files as distributed tensors (`ChunkedTensor`) whose chunks are views of the model's own memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from terrazzo.checkpoint.plan.sharded import ChunkedTensor, Holders, ShardView, ShardViews, local_chunks
from terrazzo.integrations.huggingface.rename import file_shape
from terrazzo.layout.box import Box, Link


@torch.no_grad()
def views_of(links: Sequence[Link], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The files' tensors, made from the model's, by name; a plain tensor that corresponds one to one is used as is."""
    by_file: dict[str, list[Link]] = {}
    for link in links:
        by_file.setdefault(link.file, []).append(link)
    viewer = ShardViews()
    seen: dict[str, ShardView] = {}
    views: dict[str, Any] = {}
    for file, parts in by_file.items():
        chunks: dict[tuple[int, ...], tuple[Box, torch.Tensor]] = {}
        holders: list[Holders | None] = []
        for link in parts:
            if link.model not in seen:
                seen[link.model] = local_chunks(link.model, tensors[link.model], viewer.view)
            view = seen[link.model]
            holders.append(view.holders)
            for box, data in view.chunks:
                common = box.intersect(link.model_box)
                if common is None:
                    continue
                part = data[common.relative_to(box).slices()]
                place = link.in_file(common)
                chunks[place.offsets] = (
                    place,
                    part.view(place.lengths) if part.is_contiguous() else _fitted(part, place),
                )
        same = all(each is not None and each == holders[0] for each in holders)
        size = torch.Size(file_shape(parts))
        views[file] = ChunkedTensor(size, tensors[parts[0].model].dtype, chunks, holders[0] if same else None)
    return views


def _fitted(part: torch.Tensor, place: Box) -> torch.Tensor:
    """A view with one dim more or less in front, if the file's tensor differs in that."""
    if part.ndim > place.ndim:
        return part.squeeze(0)
    return part.unsqueeze(0) if part.ndim < place.ndim else part
