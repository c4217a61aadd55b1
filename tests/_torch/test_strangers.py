"""Nothing changes for a program whose tensors are not ours: it finds the same with and without the import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

KNOWN = {
    # Written in C, replaced by a function in Python.
    "torch.to_dlpack": "torch.utils.dlpack",
    "torch.utils.dlpack.to_dlpack": "torch.utils.dlpack",
}
"""What is different by design: public names, and the module that they then say they are from."""

PROGRAM = Path(__file__).with_name("stranger_program.py")
SOURCE = Path(__file__).resolve().parents[2] / "src"


PACKAGES = ("checkpoint", "engine", "fsdp", "tensor", "tensor.debug", "tensor.experimental", "tensor.parallel")


def run(*args):
    env = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run([sys.executable, str(PROGRAM), *args], capture_output=True, text=True, env=env, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(f"'{name}'" in done.stderr for name in args), done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


pytestmark = pytest.mark.long  # a program of two minutes of CPU time, twice


@pytest.fixture(scope="module")
def found():
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda args: run(*args), [(), [f"terrazzo.{name}" for name in PACKAGES]]))


def test_a_stranger_finds_what_it_found_without_the_import(found):
    without, with_import = found
    for name, home in KNOWN.items():
        assert with_import.pop(name)[1:4] == [home, "to_dlpack", "to_dlpack"]
        assert without.pop(name)
    changed = [
        f"{key}: {without.get(key)} -> {with_import.get(key)}"[:1500]
        for key in without | with_import
        if without.get(key) != with_import.get(key)
    ]
    assert not changed, "\n".join([f"{len(changed)} of {len(without)}", *changed[:40]])


def test_the_program_does_what_it_is_for(found):
    without, _ = found
    works = [key for key, value in without.items() if not (isinstance(value, list) and "Error: " in str(value[0])[:40])]
    for name in ("Adam None Wrapped", "Adam foreach Wrapped", "SGD None Noted", "compiled apply", "compiled Adam True"):
        assert name in works, without[name]
    assert without["Adam None Wrapped"][2]  # its subclass saw operators
    assert "Wrapped" in json.dumps(without["Adam None Wrapped"][0])
