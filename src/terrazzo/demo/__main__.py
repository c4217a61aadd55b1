"""`python -m terrazzo.demo`: a small model sharded on four local ranks, beside the same model in one process.

It draws the layouts, trains both for a few steps, shows that their losses are the same numbers, and lists the bytes
that each collective moved.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from terrazzo.demo.ranks import Finished, Step, Study, run_rank

RANKS, STEPS, LIMIT = 4, 12, 300.0


def main() -> int:
    """Run the demo; 0 when the sharded model kept step with the single process."""
    console = Console()
    console.print(
        f"[bold]A two-layer transformer on {RANKS} local ranks[/bold]: a 2 x 2 mesh, data parallel x tensor parallel, "
        "gloo on the CPU"
    )
    with tempfile.TemporaryDirectory(prefix="terrazzo-demo-") as folder:
        return _run(console, Path(folder))


def _run(console: Console, folder: Path) -> int:
    context = multiprocessing.get_context("spawn")
    # The first rank reports, the others only work; a rank that ends early closes its end and is noticed.
    mine, theirs = context.Pipe(duplex=False)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    processes = [
        context.Process(
            target=run_rank, args=(rank, RANKS, STEPS, str(folder / "store"), theirs if rank == 0 else None)
        )
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        with console.status(f"starting {RANKS} ranks"):
            study = _expect(mine, Study)
        _show_study(console, study)
        steps = []
        with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as progress:
            bar = progress.add_task("training", total=STEPS)
            for _ in range(STEPS):
                step = _expect(mine, Step)
                steps.append(step)
                progress.update(bar, advance=1, description=f"step {step.number}  loss {step.sharded:.4f}")
        finished = _expect(mine, Finished)
    except EOFError:
        for process in processes:
            process.join(5)
        codes = [p.exitcode for p in processes]
        console.print(f"[red]a rank ended before the demo did; exit codes {codes}, their output is above[/red]")
        return 1
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    _show_losses(console, steps)
    _show_traffic(console, finished)
    worst = max(abs(s.sharded - s.single) for s in steps)
    good = worst < 1e-4 and finished.parameter_error < 1e-4
    verdict = "[green]the same model[/green]" if good else "[red]NOT the same model[/red]"
    console.print(
        f"{verdict}: losses differ by at most {worst:.1e}, parameters after {STEPS} steps by "
        f"{finished.parameter_error:.1e} "
        f"({time.monotonic() - started:.0f} s)"
    )
    return 0 if good else 1


def _expect(connection: Connection, kind: type) -> Any:
    if not connection.poll(LIMIT):
        raise EOFError
    message = connection.recv()
    assert isinstance(message, kind)
    return message


def _show_study(console: Console, study: Study) -> None:
    console.print(f"\n{study.parameters:,} parameters; what one rank holds of them: {study.held:,}")
    for picture in study.pictures:
        console.print(picture, highlight=False)


def _show_losses(console: Console, steps: list[Step]) -> None:
    table = Table(title="loss", title_justify="left")
    for name in ("step", "one process", "four ranks", "difference"):
        table.add_column(name, justify="right")
    for step in steps:
        table.add_row(
            str(step.number), f"{step.single:.6f}", f"{step.sharded:.6f}", f"{abs(step.single - step.sharded):.1e}"
        )
    console.print(table)


def _show_traffic(console: Console, finished: Finished) -> None:
    table = Table(title="what one rank sent in one step", title_justify="left")
    table.add_column("collective")
    for name in ("forward", "backward", "calls", "bytes"):
        table.add_column(name, justify="right")
    for kind, forward, backward, nbytes in finished.traffic:
        table.add_row(kind, str(forward), str(backward), str(forward + backward), f"{nbytes:,}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
