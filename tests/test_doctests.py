"""The examples in docstrings and in the documentation do what they show, in a world of one rank."""

from __future__ import annotations

import doctest
import importlib
import os
from pathlib import Path

import pytest

from ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def files_with_examples() -> list[str]:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(SOURCES / "terrazzo").rglob("*.py")]
    return sorted(str(file.relative_to(ROOT)) for file in documents if file.exists() and ">>> " in file.read_text())


def run_examples(file: str, folder: str) -> None:
    os.chdir(folder)
    path = ROOT / file
    if path.suffix == ".py":
        parts = path.relative_to(SOURCES).with_suffix("").parts
        module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
        tests = doctest.DocTestFinder(exclude_empty=True).find(module)
    else:
        # To doctest, a line that ends a code block would belong to the output above it.
        text = "\n".join("" if line.lstrip().startswith("```") else line for line in path.read_text().splitlines())
        tests = [doctest.DocTestParser().get_doctest(text, {}, file, str(path), 0)]
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in tests:
        runner.run(test)
    results = runner.summarize(verbose=False)
    assert results.attempted > 0, "an example that is not found is not tested"
    assert results.failed == 0, f"{results.failed} of {results.attempted} examples failed: see the output"


@pytest.mark.parametrize("file", files_with_examples())
def test_examples(file, tmp_path):
    run_ranks(1, run_examples, file, str(tmp_path))
