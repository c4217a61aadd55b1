"""The page's data for a layout, whose ranks need not exist: which part of a tensor each rank of a mesh holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from terrazzo.errors import LayoutError
from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.layout.drawing import caption_of
from terrazzo.layout.placement import CUTS

MOST_RANKS: Final = 1 << 16


@dataclass(frozen=True)
class SketchedMesh:
    """The part of a mesh's interface that a layout needs. Its ranks need not exist.

    >>> SketchedMesh((64, 8), ("dp", "tp")).size
    512
    """

    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.shape)

    def get_coordinate(self) -> tuple[int, ...]:
        """The coordinate of the first rank."""
        return (0,) * len(self.shape)


def mesh_of(text: str) -> SketchedMesh:
    """The mesh from a text such as `dp=64,tp=8`, or sizes alone.

    >>> mesh_of("dp=64,tp=8")
    SketchedMesh(shape=(64, 8), mesh_dim_names=('dp', 'tp'))
    >>> mesh_of("4,2").mesh_dim_names
    ('0', '1')
    """
    names, shape = [], []
    for number, part in enumerate(text.split(",")):
        match = re.fullmatch(r"\s*(?:([^=,]+?)\s*=\s*)?(\d{1,9})\s*", part)
        if match is None or int(match[2]) < 1:
            raise LayoutError(f"{part!r} is not a dim of a mesh: write dp=64,tp=8, or only sizes as in 64,8")
        names.append(match[1] or str(number))
        shape.append(int(match[2]))
    if len(set(names)) < len(names):
        raise LayoutError(f"{text!r} names a dim of the mesh twice")
    if prod(shape) > MOST_RANKS:
        raise LayoutError(f"a mesh of {prod(shape)} ranks is too large to draw: use at most {MOST_RANKS}")
    return SketchedMesh(tuple(shape), tuple(names))


def placements_of(text: str) -> tuple[Placement, ...]:
    """The placements from a text such as `S(0),R,P(sum)`.

    >>> placements_of("S(0), R, P, Shard(1), P(max)")
    (Shard(dim=0), Replicate(), Partial(sum), Shard(dim=1), Partial(max))
    """
    return tuple(_placement(part.strip()) for part in text.split(","))


def _placement(text: str) -> Placement:
    if match := re.fullmatch(r"S(?:hard)?\((?:dim=)?(-?\d{1,4})\)", text):
        return Shard(int(match[1]))
    if re.fullmatch(r"R|Replicate\(\)", text):
        return Replicate()
    if match := re.fullmatch(r"P(?:artial)?(?:\((\w*)\))?", text):
        return Partial(match[1] or "sum")
    raise LayoutError(f"{text!r} is not a placement: write S(dim) for Shard, R for Replicate, P or P(op) for Partial")


def shape_of(text: str) -> tuple[int, ...]:
    """The shape from a text.

    >>> shape_of("4096, 128"), shape_of("")
    ((4096, 128), ())
    """
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(re.fullmatch(r"\d{1,18}", part) for part in parts):
        raise LayoutError(f"{text!r} is not a shape: write sizes, for instance 4096,128")
    return tuple(map(int, parts))


def layout_data(
    layout: Layout, *, ranks: Sequence[int] | None = None, itemsize: int = 0, title: str = ""
) -> dict[str, Any]:
    """The page's data for a layout.

    Args:
        layout: a layout on any mesh.
        ranks: the mesh's ranks, row-major; None: 0, 1, 2, ...
        itemsize: the bytes of an element; 0 if unknown.
        title: the title of the page.

    >>> data = layout_data(Layout.of(SketchedMesh((2, 2)), [Shard(0), Replicate()], (5,)))
    >>> data["grid"], data["elements"]
    ({'shape': [5], 'starts': [[0, 3]], 'holders': [[0, 1], [2, 3]]}, [3, 3, 2, 2])
    """
    if prod(layout.mesh_shape) > MOST_RANKS:
        raise LayoutError(f"a mesh of {prod(layout.mesh_shape)} ranks is too large to draw")
    boxes = layout.boxes(ranks)
    grid = layout.grid(ranks)
    names = getattr(layout.mesh, "mesh_dim_names", None) or [str(m) for m in range(len(layout.mesh_shape))]
    idle = [rank for rank, box in boxes.items() if box.is_empty]
    return {
        "kind_of_page": "layout",
        "title": title or "layout",
        "mesh": [[name, size] for name, size in zip(names, layout.mesh_shape, strict=True)],
        "ranks": list(boxes),
        "placements": [str(placement) for placement in layout.placements],
        "cut": [placement.dim if isinstance(placement, CUTS) else None for placement in layout.placements],
        "itemsize": itemsize,
        "caption": caption_of(layout.shape, layout.mesh_shape, names, layout.placements, idle),
        "elements": [box.numel for box in boxes.values()],
        "grid": {
            "shape": list(grid.shape),
            "starts": [list(starts) for starts in grid.starts],
            "holders": [list(ranks) for ranks in grid.holders],
        },
    }
