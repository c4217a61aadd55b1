"""What the names in the texts of `operations` stand for: dims, shapes and operands that suit one tensor."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tests.tensor.fuzz import keys
from tests.tensor.fuzz.program import placements_for


class Draw:
    """Random choices."""

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def number(self, low: int, high: int) -> int:
        return self._source.randint(low, high)

    def pick(self, choices: Sequence[Any]) -> Any:
        return self._source.choice(choices)

    def chance(self, n: int) -> bool:
        """True once in n times."""
        return self._source.randrange(n) == 0

    def generator(self) -> random.Random:
        return self._source


class Maker(Protocol):
    """A program that is being made."""

    draw: Draw
    mesh: tuple[int, ...]
    everywhere: str
    variables: dict[str, torch.Tensor]

    def variable(self) -> str: ...
    def operand(self, part: torch.Tensor, target: torch.Tensor) -> str: ...
    def constant(self, t: torch.Tensor, smaller: bool = False) -> str: ...


class Filling:
    """What the names in a template stand for, for one tensor."""

    def __init__(self, maker: Maker, t: torch.Tensor) -> None:
        self._maker, self._draw, self._t = maker, maker.draw, t
        n = t.dim()
        self.d = maker.draw.number(-n, n - 1) if n else 0
        self.size = t.shape[self.d] if n else 1

    def fill(self, template: str) -> str:
        return re.sub(r"\$(\w+)", lambda match: str(getattr(self, match[1])), template)

    shape = property(lambda self: tuple(self._t.shape))
    dtype = property(lambda self: str(self._t.dtype))
    other_dtype = property(lambda self: self._draw.pick(("torch.float32", "torch.float64", "torch.int64")))
    any = property(lambda self: self._maker.variable())
    digit = property(lambda self: self._draw.number(1, 9))
    small = property(lambda self: self._draw.number(-2, 2))
    half = property(lambda self: self._draw.number(0, 1))
    window = property(lambda self: self._draw.number(1, 3))
    at = property(lambda self: self._draw.number(-self.size, max(self.size - 1, 0)))
    operand = property(lambda self: self._maker.operand(self._t, self._t))
    constant = property(lambda self: self._maker.constant(self._t))

    @property
    def e(self) -> int:
        return self._draw.number(-self._t.dim(), self._t.dim() - 1) if self._t.dim() else 0

    @property
    def partner(self) -> str:
        return self._draw.pick([n for n, v in self._maker.variables.items() if v.dtype == self._t.dtype] or ["'cpu'"])

    @property
    def same(self) -> str:
        """A tensor of the same shape that lies elsewhere."""
        alike = [
            n
            for n, v in self._maker.variables.items()
            if v.shape == self._t.shape and not shares_part(v, self._t, self._t)
        ]
        return self._draw.pick([*alike, self.constant])

    @property
    def sizes(self) -> list[int]:
        first = self._draw.number(0, self.size)
        return [first, self.size - first]

    @property
    def range(self) -> str:
        start = self._draw.number(0, self.size)
        length = self._draw.number(0, self.size - start)
        return f"{start - self.size if start and self._draw.chance(4) else start}, {length}"

    @property
    def factors(self) -> list[int]:
        return _factors(self._draw, self.size)

    @property
    def reshaped(self) -> tuple[int, ...]:
        """Dims merged, or one of them divided, or any other shape with as many elements."""
        shape = list(self._t.shape)
        kind, at = self._draw.number(0, 2), self.d % len(shape)
        if kind == 0 and at + 1 < len(shape):
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        elif kind == 1:
            shape[at : at + 1] = self.factors
        else:
            count = math.prod(shape)
            shape = self._draw.pick(([count], [1, count], [count, 1], _factors(self._draw, count), shape[::-1]))
        if self._draw.chance(4) and 0 not in shape:
            shape[self._draw.number(0, len(shape) - 1)] = -1
        return tuple(shape)

    @property
    def permuted(self) -> list[int]:
        dims = list(range(self._t.dim()))
        self._draw.generator().shuffle(dims)
        return dims

    @property
    def expanded(self) -> tuple[int, ...]:
        shape = [self._draw.pick((2, 3, -1) if n == 1 else (n, -1)) for n in self._t.shape]
        return tuple([2, *shape] if self._draw.chance(3) and len(shape) < 4 else shape)

    @property
    def row(self) -> str:
        """An index tensor with one entry along d."""
        return f"index([{self._draw.number(0, max(self.size - 1, 0))}]{self._maker.everywhere})"

    @property
    def row0(self) -> str:
        return f"index([0]{self._maker.everywhere})"

    @property
    def mask(self) -> str:
        if not self._t.dim():
            return f"index(True{self._maker.everywhere})"
        return keys.mask(self._draw, tuple(self._t.shape), self._maker.mesh, lists=False)

    @property
    def lane(self) -> str:
        """An index for scatter_: one entry along d, so that none is written twice."""
        if not self._t.dim() or not self._t.numel():
            return f"index(0{self._maker.everywhere})"
        at = torch.full(self._one_along_d(), self._draw.number(0, self.size - 1))
        return f"index({at.tolist()}{self._maker.everywhere})"

    @property
    def slab(self) -> str:
        shape = self._one_along_d()
        placed = placements_for(shape, False, len(self._maker.mesh), self._draw.generator())
        return f"leaf({shape}, {str(self._t.dtype)[6:]!r}, {placed})"

    def _one_along_d(self) -> tuple[int, ...]:
        shape = list(self._t.shape)
        if shape:
            shape[self.d] = 1
        return tuple(shape)


def _factors(draw: Draw, n: int) -> list[int]:
    first = draw.pick([k for k in range(1, n + 1) if n % k == 0] or [1])
    return [first, n // first]


def fits(shape: Sequence[int], to: Sequence[int]) -> bool:
    try:
        return torch.broadcast_shapes(tuple(shape), tuple(to)) == torch.Size(to)
    except RuntimeError:
        return False


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements have one place in memory other than by expanding, which one device refuses to write to."""
    if 0 in t.stride() or not t.numel():
        return False
    places = torch.zeros(t.shape, dtype=torch.int64)
    for d, (n, step) in enumerate(zip(t.shape, t.stride(), strict=True)):
        places += (torch.arange(n) * step).reshape([-1] + [1] * (t.dim() - d - 1))
    return len(places.unique()) != t.numel()


def shares_part(one: torch.Tensor, other: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether `one` has memory in common with `whole`, and is not just the same as `other`, a part of that."""
    if one.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return False
    return (one.shape, one.stride(), one.storage_offset()) != (other.shape, other.stride(), other.storage_offset())
