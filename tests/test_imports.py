"""Imports that import contracts cannot express: which of torch's own distributed systems a module may see.

What we build ourselves (`torch.distributed.tensor`, `.fsdp`, `.checkpoint`) is imported only where the job is to see
through it or to read its files: modules named `interop` and the folder `checkpoint/formats`. `layout` sees no
`torch.distributed` at all. Private names of torch are known to `terrazzo._torch` alone, which alone changes torch.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.tensor import DTensor

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "terrazzo"
BUILT_HERE = tuple(f"torch.distributed.{system}" for system in ("tensor", "_tensor", "fsdp", "checkpoint"))


def may_see(path: Path, forbidden: tuple[str, ...]) -> bool:
    """Whether the module at `path`, relative to the package, may import what is forbidden to others."""
    exempt = "interop" in path.with_suffix("").parts or path.parts[:2] == ("checkpoint", "formats")
    return exempt and forbidden == BUILT_HERE


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    """All that a module says; several tests ask."""
    return list(ast.walk(ast.parse(source)))


def names_used(source: str) -> Iterator[tuple[int, str]]:
    """Every dotted name that a module imports or reaches through an import, with its line."""
    aliases: dict[str, str] = {}
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
                root = name.name.partition(".")[0]
                aliases[name.asname or root] = name.name if name.asname else root
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for name in node.names:
                yield node.lineno, f"{node.module}.{name.name}"
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
    for node in nodes_of(source):
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


# ------------------------------------------------------------------ torch's private names

INSIDE = "_torch"
"""The one package that may know them."""

OTHERS_FORMATS = {
    "tensor/interop.py": "converts PyTorch's own DTensors, whose parts are private",
    "checkpoint/formats/dcp_metadata.py": "writes the classes that PyTorch's checkpoints name",
}
"""Files that may use them too, with the reason. It may become shorter, not longer."""

OPERATOR_NAMES = ("torch.ops.", "torch._foreach_", "torch._C.Size")
"""Names that begin with an underscore and are documented (list operations), or are names of operators."""

_OWN = {"self", "cls"}
_TORCH_KINDS = (
    *(torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.distributed.ProcessGroup, torch.UntypedStorage),
    *(torch.optim.Optimizer, torch.autograd.Function, torch._ops.OpOverload, torch._ops.OpOverloadPacket, DeviceMesh),
)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _own_attributes() -> set[str]:
    """Private names that terrazzo's own classes and modules define."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path.read_text()):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in _OWN:
                    found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)  # __slots__, and what is set by name
    return found


def _attributes_of_torch() -> set[str]:
    probes = [torch.nn.Module(), torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.empty(0).untyped_storage()]
    return {name for thing in (*_TORCH_KINDS, *probes) for name in dir(thing) if _is_private(name)}


def private_uses(source: str, own: set[str], torchs: set[str]) -> list[tuple[int, str]]:
    """Private names of torch that a module imports, reaches, or asks objects for."""
    found = set()
    for line, name in names_used(source):
        parts = name.split(".")
        if parts[0] == "torch" and any(map(_is_private, parts)) and not f"{name}.".startswith(OPERATOR_NAMES):
            found.add((line, name))
    named = {alias.asname or alias.name for node in nodes_of(source) if isinstance(node, (ast.Import, ast.ImportFrom))
             for alias in node.names}  # fmt: skip
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute):
            attr, base = node.attr, node.value
            if isinstance(base, ast.Name) and base.id in _OWN | named:
                continue  # an object's own; what is reached through an import was seen above
        elif _asks_by_name(node):
            attr = node.args[1].value  # type: ignore[attr-defined]
        else:
            continue
        if _is_private(attr) and not attr.startswith("_foreach_") and (attr in torchs or attr not in own):
            found.add((node.lineno, attr))
    return sorted(found)


def _asks_by_name(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or len(node.args) < 2 or not isinstance(node.func, ast.Name):
        return False
    value = node.args[1]
    return node.func.id in ("getattr", "hasattr", "setattr", "delattr") and isinstance(
        getattr(value, "value", None), str
    )


def assignments_to_torch(source: str) -> list[tuple[int, str]]:
    """Attributes of torch's modules and classes that a module sets."""
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes_of(source)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0] == "torch"
    }
    found = []
    for node in nodes_of(source):
        target = node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            target = node.args[0]
        elif not (isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del))):
            continue
        else:
            target = node.value
        base = target
        while isinstance(base, ast.Attribute):
            base = base.value
        if isinstance(base, ast.Name) and base.id in imported:
            found.append((node.lineno, ast.unparse(node)))
    return found


