"""Cells and functions of a notebook on local ranks."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from terrazzo import notebook
from terrazzo.errors import CommError, DTensorError
from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh
from terrazzo.testing import RanksFailed


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    """What IPython is to `notebook`."""
    magics: dict[str, Callable[..., Any]] = {}
    found = types.SimpleNamespace(
        magics=magics, register_magic_function=lambda run, kind, name: magics.update({f"{kind} {name}": run})
    )
    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = lambda: found
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "IPython", ipython)
        found.ranks = notebook.ranks(2)
    yield found
    found.ranks.close()


def test_cells_keep_what_they_define_and_show_each_rank(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cell, ranks = shell.magics["cell ranks"], shell.ranks
    cell("", "import torch\nimport torch.distributed as dist\nx = torch.ones(2) * dist.get_rank()\nprint('line')\nx")
    lines = ["rank 0: line", "rank 0: tensor([0., 0.])", "rank 1: line", "rank 1: tensor([1., 1.])"]
    assert capsys.readouterr().out.splitlines() == lines
    cell("", "dist.all_reduce(x)\nx")
    assert capsys.readouterr().out == "ranks 0-1: tensor([1., 1.])\n"
    factor = 3  # of this function's closure; `x` is that of the cells
    assert ranks(lambda more: (x * factor + more).tolist(), 1) == [[4.0, 4.0]] * 2  # noqa: F821
    assert ranks(lambda: [factor])[1] == [3]
    cell("", "torch.rand(1).item()")
    cell("", "torch.rand(1).item()")
    first, second = capsys.readouterr().out.splitlines()
    assert first != second, "the generators go on"


def test_a_dtensor_of_the_notebook_is_not_one_of_the_ranks(shell: Any) -> None:
    """Of one on 1 rank the other ranks would have nothing; the same the other way."""
    ranks = shell.ranks
    ranks.run("import torch; from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh")
    ranks.run("there = distribute_tensor(torch.ones(8), init_device_mesh('cpu', (2,)), [Shard(0)])")
    with one_rank():
        x = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(RanksFailed, match=r"ranks 0-1 failed") as caught:
            ranks(lambda: x.sum().item())
        said = str(caught.value)
        assert (
            said.count("a DTensor of rank 0 of 1 cannot be unpickled in a world of 2: ") == 1 and "full_tensor" in said
        )
        with pytest.raises(DTensorError, match=r"rank 0 of 2 cannot be unpickled in a world of 1"):
            ranks(lambda: there)  # noqa: F821
        assert ranks(lambda whole: whole.sum().item(), x.full_tensor()) == [8, 8]
    shown = ranks(lambda: there)  # noqa: F821
    assert [each.to_local().tolist() for each in shown] == [[1.0] * 4] * 2 and shown[1].shape == (8,)
    assert ranks(lambda: there.sum().item()) == [8, 8]  # noqa: F821


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A block in a world of 1 rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_name_of_the_notebook_and_of_cells_is_told(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.magics["cell ranks"]("", "import os\nboth, theirs = 'of the cell', 1")
    names = {"__name__": "__main__", "both": "of the notebook", "os": os}
    exec("f = lambda: (os.sep, both, theirs)", names)
    assert shell.ranks(names["f"]) == [(os.sep, "of the notebook", 1)] * 2
    said = "the notebook's both is used, not what a cell has defined here under that name"
    assert capsys.readouterr().out == f"ranks 0-1: {said}\n"


def test_what_ranks_print_is_shown_while_they_run(shell: Any, tmp_path: Path) -> None:
    """The cell ends only once its output was shown: the process that shows it writes the file that ranks wait for."""
    seen = io.StringIO()

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "first line" in text:
                (tmp_path / "shown").touch()
            return seen.write(text)

    waits = f"while not os.path.exists({str(tmp_path / 'shown')!r}): time.sleep(0.05)"
    cell = f"import os, time\nprint('first line')\n{waits}"
    with contextlib.redirect_stdout(Screen()):
        shell.ranks.run(cell + "\nprint('end', end='')")
    assert seen.getvalue() == "ranks 0-1: first line\nranks 0-1: end"


def test_a_script_without_a_main_block_may_use_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from terrazzo import notebook\nworld = notebook.ranks(1)\nprint(world(lambda: 3), __file__)\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(notebook.__file__).parents[1])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout == f"[3] {script}\n", done.stderr


def test_errors_name_the_ranks_and_what_is_lost(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = shell.ranks
    ranks.run("kept = 1")
    with pytest.raises(RanksFailed, match=r"(?s)^ranks 0-1 failed\n.*line 1.*1 / 0.*ZeroDivisionError") as failed:
        ranks.run("1 / 0")
    assert "new ranks" not in str(failed.value) and ranks(lambda: kept) == [1, 1]  # noqa: F821
    with pytest.raises(RanksFailed, match=r"(?s)^rank 1 exited with status 3.*The next call starts new ranks"):
        ranks.run("import os, torch.distributed as dist\nif dist.get_rank() == 1: os._exit(3)")
    assert repr(ranks) == "<ranks(2)>"
    with pytest.raises(RanksFailed, match="NameError"):
        ranks.run("kept")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CommError, match=r"install cloudpickle \(pip install 'terrazzo\[notebook\]'"):
        ranks(lambda: 1)
    with pytest.raises(ValueError, match="number must be at least 1, not 0"):
        notebook.ranks(0)


def test_new_ranks_say_what_became_of_the_old_ones(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    ranks = notebook.ranks(1)
    ranks.run("kept = 1")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(notebook.World, "call", interrupted)
        ranks.run("kept")
    ranks.run("'kept' in globals()")
    said = "New ranks: the earlier ones were {}, and what cells had defined on them is gone.\n"
    assert (
        capsys.readouterr().out == said.format("ended by KeyboardInterrupt in the middle of a call") + "rank 0: False\n"
    )
    ranks.close()
    ranks.close()
    ranks.run("1")
    ranks.run("2")
    assert capsys.readouterr().out == said.format("closed") + "rank 0: 1\nrank 0: 2\n"
    with pytest.raises(RanksFailed, match="The next call starts new ranks"):
        ranks.run("import os; os._exit(3)")
    ranks.run("3")
    assert capsys.readouterr().out == "rank 0: 3\n", "it has been said"
    ranks.close()
