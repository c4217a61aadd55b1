"""Makes programs, sends them to ranks in batches, and cuts a failing one down to what it takes to fail."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, Phase, given, seed, settings

from ranks import RanksFailed, run_ranks
from tests.tensor.fuzz.check import Verdict, run_programs
from tests.tensor.fuzz.generate import programs
from tests.tensor.fuzz.program import Program, simplified


@dataclass
class Finding:
    """A program that came to something else than on one device."""

    program: Program
    fault: str
    at: str

    @property
    def group(self) -> tuple[str, str]:
        """By what faults are told apart: the operation, and what is said of it."""
        names = re.findall(r"(?:torch|F|copy|\.)\.?(\w+)\(", self.at)
        return names[-1] if names else self.at[:20], kind(self.fault)

    def __str__(self) -> str:
        return f"{self.program.script()}\n# at: {self.at}\n# {self.fault}"


def make(count: int, number: int = 0) -> list[Program]:
    """The same programs for the same arguments."""
    made: list[Program] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def collect(program: Program) -> None:
        made.append(program)

    collect()
    return made


def run(made: Sequence[Program], *, batch: int = 50) -> Iterator[tuple[Program, Verdict]]:
    """The verdict on each program, in groups of one mesh size."""
    for size in sorted({_ranks(p) for p in made}):
        group = [p for p in made if _ranks(p) == size]
        for start in range(0, len(group), batch):
            part = group[start : start + batch]
            try:
                verdicts = verdicts_of(part, timeout=60 + 2 * len(part))
            except RanksFailed:
                verdicts = [verdict_of(p) for p in part]
            yield from zip(part, verdicts, strict=True)


def verdict_of(program: Program) -> Verdict:
    """The verdict on one program; if ranks hang or die, that is it."""
    try:
        return verdicts_of([program], timeout=40)[0]
    except RanksFailed as failure:
        said = [line for line in str(failure).splitlines() if line.startswith("-> ")]
        return Verdict(fault=f"hangs or crashes: {said[-1] if said else str(failure)[-1500:]}")


def verdicts_of(part: Sequence[Program], timeout: float) -> list[Verdict]:
    with contextlib.redirect_stdout(io.StringIO()):  # what ranks say of faults is in the verdicts too
        everywhere = run_ranks(_ranks(part[0]), run_programs, list(part), timeout=timeout)
    return [max(verdicts, key=lambda v: len(v.fault)) for verdicts in zip(*everywhere, strict=True)]


def shrink(program: Program, fault: str) -> Finding:
    """The program without what the fault does not need."""
    verdict = verdict_of(program)
    if not verdict.fault:
        return Finding(program, fault + " (not when run alone)", "")
    # Hangs take a time limit each.
    for candidates in (_shorter,) if verdict.fault.startswith("hangs") else (_shorter, _simpler, _shorter):
        smaller = True
        while smaller:
            smaller = False
            for candidate in candidates(program):
                again = verdict_of(candidate)
                if again.fault and kind(again.fault) == kind(verdict.fault):
                    program, verdict, smaller = candidate, again, True
                    break
    return Finding(program, verdict.fault, verdict.at)


def _shorter(program: Program) -> Iterator[Program]:
    for i in reversed(range(len(program.steps))):
        yield replace(program, steps=program.steps[:i] + program.steps[i + 1 :])


def _simpler(program: Program) -> Iterator[Program]:
    for i, step in enumerate(program.steps):
        if same := re.fullmatch(r"(v\d+) = (v\d+)", step):
            rest = [re.sub(rf"\b{same[1]}\b", same[2], s) for s in program.steps[i + 1 :]]
            yield replace(program, steps=(*program.steps[:i], *rest))
        for simpler in simplified(step):
            yield replace(program, steps=(*program.steps[:i], simpler, *program.steps[i + 1 :]))


def kind(fault: str) -> str:
    """What two faults of one sort have in common: their words up to where values begin."""
    return re.sub(r"\bv?\d+\b", "#", re.split(r"here instead| \(|: ", fault.removeprefix("run again: "))[0])[:60].split(
        "["
    )[0]


def _ranks(program: Program) -> int:
    return math.prod(program.mesh)
