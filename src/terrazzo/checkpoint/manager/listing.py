"""The steps of a run's folder, with metrics and reasons to keep them, for commands and the viewer."""

from __future__ import annotations

from typing import Any

from terrazzo.checkpoint.manager.records import Catalog, Record, read_reasons
from terrazzo.checkpoint.native.format import MANIFEST
from terrazzo.checkpoint.native.listing import NativeListing
from terrazzo.checkpoint.native.names import name_of_step, named_by_latest
from terrazzo.checkpoint.stores import Place
from terrazzo.errors import CheckpointFormatError


def steps_at(path: str) -> list[Record]:
    """The records of a run's folder, in order; none if it is another folder, or a checkpoint."""
    place = Place(path)
    if place.local is not None and not place.local.is_dir():
        return []
    if (place / MANIFEST).is_file():
        return []
    return sorted(Catalog(place).read(), key=lambda record: record.step)


def rows_of(path: str, records: list[Record]) -> list[dict[str, Any]]:
    """A row of a table for each record."""
    place = Place(path)
    reasons, latest = read_reasons(place), latest_of(path)
    return [
        {
            "step": record.step,
            "name": name_of_step(record.step),
            "saved": record.saved,
            "bytes": NativeListing((place / name_of_step(record.step)).store).total_bytes(),
            "metrics": record.metrics,
            "kept": reasons.get(record.step, []),
            "latest": name_of_step(record.step) == latest,
        }
        for record in records
    ]


def latest_of(path: str) -> str | None:
    """The name in `latest`, or None."""
    try:
        return next((folder.name for folder in named_by_latest(Place(path))), None)
    except CheckpointFormatError:
        return None
