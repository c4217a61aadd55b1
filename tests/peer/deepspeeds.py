"""Runs DeepSpeed's own tests on terrazzo.deepspeed, and says which of those that pass on DeepSpeed fail.

    python tests/peer/deepspeeds.py SOURCE [FILE ...] [--results build/peer] [--keep deepspeed|all] [--limit 900]
        [--select EXPRESSION]

SOURCE is an unpacked source tree of DeepSpeed (of 0.19.6, for instance); of it
`tests` is needed. Each FILE, a path or the beginning of one below `tests/unit`, runs once on the installed DeepSpeed
and once on terrazzo, on CPUs. A table is printed, then what fails on terrazzo, passes on DeepSpeed and is not explained
in `docs/deepspeed.md`, then what is explained there and passes.

No test and no assertion is changed. On terrazzo, `import deepspeed` gives `terrazzo.deepspeed`; a name that it does not
have may be imported, and fails when it is used, so that the other tests of its file run. Ranks are forked from the
process that runs the file, and end with the first one that fails.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from outcomes import Absent, Outcomes, begin, counted, end_with_parent, outcomes_of

# Left out are folders about what terrazzo refuses, or has not: automatic tensor and expert parallelism, Ulysses,
# inference, compiling passes, quantised kernels, libaio, the launcher.
FILES = [
    *(
        "v1/zero",
        "runtime/half_precision/test_",
        "v1/half_precision",
        "v1/accelerator",
        "runtime/test_",
        "runtime/zero",
    ),
    *("runtime/pipe", "runtime/activation_checkpointing", "runtime/comm", "runtime/sparse_tensor", "runtime/utils"),
    *(
        "checkpoint",
        "comm",
        "monitor",
        "ops/adagrad",
        "ops/adam",
        "ops/lion",
        "ops/muon",
        "ops/test_op_builder",
        "pipe",
    ),
    *("profiling", "utils"),
]
PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
# Numbers of DeepSpeed's inside, by which tests choose the sizes of their models.
NUMBERS = {"deepspeed.runtime.swap_tensor.MIN_SWAPPABLE_BYTES": 1024 * 1024}
SECONDS = 90.0  # that the ranks of a test may take


class Names(ModuleType):
    """A module of `deepspeed` whose names are those of terrazzo's module, if there is one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        vars(self)["__path__"] = []
        vars(self)["ours"] = _imported(f"terrazzo.{name}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not name.startswith(("__compatible", "__git", "__version")):
            raise AttributeError(name)
        ours = vars(self)["ours"]
        if ours is not None and hasattr(ours, name) and not isinstance(getattr(ours, name), ModuleType):
            return getattr(ours, name)
        if ours is not None and isinstance(getattr(ours, name, _imported(f"{ours.__name__}.{name}")), ModuleType):
            return importlib.import_module(f"{self.__name__}.{name}")
        return NUMBERS.get(full := f"{self.__name__}.{name}") or Absent(full)

    def __setattr__(self, name: str, value: Any) -> None:
        ours = vars(self).get("ours")
        if isinstance(value, ModuleType) or name.startswith("__") or ours is None or not hasattr(ours, name):
            super().__setattr__(name, value)
        else:
            setattr(ours, name, value)


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "deepspeed" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Names(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def forked(execution: Any, num_procs: int, init_method: str) -> None:
    """`DistributedExec._launch_procs`: the ranks of one test."""
    from _pytest.outcomes import Failed, Skipped

    context = multiprocessing.get_context("fork")
    common = sys.modules[type(execution).__mro__[-3].__module__]
    port = common.get_master_port(20000 + os.getpid() % 10000)

    def rank(number: int, writer: Any) -> None:
        end_with_parent()
        os.setpgid(0, 0)
        try:
            skipped = execution._dist_run(number, num_procs, port, init_method)
            writer.send(("skipped", skipped) if skipped else ("passed", ""))
        except Skipped as skip:
            writer.send(("skipped", skip.msg))
        except BaseException:
            writer.send(("failed", f"rank {number}\n{traceback.format_exc()}"))
        sys.stdout.flush()
        os._exit(0)

    ranks, readers = [], []
    for number in range(num_procs):
        reader, writer = context.Pipe(False)
        ranks.append(context.Process(target=rank, args=(number, writer)))
        ranks[-1].start()
        writer.close()
        readers.append(reader)
    end, said, waiting = time.monotonic() + SECONDS, [], list(readers)
    while waiting and (left := end - time.monotonic()) > 0:
        for reader in multiprocessing.connection.wait(waiting, left):
            waiting.remove(reader)
            try:
                said.append(reader.recv())
            except EOFError:
                said.append(("failed", f"rank {readers.index(reader)} ended"))
            if said[-1][0] == "failed":
                end = min(end, time.monotonic() + 2)
    for process in ranks:
        if process.is_alive() and waiting:
            process.kill()
        process.join()
    failed = [why for kind, why in said if kind == "failed"]
    if waiting and not failed:
        failed = [f"no rank failed, and {len(waiting)} did not end in {SECONDS:.0f} s"]
    if failed:
        raise Failed("\n".join(failed), pytrace=False)
    if said[0][0] == "skipped":
        raise Skipped(said[0][1])


def agreed(flag: bool, op: Callable[[list[bool]], bool] = all) -> bool:
    """`reduce_boolean_flags`: the same among all ranks; theirs makes tensors on device 0, which a CPU has not."""
    import torch.distributed as dist

    flags = [flag] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return op(flags)


class _Keeps:
    """Writes the outcomes while the tests run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: Outcomes = {}

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.keep(f"{report.nodeid}::(the file)", "failed", str(report.longrepr))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            outcome = "skipped" if report.skipped else report.outcome
            if outcome == "passed" and report.nodeid in self.outcomes:
                return
            self.keep(report.nodeid, outcome, "" if report.passed else str(report.longrepr)[-6000:])

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.collected = [item.nodeid for item in items]

    def keep(self, name: str, outcome: str, why: str) -> None:
        self.outcomes[name] = [outcome, why]
        self._path.write_text(json.dumps(self.outcomes, indent=1))


def run(source: Path, file: str, peer: str, path: Path, select: str) -> None:
    """Run a file of `tests/unit` in this process, which it changes, and write its outcomes."""
    import pytest
    import torch

    begin(path)
    os.chdir(source / "tests")
    if peer == "terrazzo":
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]  # has what is called
    import deepspeed  # noqa: F401  # either one, before the first fork

    if peer == "deepspeed":
        # An optional speed-up, which takes a minute to compile.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    sys.path.insert(0, str(source / "tests"))
    common: Any = importlib.import_module("unit.common")
    common.DistributedExec._launch_procs = forked
    common.set_accelerator_visible = lambda: None
    common.reduce_boolean_flags = agreed
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    create = ddp.__init__
    ddp.__init__ = lambda self, module, device_ids=None, output_device=None, **more: create(self, module, **more)
    common.time = type("Time", (), {"sleep": staticmethod(lambda _: None), "time": staticmethod(time.time)})
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-k", select, "--rootdir", ".", f"unit/{file}"]
    pytest.main(arguments, plugins=[_Keeps(path.with_suffix(".part"))])
    sys.stdout.flush()
    os._exit(0)


def build_operators(files: list[str]) -> None:
    """Compile what DeepSpeed compiles when it is used first, which takes longer than a test may."""
    from deepspeed.ops.op_builder import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder, FusedAdamBuilder

    rare = {"ops/adagrad": CPUAdagradBuilder, "ops/lion": CPULionBuilder}
    needed = [builder for start, builder in rare.items() if any(file.startswith(start) for file in files)]
    for builder in (FusedAdamBuilder, CPUAdamBuilder, *needed):
        builder().load(verbose=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--results", type=Path, default=Path("build/peer"))
    parser.add_argument("--keep", choices=("deepspeed", "terrazzo", "all"), help="whose outcomes are not made again")
    parser.add_argument("--only", choices=("deepspeed", "terrazzo"), help="run this library alone; no comparison")
    parser.add_argument("--select", default="", help="which tests of the files, as pytest's -k")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that a file may take")
    options = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import pytest  # noqa: F401  # before the forks
    import torch  # noqa: F401

    source, results = options.source.resolve(), options.results.resolve()
    unit = source / "tests" / "unit"
    files = [
        str(path.relative_to(unit))
        for start in options.files
        for path in sorted(unit.rglob("test_*.py"))
        if str(path.relative_to(unit)).startswith(start)
    ]
    os.environ["TORCH_EXTENSIONS_DIR"] = str(results / "operators")
    if options.only != "terrazzo":
        building = multiprocessing.get_context("fork").Process(target=build_operators, args=(files,))
        building.start()
        building.join()
    explained = set(re.findall(r"^\| `([^`]+\.py::[^`]+)`", PAGE.read_text() if PAGE.exists() else "", re.MULTILINE))
    worse, mended, totals = [], [], [0, 0]
    print("| file | DeepSpeed: passed/failed/skipped | terrazzo | pass on DeepSpeed alone |\n|---|---|---|---|")
    one = functools.partial(run, select=options.select)
    for file in files:
        theirs, ours = (
            {} if options.only not in (None, peer)
            else outcomes_of(one, source, file, peer, results, options.limit, options.keep in (peer, "all"))
            for peer in ("deepspeed", "terrazzo")
        )  # fmt: skip
        passing = {test.removeprefix("unit/") for test, outcome in theirs.items() if outcome[0] == "passed"}
        failing = {test for test in passing if ours.get(f"unit/{test}", [""])[0] != "passed"}
        totals = [totals[0] + len(passing), totals[1] + len(passing) - len(failing)]
        print(f"| {file.removesuffix('.py')} | {counted(theirs)} | {counted(ours)} | {len(failing)} |", flush=True)
        known = {test for test in explained if test.startswith(f"{file}::")}
        worse += sorted(t for t in failing if not any(t.startswith(k) for k in known))
        mended += sorted(k for k in known if not any(t.startswith(k) for t in failing))
    print(f"| together | {totals[0]} pass | {totals[1]} of these pass | {totals[0] - totals[1]} |")
    print("\nfail on terrazzo alone, and are not explained:", *worse or ["none"], sep="\n    ")
    print("\nare explained, and pass:", *mended or ["none"], sep="\n    ")


if __name__ == "__main__":
    main()
