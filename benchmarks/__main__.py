"""`python -m benchmarks`: runs cases, prints their tables, and writes JSON if asked."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import cases
from benchmarks.markdown import update_page
from benchmarks.report import report, tables, write_json
from benchmarks.runner import run

app = typer.Typer(add_completion=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="Topics or cases, with wildcards; default all.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the results, with all samples, to this file.")] = None,
    page: Annotated[Path | None, typer.Option(help="Also write the tables into this page of Markdown.")] = None,
    quick: Annotated[bool, typer.Option(help="Small problems and few repetitions: does it run at all?")] = False,
    seconds: Annotated[float, typer.Option(help="After so long a case takes no more samples than it needs.")] = 60.0,
    limit: Annotated[float, typer.Option(help="Seconds after which a case has failed; the others go on.")] = 900.0,
    device: Annotated[
        str, typer.Option(help="Where to run: cpu, cuda and the like, or late, which imitates one.")
    ] = "cpu",
    list_only: Annotated[bool, typer.Option("--list", help="Name the cases and their budgets, and run none.")] = False,
) -> None:
    """Compares terrazzo with PyTorch and with plain tensors on this machine."""
    console, progress = Console(), Console(stderr=True)
    cases.load(cases.modules_here())
    try:
        chosen = cases.select(names or [], "cpu" if device == "cpu" else "accelerator")
    except LookupError as error:
        raise typer.BadParameter(str(error)) from None
    if list_only:
        for case in chosen:
            console.print(f"{case.name}  world {case.world}  {case.budget or ''}", highlight=False)
        return
    results = list(
        run(
            chosen,
            quick=quick,
            limit=limit,
            seconds=seconds,
            device=device,
            began=lambda case: progress.print(f"[dim]{case.name}"),
        )
    )
    for table in tables(results):
        console.print(table)
    failed = [result for result in results if result.error is not None]
    for result in failed:
        progress.print(f"{result.name}: {result.error}", markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        write_json(json, report(results, quick=quick))
    if page is not None:
        update_page(page, report(results, quick=quick), datetime.date.today())
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
