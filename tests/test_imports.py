"""Imports that import contracts cannot express: which of torch's own distributed systems a module may see.

What we build ourselves (`torch.distributed.tensor`, `.fsdp`, `.checkpoint`) is imported only where the job is to see
through it or to read its files: modules named `interop` and the folder `checkpoint/formats`. `layout` sees no
`torch.distributed` at all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "terrazzo"
BUILT_HERE = tuple(f"torch.distributed.{system}" for system in ("tensor", "_tensor", "fsdp", "checkpoint"))


def may_see(path: Path, forbidden: tuple[str, ...]) -> bool:
    """Whether the module at `path`, relative to the package, may import what is forbidden to others."""
    exempt = "interop" in path.with_suffix("").parts or path.parts[:2] == ("checkpoint", "formats")
    return exempt and forbidden == BUILT_HERE


def names_used(source: str) -> Iterator[tuple[int, str]]:
    """Every dotted name that a module imports or reaches through an import, with its line."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
                root = name.name.partition(".")[0]
                aliases[name.asname or root] = name.name if name.asname else root
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for name in node.names:
                yield node.lineno, f"{node.module}.{name.name}"
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain, base = [node.attr], node.value
            while isinstance(base, ast.Attribute):
                chain.append(base.attr)
                base = base.value
            if isinstance(base, ast.Name) and base.id in aliases:
                yield node.lineno, ".".join([aliases[base.id], *reversed(chain)])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def violations(source: str, forbidden: tuple[str, ...]) -> list[tuple[int, str]]:
    prefixes = tuple(f"{name}." for name in forbidden)
    return sorted({(line, name) for line, name in names_used(source) if f"{name}.".startswith(prefixes)})


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed.fsdp",
        "import torch.distributed.checkpoint.metadata as m",
        "from torch.distributed import tensor",
        "from torch.distributed.tensor import DTensor as D",
        "from torch.distributed._tensor import DTensor",
        "import torch.distributed as dist\ndist.checkpoint.save({})",
        "import torch\ntorch.distributed.fsdp.fully_shard",
        "def f():\n    from torch import distributed\n    return distributed.tensor.DTensor",
        "import importlib\nimportlib.import_module('torch.distributed.tensor')",
    ],
)
def test_every_way_of_importing_is_seen(source):
    assert violations(source, BUILT_HERE)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(tensor)",
        "from torch.distributed.device_mesh import DeviceMesh",
        "from torch.distributed import distributed_c10d",
        "x.distributed.tensor",
        "'torch.distributed.tensor is what this replaces'",
    ],
)
def test_other_uses_of_torch_are_free(source):
    assert not violations(source, BUILT_HERE)


@pytest.mark.parametrize(
    ("folder", "forbidden"), [(".", BUILT_HERE), ("layout", ("torch.distributed",))], ids=["package", "layout"]
)
def test_modules_see_only_what_they_may(folder, forbidden):
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if not may_see(path.relative_to(PACKAGE), forbidden)
        for line, name in violations(path.read_text(), forbidden)
    ]
    assert not found


def test_what_is_exempt():
    assert may_see(Path("fsdp/interop.py"), BUILT_HERE)
    assert may_see(Path("checkpoint/formats/dcp.py"), BUILT_HERE)
    assert not may_see(Path("checkpoint/api.py"), BUILT_HERE)
    assert not may_see(Path("layout/interop.py"), ("torch.distributed",))
