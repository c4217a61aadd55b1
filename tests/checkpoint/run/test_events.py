"""An error of a load is a line of the program's log; a program without a log has it in the exception alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import terrazzo.checkpoint as checkpoint
from ranks import run_ranks
from terrazzo.errors import CheckpointException


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check_a_missing_key(folder: str) -> None:
    checkpoint.save({"a": torch.ones(2)}, checkpoint_id=folder)
    shown, logged, before = Lines(), Lines(), logging.lastResort
    shown.setLevel(logging.WARNING)  # as it is by default; other tests may have made loggers tell more
    logging.lastResort = shown  # type: ignore[assignment]  # of what no handler takes, which goes to stderr
    try:
        for handlers in ([], [logged]):
            logging.getLogger().handlers[:] = handlers
            with pytest.raises(CheckpointException, match="b: not in the checkpoint"):
                checkpoint.load({"b": torch.ones(2)}, checkpoint_id=folder)
    finally:
        logging.lastResort = before
        logging.getLogger().handlers.clear()
    assert shown.lines == []
    assert len(logged.lines) == 1 and "b: not in the checkpoint" in logged.lines[0]


def test_an_error_is_logged_where_there_is_a_log(tmp_path: Path):
    run_ranks(1, check_a_missing_key, str(tmp_path / "a"))
