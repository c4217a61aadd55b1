"""What commands do for each tensor of a checkpoint, counted: calls of functions, which no busy machine changes."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from terrazzo.checkpoint import save
from terrazzo.cli import app

FEW, MANY = 2500, 4000  # `ls` lays fewer out as a table


def calls_of(arguments: list[str]) -> int:
    """How many functions a command calls."""
    count = 0

    def see(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    runner = CliRunner()
    assert runner.invoke(app, arguments).exit_code == 0  # what is imported or made once is not counted
    before = sys.getprofile()
    sys.setprofile(see)
    try:
        done = runner.invoke(app, arguments)
    finally:
        sys.setprofile(before)
    assert done.exit_code == 0, done.output
    return count


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    found = {}
    for count in (FEW, MANY):
        found[count] = str(tmp_path_factory.mktemp("many") / str(count))
        save({f"layers.{number}.w": torch.ones(4) for number in range(count)}, checkpoint_id=found[count])
    return found


# At 20,000 tensors 11, 17, 2.6 and 3.2 seconds were hundreds of calls for each; `diff` had 20 before it compared all
# digests at once.
@pytest.mark.parametrize(("command", "most"), [("ls", 40), ("diff", 15), ("show", 0.1), ("verify", 20)])
def test_more_tensors_cost_few_calls_each(folders: dict[int, str], command: str, most: float) -> None:
    counts = {}
    for number, folder in folders.items():
        more = {"diff": [folder], "show": ["layers.7.w"]}.get(command, [])
        counts[number] = min(calls_of([command, folder, *more]) for _ in range(2))
    assert (counts[MANY] - counts[FEW]) / (MANY - FEW) <= most, counts
