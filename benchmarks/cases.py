"""What a benchmark is: a case, its implementations, its budget, and the register of all cases."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import msgspec
import torch

OURS = "terrazzo"

Measure = Literal["overhead", "time", "speed", "value"]
RunsOn = Literal["cpu", "accelerator", "both"]


class Budget(msgspec.Struct, frozen=True):
    """A limit to keep: at least `limit` for `speed`, at most for other measures. `of` names who is compared with."""

    measure: Measure
    limit: float
    of: str = "torch"

    def kept(self, measured: float) -> bool:
        return measured >= self.limit if self.measure == "speed" else measured <= self.limit

    def __str__(self) -> str:
        relation = ">=" if self.measure == "speed" else "<="
        of = f" of {self.of}" if self.measure != "value" else ""
        return f"{self.measure} {relation} {self.limit:g}{of}"


@dataclass(frozen=True)
class Setting:
    """Where a case runs. `folder` is empty, shared by the ranks and removed afterwards.

    `quick` asks for a small problem. `device` is this rank's.
    """

    rank: int
    world: int
    folder: Path
    quick: bool
    device: torch.device = torch.device("cpu")


@dataclass(frozen=True)
class Prepared:
    """An implementation that needs something done, untimed, before every sample. Each sample is then a single call."""

    run: Callable[[], object]
    before: Callable[[], object]


Implementations = Mapping[str, Callable[[], object] | Prepared]


@dataclass(frozen=True)
class Case:
    name: str
    module: str
    function: Callable[[Setting], Implementations]
    world: int
    unit: str
    repetitions: int
    budget: Budget | None
    runs_on: RunsOn = "cpu"
    imitable: bool = True


_cases: dict[str, Case] = {}


def case(
    *,
    world: int = 1,
    unit: str = "s",
    repetitions: int = 21,
    budget: Budget | None = None,
    name: str | None = None,
    runs_on: RunsOn = "cpu",
    imitable: bool = True,
) -> Callable[[Callable[[Setting], Implementations]], Callable[[Setting], Implementations]]:
    """Registers a function as the case `<topic>.<name>`, the topic being that of its module `bench_<topic>`.

    On accelerators a case for several ranks has one for each device, and no budget: those are for gloo and the CPU.
    A case that is not `imitable` needs a real one.
    """

    def register(function: Callable[[Setting], Implementations]) -> Callable[[Setting], Implementations]:
        topic = function.__module__.rpartition(".")[2].removeprefix("bench_")
        full_name = f"{topic}.{name or function.__name__}"
        if full_name in _cases:
            raise ValueError(f"there are two benchmark cases named {full_name!r}")
        _cases[full_name] = Case(
            full_name, function.__module__, function, world, unit, repetitions, budget, runs_on, imitable
        )
        return function

    return register


def load(modules: Iterable[str]) -> None:
    """Imports the modules, which registers their cases."""
    for module in modules:
        importlib.import_module(module)


def modules_here() -> list[str]:
    """The names of all `bench_<topic>` modules of this package."""
    found = pkgutil.iter_modules([str(Path(__file__).parent)])
    return [f"{__package__}.{module.name}" for module in found if module.name.startswith("bench_")]


def get(name: str) -> Case:
    return _cases[name]


def select(patterns: Iterable[str], runs_on: Literal["cpu", "accelerator"] = "cpu") -> list[Case]:
    """The cases named in full, by topic or with wildcards, in the order of their registration; all without patterns.

    Raises `LookupError` for a pattern that names none of those that run there.
    """
    there = [case for case in _cases.values() if case.runs_on in (runs_on, "both")]
    chosen: set[str] = set()
    for pattern in patterns:
        found = [c.name for c in there if c.name.startswith(f"{pattern}.") or fnmatchcase(c.name, pattern)]
        if not found:
            names = ", ".join(case.name for case in there) or "none at all"
            raise LookupError(f"no benchmark case for the {runs_on} is named {pattern!r}; there are {names}")
        chosen.update(found)
    return [case for case in there if not chosen or case.name in chosen]
