"""What `terrazzo ls` prints for the folder of a run: its steps, their metrics, and why they are kept."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.filesize import decimal as human_size
from rich.table import Table
from rich.text import Text

from terrazzo.checkpoint import Checkpoint
from terrazzo.checkpoint.manager.records import Catalog, Record, read_reasons
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.names import name_of_step, named_by_latest
from terrazzo.checkpoint.stores import Place
from terrazzo.cli.screen import OUT, print_json, shown
from terrazzo.errors import CheckpointFormatError


def steps_at(path: str) -> list[Record]:
    """The steps that the folder of a run has, in order; none if it is another folder, or itself a checkpoint."""
    place = Place(path)
    if place.local is not None and not place.local.is_dir():
        return []
    if (place / MANIFEST).is_file():
        return []
    return sorted(Catalog(place).read(), key=lambda record: record.step)


def list_steps(path: str, records: list[Record], *, json: bool) -> None:
    """Print the steps."""
    place = Place(path)
    reasons = read_reasons(place)
    latest = _latest(place)
    rows: list[dict[str, Any]] = [
        {
            "step": record.step,
            "name": name_of_step(record.step),
            "saved": record.saved,
            "bytes": Checkpoint(place / name_of_step(record.step)).total_bytes(),
            "metrics": record.metrics,
            "kept": reasons.get(record.step, []),
            "latest": name_of_step(record.step) == latest,
        }
        for record in records
    ]
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
    OUT.print(f"{len(rows)} steps; latest is {shown(latest or 'none')}", markup=False)


def _latest(place: Place) -> str | None:
    """The step that `latest` names."""
    try:
        return next((folder.name for folder in named_by_latest(place)), None)
    except CheckpointFormatError:
        return None
