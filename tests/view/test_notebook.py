"""What a notebook shows of objects: tables without a script, with every name as text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import terrazzo
from ranks import run_ranks
from terrazzo.checkpoint import Checkpoint, CheckpointManager, save
from terrazzo.checkpoint.stores import LocalStore
from terrazzo.engine import initialize
from terrazzo.errors import ViewError
from terrazzo.fsdp import explain, fully_shard, report, trace
from terrazzo.layout import Layout, Partial, Replicate, Shard
from terrazzo.layout.drawing import hue_of
from terrazzo.tensor import distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.testing import check_rule
from terrazzo.view import page_of
from terrazzo.view.data.layout_data import SketchedMesh
from view.samples import HOSTILE, save_hostile


class Cells(HTMLParser):
    """The texts of a table's cells, by row; and all tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def test_a_layout():
    layout = Layout.of(SketchedMesh((2, 3), ("dp", "tp")), [Shard(0), Replicate()], (5, 4))
    cells = Cells(layout._repr_html_())
    assert cells.rows[:3] == [["", "all"], ["0-2", "0-2"], ["3-4", "3-5"]], "rows are below one another"
    assert "dp: S(0), tp: R" in cells.rows[3][0] and "script" not in cells.tags


def test_a_layout_of_three_dims():
    layout = Layout.of(SketchedMesh((2, 2, 2)), [Shard(2), Shard(0), Shard(1)], (4, 2, 6))
    cells = Cells(layout._repr_html_())
    assert cells.rows[0] == ["", "0-2", "3-5"]
    assert cells.rows[1:5] == [
        ["0-1 x 0", "0", "4"],
        ["0-1 x 1", "1", "5"],
        ["2-3 x 0", "2", "6"],
        ["2-3 x 1", "3", "7"],
    ]


def test_layouts_without_cells_or_with_too_many():
    assert "shape [0, 2]" in Layout.of(SketchedMesh((2,)), [Shard(0)], (0, 2))._repr_html_()
    many = Layout.of(SketchedMesh((128, 64)), [Shard(0), Shard(1)], (128, 64))._repr_html_()
    assert "8192 cells, which are not drawn" in many and len(many) < 1000
    assert Cells(Layout.of(SketchedMesh((4,)), [Partial()], ())._repr_html_()).rows[1] == ["", "0-3"]


def check_dtensor() -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1), Replicate()])
    part = distribute_tensor(torch.zeros(4), mesh["dp"], [Shard(0)])
    return tensor._repr_html_(), part._repr_html_()


def test_a_dtensor():
    for rank, (whole, part) in enumerate(run_ranks(4, check_dtensor)):
        assert Cells(whole).rows[:2] == [["", "0-2", "3-5"], ["", "cpu 0-1", "cpu 2-3"]]
        assert whole.count(f"hsl({hue_of(0)},") == whole.count(f"hsl({hue_of(1)},") == 1
        own = [rank % 2, rank % 2 + 2]
        assert Cells(part).rows[1] == ["", *(f"cpu {each}" for each in own)], "ranks have their global numbers"


def test_a_checkpoint(tmp_path):
    save({"w": torch.zeros(3, 4), "step": 7, **{f"t.{i}": torch.ones(()) for i in range(60)}}, checkpoint_id=tmp_path)
    cells = Cells(Checkpoint(tmp_path)._repr_html_())
    assert cells.rows[0] == ["name", "dtype", "shape", "bytes", "parts"] and len(cells.rows) == 52
    assert cells.rows[1] == ["step", "object", "", "", ""] and cells.rows[2] == ["t.0", "float32", "scalar", "4", "1"]
    assert "62 values (the first 50 are shown), 288 bytes" in cells.rows[-1][0]
    assert repr(Checkpoint(tmp_path).metadata) == f"<Metadata of 62 values at {tmp_path}>"
    assert repr(Checkpoint(tmp_path)) == f"<Checkpoint {tmp_path}: 62 values, 288 bytes>"
    assert repr(Checkpoint(LocalStore(tmp_path))) == f"<Checkpoint LocalStore({str(tmp_path)!r}): 62 values, 288 bytes>"


