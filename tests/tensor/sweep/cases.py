"""What the sweep runs and reports: cases of an entry, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """What identifies one run of one entry."""

    size: str
    sample: int
    mesh: str
    family: str
    seed: int = 0
    form: str = "plain"
    dtype: str = "float32"

    def __str__(self) -> str:
        form = ("" if self.form == "plain" else f", {self.form}") + (
            "" if self.dtype == "float32" else f", {self.dtype}"
        )
        return f"{self.size} sample {self.sample}, mesh {self.mesh}, {self.family} (seed {self.seed}){form}"


@dataclass
class Cell:
    """What the cases of one entry of one dtype in one form came to, by number."""

    right: int = 0
    raises: int = 0
    wrong: int = 0

    @property
    def verdict(self) -> str:
        return "wrong" if self.wrong else "raises" if self.raises else "right"


@dataclass
class Report:
    """What the cases of one entry came to."""

    name: str
    right: int = 0
    without_operand: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    raises: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    gathered: set[str] = field(default_factory=set)  # names of operations that had no rule
    random: bool = False
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)  # by dtype and form

    @property
    def verdict(self) -> str:
        if self.wrong:
            return "wrong"
        if self.raises:
            return "raises"
        return "right" if self.right or self.without_operand else "skipped"
