"""The lease of a save belongs to the process that took it, whatever the format that it writes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from terrazzo.checkpoint import DefaultSavePlanner, FileSystemWriter
from terrazzo.checkpoint.formats import DCPWriter, HuggingFaceWriter


def leases(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".lease"))


@pytest.mark.parametrize("kind", [FileSystemWriter, DCPWriter, HuggingFaceWriter])
def test_a_copy_of_a_writer_holds_no_lease(tmp_path: Path, kind: Any) -> None:
    writer = kind(tmp_path)
    writer.set_up_storage_writer(True)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(2)}, None, True)
    (plan,) = writer.prepare_global_plan([planner.create_local_plan()])
    held = leases(tmp_path)
    assert len(held) == 1
    for other in (pickle.loads(pickle.dumps(writer)), copy.deepcopy(writer)):
        other.reset()
        assert leases(tmp_path) == held, "a copy has let go of what it never held"
    later = kind(tmp_path)
    later.set_up_storage_writer(True)
    assert set(held) <= set(leases(tmp_path)), "a save that is alive keeps its files"
    later.reset()
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    _, metadata = planner.create_global_plan([plan])
    writer.finish(metadata, [results])
    assert leases(tmp_path) == []
