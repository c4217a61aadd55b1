"""One test file of PyTorch's on torch or on terrazzo: its imports of the families that terrazzo has ask here for names.

Nothing else of the file is changed, and no assertion is. For `terrazzo` they are asked of terrazzo, and what that does
not have, private names among them, is torch's. For `install` they are asked of torch's own modules, in which
`terrazzo.install()` has put terrazzo's. Ranks are forked from this process, and the tests that play ranks with threads
get processes instead.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import types
import unittest
import warnings
from pathlib import Path
from typing import Any

import on_cpu
import torch
import torch.distributed as dist
import torch.multiprocessing
from outcomes import Absent, Kept
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal import common_distributed

OURS = {
    "torch.distributed.tensor": "terrazzo.tensor",
    "torch.distributed._tensor": "terrazzo.tensor",
    "torch.distributed.checkpoint": "terrazzo.checkpoint",
    "torch.distributed.fsdp": "terrazzo.fsdp",
    "torch.distributed._composable": "terrazzo.fsdp",
}
FAMILY = tuple(OURS)
# Helpers of the tests, which are loaded as the tests are.
HELPERS = ("torch.testing._internal.distributed._tensor.common_dtensor", "torch.testing._internal.common_fsdp")
# What a name's module was called in older versions of PyTorch, and where names have moved since.
SUBMODULES = {
    "torch.distributed._tensor": ["torch.distributed.tensor"],
    "torch.distributed._tensor.api": ["torch.distributed.tensor"],
    "torch.distributed._tensor.placement_types": [
        "torch.distributed.tensor.placement_types",
        "torch.distributed.tensor._dtensor_spec",
    ],
    "torch.distributed.tensor.placement_types": ["torch.distributed.tensor._dtensor_spec"],
}
ON_CPU = "_composable/"  # the folder whose files ask for GPUs


SLOW = {"test_depthwise_convolution": "minutes of convolutions on a CPU"}


class Names:
    """The names of one module, answered by the libraries that are asked in turn."""

    def __init__(self, tree: Tree, module: str) -> None:
        self._tree, self._module = tree, module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._tree.name(self._module, name)


class Tree:
    """A source tree of PyTorch, of which files are loaded for one of the two libraries."""

    def __init__(self, source: Path, peer: str, on_cpu: bool) -> None:
        self._source, self._peer, self._on_cpu = source, peer, on_cpu
        self._loaded: dict[str, types.ModuleType] = {}

    def load(self, name: str, path: Path) -> types.ModuleType:
        if name not in self._loaded:
            module = types.ModuleType(name)
            module.__file__ = str(path)
            module.__dict__["__name_of__"], module.__dict__["__names_of__"] = self.name, self.names
            # Known by its name before it runs: its classes are looked up there.
            self._loaded[name] = sys.modules[name] = module
            parsed = ast.parse(path.read_text())
            if self._on_cpu:
                module.__dict__["__cuda__"] = on_cpu.CUDA
                parsed = on_cpu.OnCPU().visit(parsed)
            parsed = ast.fix_missing_locations(_Asks().visit(parsed))
            exec(compile(parsed, str(path), "exec"), module.__dict__)
        return self._loaded[name]

    def helpers(self, name: str) -> types.ModuleType:
        short = name.rpartition(".")[2]
        first = short not in self._loaded
        module = self.load(short, self._source / f"{name.replace('.', '/')}.py")
        if first and short == "common_dtensor":
            module.__dict__["DTensorOpTestBase"] = _with_processes(module)
        elif first:
            on_cpu.helpers(module)
        return module

    def names(self, module: str) -> Names:
        return Names(self, module)

    def name(self, module: str, name: str) -> Any:
        if module in HELPERS:
            return getattr(self.helpers(module), name)
        for home in self._homes(module):
            try:
                found = importlib.import_module(home)
            except ImportError:
                continue
            if hasattr(found, name):
                value = getattr(found, name)
                family = isinstance(value, types.ModuleType) and value.__name__.startswith((*FAMILY, *OURS.values()))
                return self.names(f"{module}.{name}") if family else value
        try:
            importlib.import_module(f"{module}.{name}")
        except ImportError:
            return Absent(f"{module}.{name}")
        return self.names(f"{module}.{name}")

    def _homes(self, module: str) -> list[str]:
        theirs = [module, *SUBMODULES.get(module, [])]
        if self._peer != "terrazzo":
            return theirs
        # Private modules of a package have its names; terrazzo's are in the package itself, or those for libraries.
        family = next(f for f in FAMILY if module == f or module.startswith(f"{f}."))
        root, parts = OURS[family], module[len(family) :].strip(".").split(".")
        public = [p for p in parts if p and not p.startswith("_") and (p != "api" or root != "terrazzo.tensor")]
        ours = [".".join([root, *public]), ".".join([root, *public[:1]]), root]
        libraries = ["terrazzo.tensor.libraries"] if root == "terrazzo.tensor" else []
        return [*ours[: 2 if public else 1], *libraries, *theirs]


class _Asks(ast.NodeTransformer):
    """Imports and uses of the family become questions to `Tree.name`."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if not _ours(node.module or ""):
            return node
        return [_assign(a.asname or a.name, _ask("__name_of__", node.module or "", a.name)) for a in node.names]

    def visit_Import(self, node: ast.Import) -> Any:
        kept = [a for a in node.names if not (_ours(a.name) and a.asname)]
        named = [_assign(a.asname or "", _ask("__names_of__", a.name)) for a in node.names if a not in kept]
        return [*([ast.Import(kept)] if kept else []), *named]

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if ast.unparse(node) in FAMILY:
            return ast.copy_location(_ask("__names_of__", ast.unparse(node)), node)
        return self.generic_visit(node)


