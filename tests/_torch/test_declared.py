"""What of torch's inside is used: declared, looked up when terrazzo is imported, and missed in one clear error."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest
import torch

import terrazzo._torch
from terrazzo._torch import declared
from terrazzo._torch.declared import TABLE, attribute, check, check_age, later, like, private, replace, when_imported
from terrazzo.errors import TorchMovedError


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(declared, "TABLE", [])
    return declared.TABLE


def test_what_a_torch_lacks_is_said_in_one_error(table):
    private("torch._C._moved_away", "ducks swim")
    attribute("torch.nn.Module._gone", "geese fly", since="2.12")
    later("torch._no_such_module", "swans sing")
    assert private("torch._C._current_autograd_node", "this is there") is torch._C._current_autograd_node
    with pytest.raises(TorchMovedError) as raised:
        check()
    for part in (
        *("torch._C._moved_away (known since 2.11): ducks swim", "torch.nn.Module._gone (known since 2.12): geese fly"),
        *("torch._no_such_module (known since 2.11): swans sing", torch.__version__),
    ):
        assert part in str(raised.value)
    assert "this is there" not in str(raised.value)
    assert isinstance(raised.value, ImportError)
    assert "MISSING: ducks swim" in declared.as_text()


def test_what_has_a_fallback_is_not_missed(table):
    assert private("torch._C._moved_away", "ducks swim", instead=7, without="they walk") == 7
    check()
    assert "missing, they walk: ducks swim" in declared.as_text()


def test_what_depends_on_a_module_waits_for_its_import(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    before = list(sys.meta_path)
    when_imported("imported_late", lambda: seen.append(sys.modules["imported_late"].value))
    importlib.import_module("json.tool")
    assert seen == []
    importlib.import_module("imported_late")
    assert seen == [1] and sys.meta_path == before
    when_imported("imported_late", lambda: seen.append(2))
    assert seen == [1, 2]
    del sys.modules["imported_late"]


def test_only_what_is_declared_is_replaced(table):
    private("torch.nn.functional.relu", "is used")
    with pytest.raises(AssertionError, match="not declared with patched"):
        replace("torch.nn.functional.relu", None)
    assert torch.nn.functional.relu(torch.ones(1)) == 1


def test_a_replacement_looks_like_what_it_replaces():
    def plain(a: int, *, b: str = "") -> None:
        """What it does."""

    found = like(lambda *args, **kwargs: None, plain)
    assert (found.__name__, found.__doc__, found.__module__) == ("plain", "What it does.", __name__)
    assert not hasattr(found, "__wrapped__")


def test_this_torch_has_all_of_it():
    check()
    assert len(TABLE) > 80
    assert {entry.since for entry in TABLE} >= {"2.11", "2.13"}
    assert all(entry.why and entry.path.startswith("torch.") for entry in TABLE)


def test_every_module_is_looked_at():
    modules = {module.name for module in pkgutil.iter_modules(terrazzo._torch.__path__)} - {"__main__", "declared"}
    # With `flex_attention`, `terrazzo.graphs` and `terrazzo.launch`, and by `python -m terrazzo._torch`; with `install`
    late = {"flex", "graphs", "launching", "replaced"}
    assert modules == set(terrazzo._torch.__all__) | late


@pytest.mark.long
def test_the_table_is_printed():
    done = subprocess.run([sys.executable, "-m", "terrazzo._torch"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert all(f"\n{entry.path}\n" in done.stdout for entry in TABLE)


def test_importing_terrazzo_into_a_torch_that_moved_names_says_which():
    program = """
import torch
del torch._C._current_autograd_node, torch._C.DispatchKey, torch.masked._ops._std_var
del torch.distributed.ProcessGroup._allgather_base
try:
    import terrazzo.tensor
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("TorchMovedError"), done.stderr
    found = [line.split(" ")[2] for line in done.stdout.splitlines()[1:]]
    assert found == [
        "torch._C._current_autograd_node",
        "torch._C.DispatchKey",
        "torch.distributed.ProcessGroup._allgather_base",
    ]


def test_a_torch_that_is_too_old_is_named():
    with pytest.raises(TorchMovedError, match=r"needs PyTorch 2\.11 or a newer one, and this is 2\.6\.0\+cu124"):
        check_age("2.6.0+cu124")
    check_age("2.11.0")
    check_age("3.0.0.dev20261101")
