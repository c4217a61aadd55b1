"""A tensor's way from `save` to the store and back: how many calls deep, and through which files."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import terrazzo
from terrazzo.checkpoint import load, save
from terrazzo.checkpoint.stores import LocalStore

_PACKAGE = Path(terrazzo.__file__).parent
_PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"


def walk(at: Callable[..., Any], found: list[list[str]]) -> Callable[..., Any]:
    """The function, which notes the package's files that are on the stack when it is called."""

    def noting(*arguments: Any, **named: Any) -> Any:
        files = [Path(frame.filename) for frame in traceback.extract_stack()]
        found.append([file.relative_to(_PACKAGE).as_posix() for file in files if file.is_relative_to(_PACKAGE)])
        return at(*arguments, **named)

    return noting


def test_the_walk_from_save_to_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.arange(300_000.0), "columns": torch.rand(600, 600).T}
    upload, read = type(LocalStore(tmp_path).upload("x", 1)), LocalStore.read
    writes: list[list[str]] = []
    reads: list[list[str]] = []
    monkeypatch.setattr(upload, "write", walk(upload.write, writes))
    monkeypatch.setattr(LocalStore, "read", walk(read, reads))
    save(state, checkpoint_id=tmp_path / "it", no_dist=True)
    load(state, checkpoint_id=tmp_path / "it", no_dist=True)
    assert writes and max(map(len, writes)) <= 15
    assert reads and max(map(len, reads)) <= 15
    page = _PAGE.read_text().partition("## A tensor from")[2].partition("\n## ")[0]
    named = {each.removeprefix("checkpoint/") for each in re.findall(r"`([a-z_/]+\.py)`", page)}
    passed = {file.removeprefix("checkpoint/") for files in writes + reads for file in files}
    assert not {file for file in passed if not file.startswith(("stores/", "_threads"))} - named
