"""The public surface is what tests/public_surface.txt says; every public module has a place in the reference."""

from __future__ import annotations

import difflib
import enum
import importlib
import re
from pathlib import Path

import pytest
import torch

from public_surface import PUBLIC, ROOT, SNAPSHOT, surface
from terrazzo.engine import ResumableSampler, WarmupLR
from terrazzo.engine.config import Batch
from terrazzo.publish import Channel


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


# Of these no object is shown: users subclass them, get them only to call them, or their base has it at run time.
WITHOUT_TEXT = {
    "terrazzo.checkpoint.stores.Lease", "terrazzo.checkpoint.stores.Upload",
    "terrazzo.layout.Placement", "terrazzo.tensor.Placement",
    "terrazzo.checkpoint.stores.GrowingUpload", "terrazzo.checkpoint.stores.MemoryUpload",
    "terrazzo.checkpoint.stores.ScatteredUpload", "terrazzo.comm.Pending",
    "terrazzo.deepspeed.DeepSpeedDataLoader", "terrazzo.deepspeed.utils.zero_to_fp32.PendingTensor",
    "terrazzo.fsdp.FSDPModule", "terrazzo.tensor.policy.describing",
    "terrazzo.integrations.lightning.FullyShardStrategy", "terrazzo.integrations.lightning.TerrazzoCheckpointIO",
}  # fmt: skip


def test_objects_of_public_classes_show_what_they_are():
    without = set()
    for line in SNAPSHOT.read_text().splitlines():
        if line.startswith("class "):
            path = line.removeprefix("class ").partition("(")[0]
            module, _, name = path.rpartition(".")
            try:
                found = getattr(importlib.import_module(module), name)
            except ModuleNotFoundError as error:  # what an integration is for, and is not installed
                assert "terrazzo" not in str(error.name)
                continue
            abstract = issubclass(found, enum.Enum | BaseException) or getattr(found, "_is_protocol", False)
            if not abstract and found.__repr__ is object.__repr__:
                without.add(path)
    assert without <= WITHOUT_TEXT, f"{without - WITHOUT_TEXT}: derive them from terrazzo.layout.drawing.ShownAsCall"
    weights = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    assert repr(WarmupLR(optimizer, warmup_num_steps=5)).startswith("WarmupLR(optimizer=<SGD>, ")
    channel = Channel("10.0.0.1:29600", secret="hidden")
    assert repr(channel) == "Channel(address='10.0.0.1:29600', bucket_bytes=67108864)"
    sampler = ResumableSampler(6, Batch(total=3, micro=3, accumulation=1), rank=0, ranks=1, seed=0)
    assert repr(sampler).startswith(
        "ResumableSampler(samples=6, batch=Batch(total=3, micro=3, accumulation=1), rank=0,"
    )
    assert "ResumableSampler(samples=6" in sampler._repr_html_()


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
