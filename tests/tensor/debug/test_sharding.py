"""Pictures of layouts, against tables drawn by hand and against the parts that ranks really hold."""

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from terrazzo.errors import DTensorError
from terrazzo.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from terrazzo.tensor.debug import sharding_picture, visualize_sharding


def check_pictures():
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    cube = init_device_mesh("cpu", (2, 1, 2))
    uneven = sharding_picture(distribute_tensor(torch.zeros(5), line, [Shard(0)]), "five")
    assert uneven.rows == ((0, 1),) and uneven.columns == ((0, 2), (2, 4), (4, 5))
    assert uneven.cells == {(0, 0): (0,), (0, 1): (1,), (0, 2): (2,)}
    text = str(uneven)
    assert "five" in text and "0-1" in text and "cpu:1" in text and "empty shards on ranks 3" in text
    both = sharding_picture(distribute_tensor(torch.zeros(6, 4), square, [Shard(1), Replicate()]))
    assert both.cells == {(0, 0): (0, 1), (0, 1): (2, 3)} and both.columns == ((0, 2), (2, 4))
    assert "cpu:2, cpu:3" in str(both)
    grid = distribute_tensor(torch.zeros(5, 3), cube, [Shard(1), Shard(0), Shard(0)])
    picture = sharding_picture(grid)
    assert picture.rows == ((0, 3), (3, 5)) and picture.columns == ((0, 2), (2, 3))
    assert picture.cells == {(0, 0): (0,), (0, 1): (2,), (1, 0): (1,), (1, 1): (3,)}
    box = grid._layout.box()
    rank = dist.get_rank()
    (i, j) = next(at for at, ranks in picture.cells.items() if rank in ranks)
    assert (picture.rows[i][0], picture.columns[j][0]) == box.offsets and grid.to_local().shape == box.lengths
    terms = DTensor.from_local(torch.zeros(2, 2), square, [Partial(), Shard(0)])
    assert "sum over a" in str(sharding_picture(terms))
    assert sharding_picture(terms).cells == {(0, 0): (0, 2), (1, 0): (1, 3)}
    scalar = sharding_picture(distribute_tensor(torch.tensor(1.0), line))
    assert scalar.cells == {(0, 0): (0, 1, 2, 3)}
    page = both._repr_html_()
    assert page.count("<td ") == 3 and page.count("hsl(") == 2 and len(set(page.split("hsl(")[1:])) == 2
    with pytest.raises(DTensorError, match="up to 2 dims"):
        visualize_sharding(distribute_tensor(torch.zeros(2, 2, 2), line))


def check_prints(expected):
    import contextlib
    import io

    mesh = init_device_mesh("cpu", (2,))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        visualize_sharding(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]), header="weights")
        visualize_sharding(distribute_tensor(torch.zeros(0, 2), mesh, [Shard(0)]))
    assert out.getvalue() == (expected if dist.get_rank() == 0 else ""), out.getvalue()


def test_pictures():
    run_ranks(4, check_pictures)


def test_printed_once():
    run_ranks(2, check_prints, TABLE)


TABLE = """\
weights
┏━━━━━┳━━━━━━━┓
┃     ┃ 0-1   ┃
┡━━━━━╇━━━━━━━┩
│ 0-1 │ cpu:0 │
├─────┼───────┤
│ 2   │ cpu:1 │
└─────┴───────┘
shape [3, 2], mesh [2], 0: S(0)
"""


def check_notebook():
    import sys
    from types import ModuleType, SimpleNamespace

    mesh = init_device_mesh("cpu", (2,))
    shown = []
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    display.display = shown.append
    sys.modules |= {"IPython": ipython, "IPython.display": display}
    try:
        visualize_sharding(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]), header="<w>")
    finally:
        del sys.modules["IPython"], sys.modules["IPython.display"]
    pages = [picture._repr_html_() for picture in shown]
    assert len(pages) == (1 if dist.get_rank() == 0 else 0) and all("&lt;w&gt;" in page for page in pages)


def test_notebook():
    run_ranks(2, check_notebook)
