"""The code on a page of the documentation: which blocks it has, and how they are run.

A page's blocks run in their order, in one folder of their own, which has a copy of `examples`, and in one namespace:

    ```python    with >>>: what is shown has to come out; without: it has to run through
    ```console   after each `$ ` a command, and then what it prints (`...` stands for anything, as in doctests)
    ```sh        commands, all of which have to succeed

What a reader need not see stands in a comment, which no reader sees:

    <!-- first: code -->           Python that runs before the next block
    <!-- file: run.toml -->        the next block is not run but written to this file
    <!-- alone -->                 the next block is a program: it runs in a process of its own
    <!-- not run: why -->          the next block cannot be run here
"""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LANGUAGES = ("python", "console", "sh")
DATA = ("text", "toml", "json", "svg")  # not run; a file if the page says so
_COMMAND_LIMIT = 300  # seconds
_NOTE = re.compile(r"<!--\s*(first|file|alone|not run)\b:?\s*(.*?)\s*-->", re.DOTALL)
# What torchrun tells a rank, and what a command must not take for its own.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class PageError(AssertionError):
    """A block of a page does not do what the page says."""


@dataclass(frozen=True)
class Block:
    """A block of code; `note` is what a comment before it says about it, and `value` what for."""

    file: str
    line: int
    language: str
    text: str
    note: str = ""
    value: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """All blocks of a page, hidden ones too; those that are directives of Sphinx are not among them."""
    file, found, note, value = str(path.relative_to(ROOT)), [], "", ""
    for token in MarkdownIt("commonmark").enable("table").parse(path.read_text()):
        line = (token.map or [0])[0] + 1
        if token.type == "html_block" and (comment := _NOTE.match(token.content)):
            note, value = comment.groups()
            if note == "first":
                found.append(Block(file, line, "python", value + "\n"))
                note = value = ""
        elif token.type in ("fence", "code_block"):
            language = token.info.strip() if token.type == "fence" else "indented"
            if not language.startswith("{"):
                found.append(Block(file, line + (token.type == "fence"), language, token.content, note, value))
            note = value = ""
    return found


def complaints_about(blocks: list[Block]) -> list[str]:
    """Blocks that are neither run nor say why not."""
    found = []
    for block in blocks:
        if block.language not in (*LANGUAGES, *DATA):
            found.append(f"{block.place}: a block of {block.language or 'no language'}, which nobody runs")
        if block.note == "not run" and len(block.value) < 10:
            found.append(f"{block.place}: is not run, and does not say why")
        if block.language == "console" and not block.text.startswith("$ "):
            found.append(f"{block.place}: a console begins with '$ '")
    return found


def run_page(file: str, folder: str, python: str = sys.executable) -> None:
    """Run a page's blocks, on a rank; `python` is what programs, `terrazzo` and `torchrun` run on."""
    os.chdir(folder)
    for command, module in (("python", ""), ("terrazzo", "-m terrazzo"), ("torchrun", "-m torch.distributed.run")):
        script = Path(".bin", command)
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nPYTHON_EXEC="{python}" exec "{python}" {module} "$@"\n')
        script.chmod(0o700)
    os.environ["PATH"] = f"{Path.cwd() / '.bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    shutil.copytree(ROOT / "examples", "examples", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    namespace: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks_of(ROOT / file):
        if block.note == "not run":
            continue
        if block.note == "file":
            Path(block.value).parent.mkdir(parents=True, exist_ok=True)
            Path(block.value).write_text(block.text)
        elif block.note == "alone":
            Path("alone.py").write_text(block.text)
            _check_command(block, "python alone.py", "")
        elif block.language == "python":
            _run_python(block, namespace)
        elif block.language == "console":
            for command, expected in _commands_in(block.text):
                _check_command(block, command, expected)
        elif block.language == "sh":
            _check_command(block, "set -e\n" + block.text, "")


def _run_python(block: Block, namespace: dict[str, Any]) -> None:
    if ">>> " not in block.text:
        exec(compile("\n" * (block.line - 1) + block.text, str(ROOT / block.file), "exec"), namespace)
        return
    test = doctest.DocTestParser().get_doctest(block.text, {}, block.file, str(ROOT / block.file), block.line - 1)
    test.globs = namespace
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(test, clear_globs=False)
    results = runner.summarize(verbose=False)
    if results.failed:
        raise PageError(f"{block.place}: {results.failed} of {results.attempted} examples failed: see the output")


def _commands_in(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines, count = part.splitlines(keepends=True), 1
        while lines[count - 1].rstrip().endswith("\\"):
            count += 1
        found.append(("".join(lines[:count]), "".join(lines[count:])))
    return found


def _check_command(block: Block, command: str, expected: str) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith("TORCHELASTIC_")
    }
    environment |= {
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": "120",
    }
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=_COMMAND_LIMIT
    )
    if done.returncode != 0:
        raise PageError(f"{block.place}: {command}ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    if expected.strip() and not doctest.OutputChecker().check_output(expected, done.stdout, FLAGS):
        raise PageError(f"{block.place}: {command}printed\n{done.stdout}{done.stderr}\ninstead of\n{expected}")
