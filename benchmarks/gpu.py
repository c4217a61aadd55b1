"""`make gpu`: the tests marked `gpu` and the benchmarks of accelerators, and a page of what they found.

    python -m benchmarks.gpu                                            on this machine's accelerators
    python -m benchmarks.gpu --device late --quick --page build/x.md    on the device that imitates one

It installs nothing. It runs all tests and cases whatever fails, and its status is 1 if anything did.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
# What terrazzo needs, and its tests.
MODULES = ("torch", "numpy", "msgspec", "xxhash", "rich", "typer", "obstore", "zstandard", "pytest", "hypothesis")

if missing := [name for name in MODULES if importlib.util.find_spec(name) is None]:
    sys.exit(
        f"{sys.executable} cannot import {', '.join(missing)}. `make gpu` installs nothing: name another interpreter, "
        "`make gpu PYTHON=/path/to/python`, or install them there"
    )

import torch
import typer

from benchmarks import cases, devices
from benchmarks.markdown import table
from benchmarks.report import Result, columns_of, report
from benchmarks.runner import run
from terrazzo import __version__
from terrazzo.errors import DeviceBuildError
from terrazzo.testing.late import build

TEST_SECONDS = 3600.0
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Test:
    """What a test did: it passed, failed, was skipped, or failed as expected."""

    name: str
    outcome: str
    seconds: float
    why: str = ""


@app.command()
def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Benchmarks, with wildcards; default: all for accelerators.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, xpu or the like; late imitates one. Default: what is here.")] = "",
    page: Annotated[Path, typer.Option(help="Write what was found into this file.")] = ROOT / "docs/benchmarks-gpu.md",
    quick: Annotated[bool, typer.Option(help="Small problems and few repetitions: does it run at all?")] = False,
    ranks: Annotated[
        int, typer.Option(help="Ranks on each device. More than one: NCCL 2.30, and NCCL_MULTI_RANK_GPU_ENABLE=1.")
    ] = 1,
    limit: Annotated[float, typer.Option(help="Seconds after which a benchmark has failed; the others go on.")] = 300.0,
) -> None:
    """Tests and measures terrazzo on accelerators."""
    os.environ[devices.RANKS_PER_DEVICE] = str(ranks)
    kind = device or _accelerator()
    if kind != devices.LATE and (not torch.accelerator.is_available() or _accelerator() != kind):
        sys.exit(nothing_here(kind))
    if kind == devices.LATE:
        try:
            build.built()
        except DeviceBuildError as error:
            sys.exit(str(error))
    cases.load(cases.modules_here())
    chosen = [each for each in cases.select(names or [], "accelerator") if each.imitable or kind != devices.LATE]
    where, began = hardware(kind), datetime.datetime.now()  # what fails there fails before hours of work
    tests = run_tests(kind)
    results = []
    for result in run(
        chosen, quick=quick, limit=limit, seconds=20.0, device=kind,
        began=lambda case: print(case.name, flush=True),
    ):  # fmt: skip
        results.append(result)
        if result.error is not None:
            print(f"{result.name} failed: {result.error}", flush=True)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(written(tests, results, where, began, quick))
    print(f"{page}: {counted(tests)}; {len(results)} benchmarks, {sum(r.error is not None for r in results)} failed")
    sys.exit(any(test.outcome == "failed" for test in tests) or any(r.error is not None for r in results))


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else ""


def nothing_here(kind: str) -> str:
    """Why nothing can be run, and what it needs."""
    built = torch.version.cuda and f"CUDA {torch.version.cuda}" or torch.version.hip and f"ROCm {torch.version.hip}"
    how = f"for {built}" if built else "without CUDA and ROCm"
    return (
        f"PyTorch {torch.__version__} of {sys.executable} was built {how}, "
        f"and finds no accelerator{f' {kind!r}' if kind else ''} on this machine. `make gpu` needs one or more GPUs, "
        "their driver, and an interpreter with a PyTorch for them: `make gpu PYTHON=/path/to/python`. "
        "`make gpu DEVICE=late` runs the same on a device that imitates one"
    )


# ------------------------------------------------------------------ tests


def run_tests(kind: str) -> list[Test]:
    """What each test marked `gpu` did. pytest's own output goes to the terminal."""
    files = sorted(file for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text())
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        found = Path(folder, "tests.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", f"--junitxml={found}"]
        try:
            done = subprocess.run(
                [*command, "--device", kind, *map(str, files)], cwd=ROOT, timeout=TEST_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            done = -1
        tests = tests_of(found) if found.exists() else []
    if not tests or done not in (0, 1):
        how = f"had not ended after {TEST_SECONDS:g} s" if done == -1 else f"ended with status {done}"
        tests.append(Test("pytest", "failed", 0.0, f"it {how}, so that tests may be missing here"))
    return tests


def tests_of(file: Path) -> list[Test]:
    """The tests in a file that pytest has written."""
    tests = []
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('tests.')}.{case.get('name')}"
        outcome, why = "passed", ""
        for found in case:
            if found.tag in ("failure", "error"):
                outcome, why = "failed", found.get("message") or ""
            elif found.tag == "skipped":
                expected = found.get("type") == "pytest.xfail"
                outcome, why = "failed as expected" if expected else "skipped", found.get("message") or ""
        tests.append(Test(name, outcome, float(case.get("time", 0)), why))
    return tests


