"""How much memory reading and converting take besides the tensors that are read into: measured in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[3]
SIZE, COUNT = (1024, 2048), 11  # with the optimizer's state 264 MiB
MIB = 1 << 20


def resident(what: str) -> int:
    """Bytes of this process's memory: `VmRSS` at present, `VmHWM` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def growth(work: Callable[[], object]) -> int:
    """By how much memory grows at most while something is done."""
    Path("/proc/self/clear_refs").write_text("5")  # from here on
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def measure(folder: Path) -> None:
    """In the process of its own: prints what each kind of work took."""
    import torch

    from checkpoint.formats.deepspeed.made import state_of
    from terrazzo.checkpoint import load, save
    from terrazzo.checkpoint.formats import DeepSpeedReader
    from terrazzo.checkpoint.formats.convert import convert
    from terrazzo.layout.box import Box

    state = state_of({f"layer{number}": SIZE for number in range(COUNT)}, {})
    save(state, checkpoint_id=folder / "native", no_dist=True)
    target = {"module": state["module"], "optimizer": {"state": state["optimizer"]["state"]}}
    expected = target["optimizer"]["state"]["layer3"]["exp_avg"].clone()
    found: dict[str, int] = {}
    columns = Box((0, 512), (1024, 1024))
    read = torch.ones(columns.lengths)
    moment = target["optimizer"]["state"]["layer3"]["exp_avg"]
    for stage in (2, 3):
        tag = folder / f"stage{stage}"
        found[f"convert {stage}"] = growth(partial(convert, folder / "native", tag, "deepspeed", stage=stage))
        moment.zero_()
        found[f"load {stage}"] = growth(partial(load, target, checkpoint_id=tag, no_dist=True))
        assert torch.equal(moment, expected)
        reader = DeepSpeedReader(tag)
        reader.read_metadata()
        found[f"columns {stage}"] = growth(partial(reader.read_box, "optimizer.state.layer3.exp_avg", columns, read))
        assert torch.equal(read, expected[:, 512:1536])
    print(json.dumps(found))


@pytest.mark.long
def test_memory_is_bounded(tmp_path):
    script = "import sys; from checkpoint.formats.deepspeed.test_memory import *; measure(Path(sys.argv[1]))"
    paths = [str(TESTS), str(TESTS.parent / "src")]
    # What is freed goes back to the system at once: what one kind of work has used does not hide the next one's.
    memory = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, **memory, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # What the documentation says, and a little for the tables of contents and the interpreter.
    bounds = {"load": 8 * MIB, "columns": 8 * MIB, "convert": 16 * MIB}
    for name, taken in found.items():
        assert taken < bounds[name.split()[0]] + 4 * MIB, found