OURS_BY_CHANCE = {"_apply"}  # of parallel styles and schedulers; sharded modules override that of nn.Module

# Of multiprocessing, by which ranks end with their session; and of named tuples.
PYTHONS = {"_forkserver_alive_fd", "_forkserver_address", "_replace"}

PATCHES_ELSEWHERE = {
    "tensor/experimental/context_parallel.py": "replaces attention within a block, as PyTorch's does",
    "tensor/ops/recurrent.py": "PyTorch's modules look at the addresses of weights, which a DTensor has not",
}


def _elsewhere(allowed: dict[str, str]) -> list[Path]:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] != INSIDE]
    return [path for path in files if str(path.relative_to(PACKAGE)) not in allowed]


def test_private_names_of_torch_are_used_in_one_package():
    own, torchs = _own_attributes() | PYTHONS, _attributes_of_torch()
    mine = {name for name in torchs & own if name in vars(DTensor)} | OURS_BY_CHANCE
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path in _elsewhere(OTHERS_FORMATS)
        for line, name in private_uses(path.read_text(), own, torchs - mine)
    ]
    assert not found, "\n".join(found)


def test_torch_is_changed_in_one_package():
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path in _elsewhere(PATCHES_ELSEWHERE)
        for line, name in assignments_to_torch(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._current_autograd_node()",
        "from torch._ops import OpOverload",
        "from torch.nn.modules.module import _IncompatibleKeys",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_group()",
        "def f(module):\n    return module._parameters",
        "def f(tensor):\n    return tensor._is_view()",
        "def f(module):\n    return getattr(module, '_buffers')",
        "def f(node):\n    return node.next()._sequence_nr()",
    ],
)
def test_every_use_of_a_private_name_is_seen(source):
    assert private_uses(source, {"_layout"}, _attributes_of_torch())


@pytest.mark.parametrize(
    "source",
    ["def f(x):\n    return x._layout", "import torch\ntorch._foreach_add_([], 1)", "self._version = 1", "x.__dict__"],
)
def test_other_underscores_are_free(source):
    assert not private_uses(source, {"_layout"}, _attributes_of_torch())


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.functional.relu = None",
        "from torch.nn import functional as F\nF.relu = None",
        "import torch\nsetattr(torch.Tensor, name, None)",
        "from torch.autograd import Function\nFunction.apply = None",
    ],
)
def test_every_change_of_torch_is_seen(source):
    assert assignments_to_torch(source)
    assert not assignments_to_torch("import torch\nx = torch.ones(2)\nx.grad = None")


# ------------------------------------------------------------------ where new tensors are

# `from_numpy` and `frombuffer` have no such argument; `as_tensor` leaves a tensor where it is.
_MAKE_TENSORS = set(
    "arange empty empty_strided eye full linspace logspace ones rand randint randn randperm tensor zeros".split()
)


def without_device(source: str) -> list[tuple[int, str]]:
    """Calls that make a tensor and do not say where."""
    return [
        (node.lineno, ast.unparse(node))
        for node in nodes_of(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MAKE_TENSORS
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if all(keyword.arg not in ("device", None) for keyword in node.keywords)
    ]


def test_new_tensors_say_where_they_are():
    """Otherwise a program that sets a default device, or makes its model in `with torch.device(...)`, moves them."""
    assert without_device("torch.empty(2, dtype=d); torch.empty(2, device=d); torch.tensor(1, **more); x.empty(1)") == [
        (1, "torch.empty(2, dtype=d)")
    ]
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {call}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in ("demo", "testing")
        for line, call in without_device(path.read_text())
    ]
    assert not found, "\n".join(found)


# ------------------------------------------------------------------ no circles

KNOWN_CIRCLES: list[set[str]] = []
"""What is left of them; the list can only get shorter."""


def imports_of(name: str, path: Path, modules: Iterable[str]) -> set[str]:
    """The package's modules that a module imports, late imports included; a package's own file only by its name."""
    found: set[str] = set()
    for node in nodes_of(path.read_text()):
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