def counted(tests: Iterable[Test]) -> str:
    """
    >>> counted([Test("a", "passed", 1), Test("b", "failed", 1), Test("c", "passed", 1)])
    '3 tests: 2 passed, 1 failed'
    """
    counts = Counter(test.outcome for test in tests)
    return f"{counts.total()} tests: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common())


# ------------------------------------------------------------------ the page


def hardware(kind: str) -> list[tuple[str, str]]:
    """What this was run on."""
    several = devices.number(kind)
    if kind == devices.LATE:
        rows = [("devices", f"{several} of `late`, which imitates an accelerator on the CPU: times say nothing")]
    else:
        found = [getattr(torch, kind).get_device_properties(number) for number in range(several)]
        names = Counter(f"{each.name}, {each.total_memory / 2**30:.0f} GiB" for each in found)
        rows = [("devices", f"{n} x {name}") for name, n in names.items()]
        if devices.ranks_per_device() > 1:
            rows.append(("ranks on each device", str(devices.ranks_per_device())))
        rows.append(("driver", _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")))
        rows.append(("CUDA, ROCm", f"{torch.version.cuda}, {torch.version.hip}"))
        if kind == "cuda":
            rows.append(("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
            if several > 1:
                rows.append(("between devices", _output("nvidia-smi", "topo", "-m")))
    machine = report([], quick=False).machine
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return [
        *rows,
        ("processor", f"{machine.cores} cores of {machine.processor}"),
        ("system", machine.system),
        ("PyTorch, Python", f"{machine.torch}, {platform.python_version()}"),
        ("terrazzo", f"{__version__}, commit {commit}{', with changes' if changed else ''}"),
    ]


def _output(*command: str) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        return re.sub(r"\x1b\[[0-9;]*m", "", found).strip() or "not known"
    except (OSError, subprocess.TimeoutExpired):
        return "not known"


def written(
    tests: Sequence[Test],
    results: Sequence[Result],
    where: Sequence[tuple[str, str]],
    began: datetime.datetime,
    quick: bool,
) -> str:
    """The page."""
    lines = [
        "# On accelerators",
        "",
        f"`make gpu` wrote this page: {began:%Y-%m-%d %H:%M}{', small problems (`--quick`)' if quick else ''}.",
        "",
        *table({"": [name for name, _ in where], "what": [_cell(value) for _, value in where]}),
        "",
        "## Tests",
        "",
        f"{counted(tests)}.",
        "",
        *table(
            {
                "test": [f"`{test.name}`" for test in tests],
                "": [test.outcome for test in tests],
                "seconds": [f"{test.seconds:.1f}" for test in tests],
                "why": [_cell(test.why) for test in tests],
            }
        ),
        "",
        "## Benchmarks",
        "",
        "Medians; where there are several devices, one rank on each. How cases are written and what the columns mean",
        "is said in `benchmarks/__init__.py`; `/ torch` is terrazzo's time over PyTorch's.",
    ]
    for topic, group in groupby(results, key=lambda result: result.name.partition(".")[0]):
        of_topic = list(group)
        lines += ["", f"### {topic}", "", *table(columns_of(of_topic))]
        # Of files only their names: where this machine has them says nothing to others.
        errors = {r.name: re.sub(r'File "[^"]*/', 'File "', r.error) for r in of_topic if r.error is not None}
        lines += [f"\n{name} failed: {_cell(error)}" for name, error in errors.items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text of one line, without what has a meaning in tables.

    >>> _cell("RanksFailed: 1 of 2\\n| rank 0")
    'RanksFailed: 1 of 2 / \\\\| rank 0'
    """
    lines = " / ".join(line.strip() for line in text.strip().splitlines())
    return (lines if len(lines) <= 400 else lines[:400] + " ...").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    app()
