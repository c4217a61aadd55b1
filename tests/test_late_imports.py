"""`import terrazzo` costs nothing, and has all packages as attributes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from public_surface import PUBLIC

PROGRAM = """
import sys
import terrazzo

assert not {"torch", "numpy", "msgspec"} & set(sys.modules), "import terrazzo waits for nothing"
names = [name for name in dir(terrazzo) if not name.startswith("__")]
assert terrazzo.errors.TerrazzoError and terrazzo.layout.Box
assert "torch" not in sys.modules
assert not hasattr(terrazzo, "tensors") and "torch" not in sys.modules
checkpoint = terrazzo.checkpoint
assert checkpoint is sys.modules["terrazzo.checkpoint"]
print(*names)
"""


def test_packages_are_attributes_and_dir_shows_what_is_public():
    source = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    packages = {name.split(".")[1] for name in PUBLIC if "." in name}
    assert set(done.stdout.split()) == packages | {"compile", "compile_report", "install", "uninstall"}


def test_each_package_is_one():
    import terrazzo

    for name in dir(terrazzo):
        assert getattr(terrazzo, name) is not None or name in ("__cached__", "__builtins__")
    assert terrazzo.tensor.Shard(0) == terrazzo.layout.Shard(0)


def test_a_name_that_a_package_has_is_found_there():
    import terrazzo

    for name, hint in {
        "fully_shard": "there is terrazzo.fsdp.fully_shard",
        "save": "there is terrazzo.checkpoint.save",
        "initialize": "there is terrazzo.deepspeed.initialize and terrazzo.engine.initialize",
        "tensors": "did you mean tensor?",
    }.items():
        with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}; {hint}")):
            getattr(terrazzo, name)


IMPORTS_ALL = """
import importlib, sys
import torch

def asks(*_):
    raise AssertionError("torch has asked CUDA for its devices: this process cannot fork ranks that use them")

torch.cuda.is_available = torch.cuda.device_count = asks
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_imports_ask_for_no_device():
    """`terrazzo train` forks the ranks that it starts again from a process that has imported what they need."""
    source = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    command = [sys.executable, "-c", IMPORTS_ALL, *sorted(PUBLIC)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