def test_hostile_names(tmp_path):
    save_hostile(tmp_path / "hostile")
    cells = Cells(Checkpoint(tmp_path / "hostile")._repr_html_())
    assert set(HOSTILE) <= {row[0] for row in cells.rows}
    assert set(cells.tags) <= {"table", "caption", "tr", "th", "td", "small"}


def test_a_report():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model[0])
    fully_shard(model)
    said = report(model)
    cells = Cells(said._repr_html_())
    text = [line.split("  ") for line in str(said).splitlines()]
    assert [row[0] for row in cells.rows[:3]] == ["group", "Sequential", "0"]
    shown = [[part.strip() for part in line if part.strip()] for line in text[: len(cells.rows) - 1]]
    assert [[cell for cell in row if cell] for row in cells.rows[: len(shown)]] == shown


def check_texts(folder: str) -> list[tuple[str, str]]:
    model = fully_shard(nn.Linear(4, 2))
    with trace(model) as steps, CommDebugMode() as seen:
        model(torch.ones(1, 4)).sum().backward()
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])
    compiled = terrazzo.compile(lambda t: t + 1, backend="aot_eager")
    compiled(torch.ones(2))
    engine = initialize(nn.Linear(2, 1), config={"train_batch_size": 4, "optimizer": {"type": "AdamW"}})
    with CheckpointManager(folder) as manager:
        manager.save(3, {"w": torch.ones(2)}, {"loss<b>": 0.5})
        manager.wait()
        found = [
            (explain(model), "gather|copy out"),
            (report(model), "peak"),
            (steps, "hand over"),
            (steps.timeline(), r"^Timeline of rank 0 of 1: \d+ operations of 1 groups"),
            (seen, "^CommDebugMode: no communication"),
            (terrazzo.tensor.explain(torch.mm, x, x), "mm, in bytes"),
            (terrazzo.compile_report(compiled), "1 graphs"),
            (check_rule(torch.neg, torch.ones(4)), "right: .*\\nwrong: none"),
            (engine, "^Engine for .*: ZeRO stage 0, torch.float32, after step 0; a step has 4 samples: 4 on each of 1"),
            (manager, r"^CheckpointManager\(.*: 1 checkpoint\n  step 3  20.*  loss<b> 0.5$"),
            (terrazzo.install(), r"^names of PyTorch: \d+ replaced in \d+ modules, \d+ kept"),
        ]
    terrazzo.uninstall()
    for thing, expected in found:
        assert re.search(expected, repr(thing)) and repr(thing) == str(thing), repr(thing)
    return [(type(thing).__name__, thing._repr_html_()) for thing, _ in found]


def test_what_has_a_text_is_shown_as_that_at_a_prompt_and_in_a_notebook(tmp_path):
    (shown,) = run_ranks(1, check_texts, str(tmp_path / "run"))
    for name, html in shown:
        assert html.startswith("<table" if name == "Report" else "<pre"), name
        assert "<b>" not in html and "<script" not in html, name
    assert "loss&lt;b&gt;" in dict(shown)["CheckpointManager"]


def test_a_page_in_a_frame(tmp_path):
    save({"w": torch.zeros(2)}, checkpoint_id=tmp_path)
    page = page_of(Checkpoint(tmp_path), title='"quoted"')
    assert repr(page) == "Page('\"quoted\"')"
    html = page._repr_html_()
    parser = Cells(html)
    assert parser.tags == ["iframe"] and 'sandbox="allow-scripts"' in html and html.count('"') == 6


def test_what_cannot_be_shown(tmp_path):
    save({"w": torch.zeros(2)}, checkpoint_id=tmp_path)
    for things in ((), (3,), (Checkpoint(tmp_path),) * 3, (Checkpoint(tmp_path), 3)):
        with pytest.raises(ViewError):
            page_of(*things)
