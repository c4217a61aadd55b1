"""A program that uses torch's fully_shard, DTensor and checkpoints runs with its imports changed, with the same
numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks

PROGRAM = Path(__file__).with_name("training_program.py")
SWAPS = {
    "torch.distributed.fsdp": "terrazzo.fsdp",
    "torch.distributed.tensor": "terrazzo.tensor",
    "torch.distributed.checkpoint": "terrazzo.checkpoint",
}


def run(folder: str, swapped: bool) -> dict[str, Any]:
    source = PROGRAM.read_text()
    if swapped:
        for theirs, ours in SWAPS.items():
            source = re.sub(rf"^(from|import) {re.escape(theirs)}\b", rf"\1 {ours}", source, flags=re.MULTILINE)
        assert not re.search(r"^(from|import) torch\.distributed\.(fsdp|tensor|checkpoint)\b", source, re.MULTILINE)
    names: dict[str, Any] = {"__name__": f"program_{swapped}"}
    exec(compile(source, str(PROGRAM), "exec"), names)
    answers: dict[str, Any] = names["main"](folder)
    return answers


def check(folder: str) -> None:
    theirs = run(f"{folder}/theirs", False)
    ours = run(f"{folder}/ours", True)
    assert ours["names"] == theirs["names"]
    assert torch.equal(ours["words"], theirs["words"])
    assert ours["full"].keys() == theirs["full"].keys() and bool(ours["full"]) == (dist.get_rank() == 0)
    # Half precision in between: sums in another order round differently.
    for part in ("first", "second", "resumed"):
        assert ours[part] == pytest.approx(theirs[part], rel=5e-3), part
    assert ours["resumed"] == pytest.approx(ours["second"], rel=5e-3), "as if it had not been interrupted"
    for name, value in theirs["full"].items():
        torch.testing.assert_close(ours["full"][name], value, rtol=2e-2, atol=2e-3, msg=name)


@pytest.mark.long
def test_a_program_of_torchs_runs_with_its_imports_changed(tmp_path):
    run_ranks(4, check, str(tmp_path))
