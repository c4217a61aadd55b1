"""`python -m tests.tensor.sweep` runs the whole sweep, on four local ranks; see docs/op-sweep.md.

python -m tests.tensor.sweep --write docs/op-sweep.md      all entries; writes the summary
python -m tests.tensor.sweep --entry gather --verbose      one entry, every finding
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ranks
from tests.tensor.sweep.plan import full_plan
from tests.tensor.sweep.report import show, summary
from tests.tensor.sweep.run import run_plan
from tests.tensor.sweep.samples import entries


def main(
    entry: Annotated[
        list[str] | None, typer.Option(help="Only these entries (a name, or a prefix ending in *).")
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples of each entry at each size.")] = 4,
    write: Annotated[Path | None, typer.Option(help="Where to write the summary.")] = None,
    seconds: Annotated[float, typer.Option(help="How long one entry may take.")] = 30,
    verbose: Annotated[bool, typer.Option(help="Print every finding, not the first of each entry.")] = False,
) -> None:
    """Run PyTorch's op database with distributed inputs and compare with one device."""
    ranks._context.set_forkserver_preload([*ranks._PRELOAD, "torch.testing._internal.common_methods_invocations"])
    names = [e for e in entries() if not entry or any(e == w or (w[-1] == "*" and e.startswith(w[:-1])) for w in entry)]
    reports = run_plan([(name, full_plan(name, samples)) for name in names], seconds_per_entry=seconds, progress=True)
    ranks.close_all()
    show(reports, verbose)
    if write is not None:
        write.write_text(summary(reports, samples))
    raise typer.Exit(1 if any(r.verdict == "wrong" for r in reports) else 0)


if __name__ == "__main__":
    typer.run(main)
