"""The page's data for a run: its checkpoints, its starts and restarts, and the loss across them.

The run's folder has the checkpoints with their metrics, and `terrazzo train`'s record of its starts. A monitor's CSV
file has the loss of each step. Every process that writes to it begins with a line of column names, which separates the
starts.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from terrazzo.checkpoint.manager.records import latest_of, rows_of, steps_at
from terrazzo.engine.config import read_config
from terrazzo.errors import ViewError
from terrazzo.launch.config import Run
from terrazzo.launch.history import read_history
from terrazzo.view.data.numbers import or_none, plain

_LOSS = "Train_Samples_train_loss.csv"


def segments_of(lines: Iterable[str], source: str) -> list[list[tuple[float, float]]]:
    """The points of a monitor's CSV file, one list for each process that wrote to it.

    >>> segments_of(["step,train_loss", "8,2.5", "16,2.25", "step,train_loss", "16,2.25"], "loss.csv")
    [[(8.0, 2.5), (16.0, 2.25)], [(16.0, 2.25)]]
    """
    found: list[list[tuple[float, float]]] = []
    for number, row in enumerate(csv.reader(lines), 1):
        if not row:
            continue
        if row[0] == "step":
            found.append([])
            continue
        try:
            point = float(row[0]), float(row[1])
        except (ValueError, IndexError) as error:
            raise ViewError(f"{source}, line {number}: expected a step and a number, not {row}") from error
        if not found:
            found.append([])
        found[-1].append(point)
    return [segment for segment in found if segment]


def run_data(
    folder: str | os.PathLike[str],
    *,
    losses: str | os.PathLike[str] | None = None,
    samples_per_step: int | None = None,
    title: str = "",
) -> dict[str, Any]:
    """The data of a run, of which `runs_data` makes a page.

    Args:
        folder: the folder of its checkpoints.
        losses: a CSV file of a monitor.
        samples_per_step: by how much the first column of that file increases in a step; None: unknown, so the chart
            is by samples.
        title: the title of the page.
    """
    path = os.fspath(folder)
    rows = rows_of(path, steps_at(path))
    history = read_history(path) if Path(path).is_dir() else []
    segments: list[list[tuple[float, float]]] = []
    if losses is not None:
        try:
            with open(losses, newline="", encoding="utf-8") as file:
                segments = segments_of(file, os.fspath(losses))
        except UnicodeDecodeError as error:
            raise ViewError(f"{os.fspath(losses)} is not a CSV file: {error}") from error
    if not rows and not history and not segments:
        raise ViewError(f"{path} is not a run's folder: it has neither checkpoints of numbered steps nor a history")
    return {
        "title": title or path,
        "latest": latest_of(path) if rows else None,
        "steps": [_of_step(row) for row in rows],
        "history": list(map(msgspec.structs.asdict, history)),
        "by_step": samples_per_step is not None,
        "losses": [[[at / (samples_per_step or 1), or_none(value)] for at, value in segment] for segment in segments],
    }


def runs_data(runs: Sequence[dict[str, Any]], title: str = "") -> dict[str, Any]:
    """The page's data for a run, or for several beside each other."""
    return {"kind_of_page": "run", "title": title or ", ".join(run["title"] for run in runs), "runs": list(runs)}


def _of_step(row: dict[str, Any]) -> dict[str, Any]:
    metrics = {name: plain(value) for name, value in row["metrics"].items()}
    return row | {"saved": or_none(row["saved"]), "metrics": metrics}


def data_of_run(run: Run, losses: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The data of the run of a `.toml` file; the loss comes from its `csv_monitor`."""
    config = read_config(run.engine)[0] if run.engine else None
    monitor = None if config is None else config.csv_monitor
    if losses is None and monitor is not None and monitor.enabled:
        file = Path(monitor.output_path) / monitor.job_name / _LOSS
        losses = next((each for each in (file, run.path.parent / file) if each.is_file()), None)
    return run_data(
        run.checkpoints,
        losses=losses,
        samples_per_step=None if config is None else config.train_batch_size,
        title=str(run.path),
    )
