"""How `terrazzo ls` prints the folder of a run: its steps, their metrics, and what keeps them."""

from __future__ import annotations

from datetime import datetime

from rich.filesize import decimal as human_size
from rich.table import Table
from rich.text import Text

from terrazzo._meant import counted
from terrazzo.checkpoint.manager.records import Record, latest_of, rows_of
from terrazzo.cli.screen import OUT, print_json, shown


def list_steps(path: str, records: list[Record], *, json: bool) -> None:
    """Print them."""
    rows, latest = rows_of(path, records), latest_of(path)
    if json:
        print_json({"run": path, "latest": latest, "steps": rows})
        return
    metrics = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    table = Table("name", "saved", box=None, header_style="bold")
    for name in ("size", *metrics):
        table.add_column(Text(shown(name)), justify="right")
    table.add_column("kept")
    for row in rows:
        saved = datetime.fromtimestamp(row["saved"]).strftime("%Y-%m-%d %H:%M:%S")
        values = [f"{row['metrics'][name]:.6g}" if name in row["metrics"] else "" for name in metrics]
        why = ", ".join([*row["kept"], *(["latest"] if row["latest"] else [])])
        table.add_row(*map(Text, [row["name"], saved, human_size(row["bytes"]), *values, shown(why)]))
    OUT.print(table)
    OUT.print(f"{counted(len(rows), 'step')}; latest is {shown(latest or 'none')}", markup=False)
