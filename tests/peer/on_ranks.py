"""A plugin of pytest for tests of libraries: ranks are forked, and what asks for GPUs has the CPU, as in `on_cpu`.

`PEER_ON_CPU` names the folders whose files are changed as `on_cpu` says, `PEER_YES` the library's functions that say
whether a GPU is new enough, and `PEER_SCRIPTS` the scripts that torchrun starts, with their number of ranks. A script
that has `setup_distributed` hands its result to each of its functions `_test_...`: each of these is a test of its own.
Any other script is one test.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import multiprocessing
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import on_cpu
import pytest
import torch
import torch.multiprocessing
from outcomes import end_with_parent
from torch.testing._internal import common_distributed, common_fsdp

FOLDERS = tuple(os.environ.get("PEER_ON_CPU", "").split())
SCRIPTS = {path: int(ranks) for path, ranks in (each.split("=") for each in os.environ.get("PEER_SCRIPTS", "").split())}
YES = os.environ.get("PEER_YES", "").split()
CUDA = types.SimpleNamespace(
    **{**vars(on_cpu.CUDA), "is_available": lambda: True, "get_device_capability": lambda: (9, 0)}
)
LIMIT = 110.0  # of seconds, for a test of a script


class Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        tree = on_cpu.OnCPU().visit(ast.parse(self.get_data(path)))
        code: types.CodeType = compile(ast.fix_missing_locations(tree), path, "exec")
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__cuda__"] = CUDA
        super().exec_module(module)


class Finder:
    """Modules of the folders, wherever they are imported from."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None and spec.origin.startswith(FOLDERS):
            spec.loader = Loader(spec.name, spec.origin)
        return spec


def load(path: Path, name: str) -> types.ModuleType:
    spec = importlib.machinery.ModuleSpec(name, Loader(name, str(path)), origin=str(path))
    module = types.ModuleType(name)
    module.__spec__, module.__file__ = spec, str(path)
    sys.modules[name] = module
    assert isinstance(spec.loader, Loader)
    spec.loader.exec_module(module)
    return module


def on_rank(path: Path, function: str | None, rank: int, ranks: int, port: int, failed: str) -> None:
    """A script, or one function of it, on one rank."""
    end_with_parent()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in {**where, "RANK": rank, "LOCAL_RANK": rank}.items()})
    torch.set_num_threads(1)
    try:
        module = load(path, "__main__" if function is None else path.stem)
        if function is not None:
            getattr(module, function)(module.setup_distributed())
    except BaseException:
        Path(failed).write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise


class Test(pytest.Item):
    def __init__(self, *, function: str | None, **rest: Any) -> None:
        super().__init__(**rest)
        self._function = function

    def runtest(self) -> None:
        ranks = SCRIPTS[os.path.relpath(self.path, self.config.rootpath)]
        with tempfile.TemporaryDirectory() as folder:
            port = common_distributed.find_free_port()
            started: list[BaseProcess] = []
            failed = [Path(folder, str(rank)) for rank in range(ranks)]
            for rank in range(ranks):
                arguments = (self.path, self._function, rank, ranks, port, str(failed[rank]))
                started.append(multiprocessing.get_context("fork").Process(target=on_rank, args=arguments))
                started[-1].start()
            for each in started:
                each.join(LIMIT / ranks)
                # What one rank raises makes the others wait.
                if any(path.exists() for path in failed):
                    break
            ended = [each.exitcode for each in started]
            for each in started:
                each.kill()
                each.join()
            assert ended == [0] * ranks, "\n".join(path.read_text() for path in failed if path.exists()) or ended

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


class Script(pytest.File):
    def collect(self) -> Iterator[Test]:
        functions = [each.name for each in ast.parse(self.path.read_text()).body if isinstance(each, ast.FunctionDef)]
        tests = [each for each in functions if each.startswith("_test_") and not each.endswith("_base")]
        for name in tests if "setup_distributed" in functions else ["main"]:
            yield Test.from_parent(self, name=name, function=None if name == "main" else name)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if os.path.relpath(file_path, parent.config.rootpath) in SCRIPTS:
        return Script.from_parent(parent, path=file_path)
    return None


def _fork_ranks(case: Any) -> None:
    case._start_processes(torch.multiprocessing.get_context("fork").Process)


def _fork_all(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, **_: Any) -> Any:
    return _start(fn, args, nprocs, join, start_method="fork")


_start = torch.multiprocessing.start_processes


def pytest_configure() -> None:
    # A rank that is spawned imports everything again, without this plugin.
    torch.multiprocessing.spawn = torch.multiprocessing.start_processes = _fork_all
    common_distributed.MultiProcessTestCase._spawn_processes = _fork_ranks
    if FOLDERS:
        on_cpu.prepare()
        on_cpu.helpers(common_fsdp)
        torch.accelerator.device_count = lambda: on_cpu.RANKS
        sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]  # of typeshed, which asks for a method of an instance
    for each in YES:
        module, _, name = each.rpartition(".")
        setattr(importlib.import_module(module), name, lambda: True)
