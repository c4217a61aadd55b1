"""The public surface is what tests/public_surface.txt says; every public module has a place in the reference."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from public_surface import PUBLIC, ROOT, SNAPSHOT, surface


def test_the_surface_has_not_changed_by_accident():
    before, now = SNAPSHOT.read_text().splitlines(), surface()
    gone = sorted(set(before) - set(now))
    new = sorted(set(now) - set(before))
    advice = "If it is meant, run: python tests/public_surface.py --write"
    assert not gone, "\n".join(["these are gone or changed, which breaks programs:", *gone, "now:", *new, advice])
    assert not new, "\n".join(["these are new:", *new, advice])
    assert list(difflib.unified_diff(before, now)) == []


def test_public_modules_are_in_the_reference():
    pages = (ROOT / "docs" / "api").glob("*.md")
    described = {name for page in pages for name in re.findall(r"automodule:: (\S+)", page.read_text())}
    assert set(PUBLIC) - described == {"terrazzo"}, "what this one has is described where it comes from"


def _sources(folder: Path, text: str) -> Path:
    (folder / "made").mkdir(exist_ok=True)
    (folder / "made" / "__init__.py").write_text(text)
    return folder


FIRST = """
from made.inner import Thing
__all__ = ["Thing", "call", "LIMIT"]
LIMIT: int = 3
def call(x: int, *, loud: bool = False) -> str: ...
def _private(): ...
"""
INNER = """
class Base:
    pass
class Thing(Base):
    def __init__(self, size: int) -> None: ...
    def grow(self, by: int = 1, /, *more: int) -> None: ...
    def _hidden(self): ...
"""


@pytest.mark.parametrize(
    ("old", "new", "gone"),
    [
        ("loud: bool = False", "loud: bool = True", "made.call(x: int, *, loud: bool = False) -> str"),
        ("-> str", "-> bytes", "made.call(x: int, *, loud: bool = False) -> str"),
        ('"LIMIT"]', "]", "made.LIMIT: int"),
        ("class Thing(Base)", "class Thing", "class made.Thing(Base)"),
        ("size: int", "size: float", "made.Thing.__init__(self, size: int)"),
        ("by: int = 1, /, ", "by: int = 1, ", "made.Thing.grow(self, by: int = 1, /, *more: int) -> None"),
        ("def _private", "def _other", None),
        ("def _hidden", "def _other", None),
    ],
)
def test_what_is_a_break(old, new, gone, tmp_path):
    def made(change):
        _sources(tmp_path, change(FIRST))
        (tmp_path / "made" / "inner.py").write_text(change(INNER))
        return set(surface(tmp_path, ("made",)))

    before, now = made(lambda text: text), made(lambda text: text.replace(old, new))
    assert before - now == ({gone} if gone else set())
