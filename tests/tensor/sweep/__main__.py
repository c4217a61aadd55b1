"""`python -m tests.tensor.sweep` runs the whole sweep, on four local ranks; see docs/op-sweep.md.

python -m tests.tensor.sweep --write docs/op-sweep.md      all entries; writes the summary
python -m tests.tensor.sweep --entry gather --verbose      one entry, every finding
python -m tests.tensor.sweep --quick --dtype float16 --form out      a part of it, in fewer ways
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ranks
from tests.tensor.sweep.forms import FORMS
from tests.tensor.sweep.plan import full_plan, quick_plan
from tests.tensor.sweep.report import counted, show, summary
from tests.tensor.sweep.run import run_plan
from tests.tensor.sweep.samples import DTYPES, entries


def main(
    entry: Annotated[
        list[str] | None, typer.Option(help="Only these entries (a name, or a prefix ending in *).")
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples of each entry at each size.")] = 4,
    write: Annotated[Path | None, typer.Option(help="Where to write the summary.")] = None,
    seconds: Annotated[float, typer.Option(help="How long one entry may take.")] = 30,
    dtype: Annotated[list[str] | None, typer.Option(help="Only these dtypes.")] = None,
    form: Annotated[list[str] | None, typer.Option(help="Only these forms of the call.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer ways of distributing float32.")] = False,
    verbose: Annotated[bool, typer.Option(help="Print every finding, not the first of each entry.")] = False,
) -> None:
    """Run PyTorch's op database with distributed inputs and compare with one device."""
    ranks.preload("torch.testing._internal.common_methods_invocations")
    names = [e for e in entries() if not entry or any(e == w or (w[-1] == "*" and e.startswith(w[:-1])) for w in entry)]
    chosen = quick_plan if quick else full_plan
    plan = [
        (name, [c for c in chosen(name, samples) if c.dtype in (dtype or DTYPES) and c.form in (form or FORMS)])
        for name in names
    ]
    reports = run_plan(
        [item for item in plan if item[1]], seconds_per_entry=seconds, tell=lambda new: show(new, verbose)
    )
    ranks.close_all()
    print(counted(reports))
    if write is not None:
        extent = (
            f"each entry in each dtype and form {samples + 1} times, in ways, sizes and on meshes that rotate"
            if quick
            else f"for float32 {samples} samples of each entry at each of three sizes in every way, and each other "
            f"dtype and form {samples + 1} times"
        )
        write.write_text(summary(reports, extent, f" --quick --samples {samples}" if quick else ""))
    raise typer.Exit(1 if any(r.verdict == "wrong" for r in reports) else 0)


if __name__ == "__main__":
    typer.run(main)
