"""The report of `make gpu`, and what it says where it cannot run. `.ci/run` runs it whole, on the device `late`."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import cases, gpu
from benchmarks.report import failure_of, result_of

ROOT = Path(gpu.ROOT)
TESTS = """
import pytest

def test_good(): pass

def test_bad(): assert 1 == 2, "a | b"

def test_left_out(): pytest.skip("not here")

@pytest.mark.xfail
def test_known(): assert False

def test_after(): pass
"""


def test_every_test_is_reported(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=found.xml", "test_some.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    tests = gpu.tests_of(tmp_path / "found.xml")
    assert {test.name: test.outcome for test in tests} == {
        "test_some.test_good": "passed",
        "test_some.test_bad": "failed",
        "test_some.test_left_out": "skipped",
        "test_some.test_known": "failed as expected",
        "test_some.test_after": "passed",
    }
    case = cases.Case("topic.one", "module", lambda setting: {}, 2, "s", 3, None, "both")
    results = [result_of(case, {"terrazzo": [1.0, 1.0], "torch": [2.0, 2.0]}), failure_of(case, "no\nmemory")]
    text = gpu.written(tests, results, [("devices", "1 x A")], datetime.datetime(2030, 1, 2, 3, 4), quick=False)
    assert gpu.counted(tests) + "." in text and "5 tests: 2 passed, 1 failed" in text
    assert "| devices | 1 x A |" in text and "2030-01-02 03:04" in text
    assert "| `test_some.test_left_out` | skipped |" in text and "not here" in text
    assert "AssertionError: a \\| b" in text
    assert "| one | 2 | 1 s | 2 s | 0.5 |" in text and "topic.one failed: no / memory" in text
    failed = failure_of(case, 'File "/home/me/terrazzo/benchmarks/runner.py", line 7')
    text = gpu.written([], [failed], [], datetime.datetime(2030, 1, 2), quick=False)
    assert '\ntopic.one failed: File "runner.py", line 7' in text


def test_without_an_accelerator_it_says_what_it_needs(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    built_for = torch.accelerator.current_accelerator()  # a PyTorch for CUDA names it without a device, too
    for options, named in (([], built_for and f" '{built_for.type}'" or ""), (["--device", "cuda"], " 'cuda'")):
        ended = CliRunner().invoke(gpu.app, [*options, "--page", str(tmp_path / "page.md")])
        said = str(ended.exception)
        assert f"finds no accelerator{named} on this machine" in said and "needs one or more GPUs" in said
        assert not (tmp_path / "page.md").exists()


def test_an_interpreter_without_what_it_needs_is_refused():
    ended = subprocess.run([sys.executable, "-S", "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "cannot import torch, numpy" in ended.stderr and "installs nothing" in ended.stderr


def test_tests_that_do_not_end_well_are_a_failure(monkeypatch):
    monkeypatch.setattr(gpu.subprocess, "run", lambda *args, **options: subprocess.CompletedProcess(args, 137))
    assert gpu.run_tests("cuda") == [
        gpu.Test("pytest", "failed", 0.0, "it ended with status 137, so that tests may be missing here")
    ]
