"""`python -m tests.tensor.fuzz` runs random programs and prints those that come to something else than on one device.

python -m tests.tensor.fuzz --programs 10000      all of them; ends with status 1 if there is a fault
python -m tests.tensor.fuzz --seed 3 --stop 5     other programs, until five kinds of faults are found
python -m tests.tensor.fuzz --file program.txt    one program: `mesh = (4,)` and statements
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ranks
from tests.tensor.fuzz.program import Program
from tests.tensor.fuzz.run import Finding, make, run, shrink, verdict_of


def main(
    programs: Annotated[int, typer.Option(help="How many programs.")] = 1000,
    seed: Annotated[int, typer.Option(help="Which programs.")] = 0,
    stop: Annotated[int, typer.Option(help="End after this many kinds of faults.")] = 20,
    file: Annotated[Path | None, typer.Option(help="Run this program and no others.")] = None,
    show: Annotated[bool, typer.Option(help="Also say which errors were raised, and how often.")] = False,
) -> None:
    """Run random programs of tensor operations on meshes and on one device."""
    if file is not None:
        program = Program.parse(file.read_text())
        verdict = verdict_of(program)
        print(f"{verdict.at}\n{verdict.fault}" if verdict.fault else verdict)
        raise typer.Exit(1 if verdict.fault else 0)
    started = time.monotonic()
    count = done = both = 0
    raised: Counter[str] = Counter()
    found: dict[tuple[str, str], list[Finding]] = {}
    while count < programs and len(found) < stop:
        made = make(min(500, programs - count), 1000 * seed + count // 500)
        for program, verdict in run(made):
            count, done, both = count + 1, done + verdict.done, both + verdict.both
            raised.update(verdict.typed)
            if verdict.fault and len(found) < stop:
                finding = Finding(program, verdict.fault, verdict.at)
                alike = found.setdefault(finding.group, [])
                if len(alike) < 2:
                    finding = shrink(program, verdict.fault)
                    print(f"{finding}\n", flush=True)
                alike.append(finding)
        print(
            f"{count} programs, {time.monotonic() - started:.0f} s: {done} statements as on one device, {both} raise "
            f"there too, {sum(raised.values())} raise one of terrazzo's errors; "
            f"{sum(map(len, found.values()))} faults of {len(found)} kinds",
            file=sys.stderr,
            flush=True,
        )
    for message, times in raised.most_common() if show else ():
        print(f"{times:6d} {message}")
    for (operation, fault), findings in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(findings):6d} {operation}: {fault}")
        shortest = min(findings, key=lambda f: len(str(f.program)))
        print("\n".join(f"        {line}" for line in [*str(shortest.program).splitlines(), f"-> {shortest.fault}"]))
    ranks.close_all()
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
