"""What is shown of objects."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import nn

from terrazzo.layout.drawing import ShownAsCall


class Counted(nn.Module):
    asked = 0

    def __repr__(self) -> str:
        Counted.asked += 1
        return "Counted()"


class Box(ShownAsCall):
    def __init__(self, held: object) -> None:
        self.held = held


@dataclass
class Record:
    parts: object


@pytest.mark.parametrize(
    ("held", "kind"),
    [
        (lambda: nn.Sequential(*(nn.Sequential(*(Counted() for _ in range(50))) for _ in range(50))), "Sequential"),
        (lambda: [[Counted() for _ in range(50)] for _ in range(50)], "list"),
        (lambda: {str(i): Counted() for i in range(5000)}, "dict"),
        (lambda: Record(tuple(Counted() for _ in range(5000))), "Record"),
    ],
)
def test_the_text_of_a_large_value_is_not_made(held, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "asked", 0)
    assert repr(Box(held())) == f"Box(held=<{kind}>)"
    assert Counted.asked == 0


def test_a_short_value_is_shown() -> None:
    assert repr(Box({"a": [1, 2]})) == "Box(held={'a': [1, 2]})"
    assert repr(Box(nn.Linear(2, 3))) == "Box(held=Linear(in_features=2, out_features=3, bias=True))"
    assert repr(Box(Record(None))) == "Box(held=Record(parts=None))"
    assert repr(Box("x" * 200)) == "Box(held=<str>)" and repr(Box("a\nb")) == r"Box(held='a\nb')"
    endless: list[object] = []
    endless.append(endless)
    assert repr(Box(endless)) == "Box(held=<list>)"
