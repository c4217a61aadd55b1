"""Imports that import contracts cannot express: which of torch's own distributed systems a module may see.

What we build ourselves (`torch.distributed.tensor`, `.fsdp`, `.checkpoint`) is imported only where the job is to see
through it or to read its files: modules named `interop` and the folder `checkpoint/formats`. `layout` sees no
`torch.distributed` at all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
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


# ------------------------------------------------------------------ no circles

KNOWN_CIRCLES = [
    {"fsdp.misuse", "fsdp.schedule", "fsdp.trace", "fsdp.unit", "fsdp.watch"},
    {"engine.content", "engine.deepspeed_layout", "engine.engine", "engine.saving"},
]
"""What is left of them; the list can only get shorter."""


def imports_of(name: str, path: Path, modules: Iterable[str]) -> set[str]:
    """The package's modules that a module imports, late imports included; a package's own file only by its name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules else node.module)
    return {n for n in found if n in modules and n != name}


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Groups of more than one node each of which can reach all others."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for following in graph[waiting.pop()] - seen:
                seen.add(following)
                waiting.append(following)
        return seen

    reached = {node: reach(node) for node in graph}
    found: list[set[str]] = []
    for node in graph:
        group = {other for other in reached[node] if node in reached[other]}
        if group and group not in found:
            found.append(group)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_no_module_imports_in_a_circle() -> None:
    paths = {
        ".".join(("terrazzo", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    found = circles({name: imports_of(name, path, paths) for name, path in paths.items()})
    short = [{name.removeprefix("terrazzo.") for name in group} for group in found]
    assert sorted(short, key=min) == sorted(KNOWN_CIRCLES, key=min)
