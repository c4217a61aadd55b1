"""What the tests of another project's files came to, and names that neither library has."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

Outcomes = dict[str, list[str]]  # by test: passed, failed or skipped, and why


class Absent:
    """A name that no installed library has; tests may import it, and fail when they use it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._name} is in no installed library")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class Kept(unittest.TestResult):
    """Outcomes by test; with `part`, in that file as soon as they are known."""

    def __init__(self, part: Path | None = None) -> None:
        super().__init__()
        self._part = part
        self.outcomes: Outcomes = {}

    def _keep(self, test: unittest.TestCase, outcome: str, why: str) -> None:
        self.outcomes[".".join(test.id().split(".")[-2:])] = [outcome, why]
        if self._part is not None:
            self._part.write_text(json.dumps(self.outcomes, indent=1))

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._keep(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._keep(test, "skipped", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._keep(test, "failed", "".join(traceback.format_exception(*err)))

    addFailure = addError

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._keep(test, "passed", "")


def end_with_parent() -> None:
    """Have this process end when the one that forked it does, which may be killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, of Linux


def begin(path: Path) -> None:
    """In a forked process: it ends with its parent, what it prints goes beside `path`, and torch has one thread."""
    import torch

    end_with_parent()
    os.setpgid(0, 0)
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)


def outcomes_of(
    run: Callable[[Path, str, str, Path], None],
    source: Path,
    file: str,
    peer: str,
    results: Path,
    limit: float,
    keep: bool,
) -> Outcomes:
    """The outcomes of one file on one of the two libraries, which `run` writes; with `keep`, those of last time."""
    path = results / peer / (file.removesuffix(".py").replace("/", ".") + ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # what `run` may write to: a file that was cut off with this program is run again
    if not (keep and path.exists()):
        path.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
        # Forked, because importing torch and terrazzo takes longer than most files.
        process = multiprocessing.get_context("fork").Process(target=run, args=(source, file, peer, path))
        process.start()
        process.join(limit)
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        if part.exists():
            part.replace(path)
        if not path.exists():
            path.write_text(json.dumps({"(the file)": ["failed", "it ended early, or ran into the time limit"]}))
    outcomes: Outcomes = json.loads(path.read_text())
    return outcomes


def counted(outcomes: Outcomes) -> str:
    return "/".join(str(sum(o[0] == kind for o in outcomes.values())) for kind in ("passed", "failed", "skipped"))
