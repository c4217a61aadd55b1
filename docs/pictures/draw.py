"""Draws the pictures of the documentation: `python docs/pictures/draw.py`; `--check` says which are out of date.

What a rank holds is asked of `terrazzo.layout`, and what a step does of `terrazzo.fsdp.explain`: a picture cannot say
something else than the library does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from terrazzo.fsdp import explain, fully_shard
from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard

FOLDER = Path(__file__).parent
RANK_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
GREY, LIGHT, INK = "#8a8f98", "#e8eaee", "#24292f"


@dataclass
class Picture:
    """Shapes on a white ground, as SVG."""

    width: int
    height: int
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, fill: str, edge: str = "white", dash: str = "") -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{edge}"{dashes}/>'
        )

    def text(self, x: float, y: float, words: str, size: int = 13, anchor: str = "middle", fill: str = INK) -> None:
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="sans-serif">\n'
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" fill="white"/>\n'
        )
        return head + "\n".join(self.shapes) + "\n</svg>\n"


@dataclass(frozen=True)
class Mesh:
    """As much of a mesh as a layout asks for."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate


# ------------------------------------------------------------------ who holds what


def layouts() -> Picture:
    """A 6 x 6 tensor on four ranks, in several layouts; each rank's part in its colour."""
    shown: list[tuple[str, tuple[int, ...], tuple[Placement, ...]]] = [
        ("[Shard(0)] on 4", (4,), (Shard(0),)),
        ("[Shard(1)] on 4", (4,), (Shard(1),)),
        ("[Replicate()] on 4", (4,), (Replicate(),)),
        ("[Shard(0), Shard(1)] on 2 x 2", (2, 2), (Shard(0), Shard(1))),
        ("[Replicate(), Shard(0)] on 2 x 2", (2, 2), (Replicate(), Shard(0))),
        ("[Shard(0), Shard(0)] on 2 x 2", (2, 2), (Shard(0), Shard(0))),
    ]
    cell, gap = 11, 10
    picture = Picture(3 * 4 * (6 * cell + gap) + 60, 2 * 150 + 10)
    for number, (title, mesh_shape, placements) in enumerate(shown):
        left = 20 + (number % 3) * (4 * (6 * cell + gap) + 15)
        top = 20 + (number // 3) * 150
        picture.text(left, top + 10, title, anchor="start")
        for rank in range(4):
            coordinate = (rank,) if len(mesh_shape) == 1 else (rank // 2, rank % 2)
            held = Layout.of(Mesh(mesh_shape, coordinate), placements, (6, 6)).box()
            x, y = left + rank * (6 * cell + gap), top + 24
            picture.box(x, y, 6 * cell, 6 * cell, LIGHT)
            (row, column), (rows, columns) = held.offsets, held.lengths
            picture.box(x + column * cell, y + row * cell, columns * cell, rows * cell, RANK_COLOURS[rank])
            picture.text(x + 3 * cell, y + 6 * cell + 16, f"rank {rank}", 11, fill=GREY)
    return picture


# ------------------------------------------------------------------ gradients of placements


def gradients() -> Picture:
    """How the gradient of a tensor is placed, and what that costs."""
    rows = [(placement, _dual(placement)) for placement in (Shard(0), Replicate(), Partial())]
    why = {
        "Shard(dim=0)": ("each rank's shard gets the gradient of that shard:", "nothing is sent"),
        "Replicate()": ("ranks that used it differently sum their gradients:", "one all-reduce"),
        "Partial(sum)": ("the gradient of a sum is that of each of its terms:", "nothing is sent"),
    }
    picture = Picture(780, 60 + 70 * len(rows))
    for x, words in ((90, "the tensor"), (330, "its gradient"), (450, "why")):
        picture.text(x, 24, words, 12, anchor="start" if x == 450 else "middle", fill=GREY)
    for number, (placement, dual) in enumerate(rows):
        y = 44 + 70 * number
        picture.box(20, y, 140, 44, RANK_COLOURS[number], RANK_COLOURS[number])
        picture.text(90, y + 27, repr(placement), fill="white")
        picture.box(260, y, 140, 44, "white", RANK_COLOURS[number])
        picture.text(330, y + 27, repr(dual))
        picture.arrow(164, y + 22, 256, y + 22)
        picture.text(210, y + 16, "backward", 11, fill=GREY)
        for line, words in enumerate(why[repr(placement)]):
            picture.text(420, y + 18 + 17 * line, words, 13, anchor="start")
    return picture


def _dual(placement: Placement) -> Placement:
    found: Placement = Layout.of(Mesh((4,), (0,)), (placement,), (8,)).dual.placements[0]
    return found


# ------------------------------------------------------------------ a step's timeline


def step() -> Picture:
    """The operations of `explain`, each stream in a row of its own, in the order in which the host asks for them."""
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        model = nn.Sequential(*[nn.Linear(1200, 1200, bias=False) for _ in range(3)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        operations = explain(model).operations
    finally:
        torch.distributed.destroy_process_group()
    wanted = {"gather", "use", "reduce", "hand over", "write"}
    shown = [each for each in operations if each.kind.value in wanted and each.unit >= 0]
    shown = [each for each in shown if each.kind.value != "use" or each.reads]  # not what backward writes
    used: set[int] = set()
    rows, width, at, band = {"gather": 60, "compute": 110, "reduce": 160}, 62, 80, 160
    half = (len(shown) + 1) // 2  # in a band below the other, so that words stay readable
    picture = Picture(at + width * half + 20, 60 + 2 * band + 40)
    for down in (0, band):
        for name, y in rows.items():
            picture.text(at - 10, down + y + 5, name, anchor="end")
            picture.box(at, down + y - 18, width * half, 36, "#fafafa", LIGHT)
    numbers = {unit: n for n, unit in enumerate(sorted({each.unit for each in shown}))}
    for n, each in enumerate(shown):
        kind = each.kind.value
        if kind == "use":
            kind = "backward" if each.unit in used else "forward"
            used.add(each.unit)
        elif kind == "hand over":
            kind = "gradient"
        elif kind == "write":
            kind = "optimizer"
        x, y = at + n % half * width, n // half * band + rows[each.stream.value] - 16
        picture.box(x + 1, y, width - 2, 32, RANK_COLOURS[numbers[each.unit]])
        picture.text(x + width / 2, y + 20, kind, 12, fill="white")
    for n, unit in enumerate(numbers.values()):
        picture.box(at + n * 130, 2 * band + 50, 14, 14, RANK_COLOURS[unit])
        picture.text(at + n * 130 + 20, 2 * band + 62, f"layer {unit}", anchor="start")
    picture.text(at, 26, "a step of three sharded layers, in the order in which the host asks for it", anchor="start")
    return picture


# ------------------------------------------------------------------ how a checkpoint is committed


def commit() -> Picture:
    """What lies in the folder at each moment of a save over an older checkpoint."""
    moments: Sequence[tuple[str, tuple[str, ...], str]] = (
        ("before", ("manifest -> old", "old data files"), "the old one"),
        ("ranks write", ("manifest -> old", "old data files", "lease", "new data files, half"), "the old one"),
        ("durable", ("manifest -> old", "old data files", "lease", "new data files", "manifest .tmp"), "the old one"),
        ("rename: the commit", ("manifest -> new", "old data files", "lease", "new data files"), "the new one"),
        ("cleaned", ("manifest -> new", "new data files"), "the new one"),
    )  # fmt: skip
    picture = Picture(40 + 190 * len(moments), 280)
    for n, (title, files, killed) in enumerate(moments):
        x = 20 + 190 * n
        picture.text(x + 85, 24, title)
        picture.box(x, 36, 170, 170, "white", GREY)
        for row, name in enumerate(files):
            new, half = "new" in name or "tmp" in name, "half" in name or "tmp" in name
            colour = RANK_COLOURS[1] if new else GREY if name == "lease" else RANK_COLOURS[0]
            picture.box(x + 10, 46 + 31 * row, 150, 25, "white" if half else colour, colour, "4 3" if half else "")
            picture.text(x + 85, 63 + 31 * row, name, 12, fill=INK if half else "white")
        picture.text(x + 85, 232, "killed here, a reader finds", 11, fill=GREY)
        picture.text(x + 85, 250, killed, 12)
        if n:
            picture.arrow(x - 18, 120, x - 2, 120)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "layouts": layouts,
    "gradients": gradients,
    "step": step,
    "commit": commit,
}


def main() -> int:
    """Write the files, or compare with them."""
    stale = []
    for name, draw in PICTURES.items():
        path, text = FOLDER / f"{name}.svg", draw().svg()
        if "--check" in sys.argv and (not path.exists() or path.read_text() != text):
            stale.append(path.name)
        elif "--check" not in sys.argv:
            path.write_text(text)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python docs/pictures/draw.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