def _ours(module: str) -> bool:
    return module in HELPERS or module in FAMILY or module.startswith(tuple(f"{f}." for f in FAMILY))


def _ask(function: str, *arguments: str) -> ast.expr:
    return ast.parse(f"{function}({', '.join(map(repr, arguments))})", mode="eval").body


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _with_processes(helpers: types.ModuleType) -> type:
    class DTensorOpTestBase(helpers.DTensorTestBase):  # type: ignore[name-defined,misc]  # of a module made here
        """Every test has a process group, as with those tests that ask for it by `with_comms`."""

        device_type = "cpu"

        @property
        def world_size(self) -> int:
            return int(helpers.NUM_DEVICES)

        def build_device_mesh(self) -> DeviceMesh:
            return DeviceMesh("cpu", list(range(self.world_size)))

        def run_test(self, name: str, pipe: Any) -> None:
            where = f"file://{self.file_name}"
            dist.init_process_group("gloo", init_method=where, world_size=self.world_size, rank=self.rank)
            super().run_test(name, pipe)

        def assertEqualOnRank(self, x: Any, y: Any, msg: str | None = None, *, rank: int = 0) -> None:
            if self.rank == rank:
                self.assertEqual(x, y, msg)

    return DTensorOpTestBase


def _fork_ranks(case: Any) -> None:
    case._start_processes(torch.multiprocessing.get_context("fork").Process)


def _install() -> None:
    import terrazzo
    from terrazzo.integrations.installing import InstallWarning

    with warnings.catch_warnings():
        # torch's helpers for tests have imported names before; those that matter here are loaded anew.
        warnings.simplefilter("ignore", InstallWarning)
        terrazzo.install()


def run(source: Path, file: str, peer: str, results: Path) -> None:
    """Run a file of `test/distributed` in this process, which it changes, and write its outcomes."""
    os.setsid()
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "240")
    log = os.open(results.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    common_distributed.MultiProcessTestCase._spawn_processes = _fork_ranks
    path = source / "test" / "distributed" / file
    if peer == "install":
        _install()
    needs_cpu = file.startswith(ON_CPU)
    if needs_cpu:
        on_cpu.prepare()
    module = Tree(source, peer, needs_cpu).load(path.stem, path)
    for case in vars(module).values():
        for name, why in SLOW.items():
            if isinstance(case, type) and name in vars(case):
                setattr(case, name, unittest.skip(why)(getattr(case, name)))
    kept = Kept()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(kept)
    results.write_text(json.dumps(kept.outcomes, indent=1))
