"""Random programs for the fuzzer, made with hypothesis.

A program is made while it runs on one device, so that most statements fit the tensors that are there.  A few that one
device refuses are kept: the mesh has to refuse them as well.
"""

from __future__ import annotations

import re
import warnings

import torch
from hypothesis import strategies as st

from tests.tensor.fuzz import keys
from tests.tensor.fuzz.filling import Draw, Filling, fits, overlaps_itself, shares_part
from tests.tensor.fuzz.known import is_known
from tests.tensor.fuzz.operations import OF_SCALARS, OUTS, PARTS, QUESTIONS, SAME, VIEWS, WRITES
from tests.tensor.fuzz.program import MESHES, Program, compiled, is_variable, placements_for, plain

_MOST_ELEMENTS = 200
_RESHAPES = re.compile(r"\.(t|transpose|swapaxes|swapdims|squeeze|unsqueeze)_\(")
_DTYPES = ("float32",) * 8 + ("float64", "float16", "bfloat16", "int64", "int64", "int32", "bool", "complex64")
_SIZES = (1, 2, 3, 4, 4, 5, 6, 8)


@st.composite
def programs(draw: st.DrawFn, steps: int = 10) -> Program:
    """Programs of up to this many statements about one to three tensors.

    Hypothesis draws a generator and no more: programs that differ in a choice or two, which it likes to make, find
    little, and they are cut down as text.
    """
    maker = _Maker(Draw(draw(st.randoms(use_true_random=True))))
    for _ in range(maker.draw.number(1, 3)):
        maker.add_leaf()
    count = maker.draw.number(2, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4 * count):
            if maker.made >= count:
                break
            maker.add_step()
    return Program(maker.mesh, tuple(maker.steps))


class _Maker:
    """A program that is being made, and its variables on one device."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.mesh = draw.pick(MESHES)
        self.names = plain()
        self.variables: dict[str, torch.Tensor] = {}
        self.steps: list[str] = []
        self.made = 0
        self.gradients = draw.chance(4)
        self.everywhere = ", Replicate()" * len(self.mesh)  # arguments of `index`
        self._next = 0

    # -------------------------------------------------------------- statements

    def add_leaf(self) -> None:
        shape = tuple(self.draw.pick(_SIZES) for _ in range(self.draw.pick((1, 2, 2, 2, 3, 3))))
        dtype = "float32" if self.gradients else self.draw.pick(_DTYPES)
        placed = placements_for(shape, dtype in ("float32", "float64"), len(self.mesh), self.draw.generator())
        name = self.new_name()
        self.run(f"{name} = leaf({shape}, {dtype!r}, {placed}{', grad=True' if self.gradients else ''})")
        if self.gradients:
            self.run(f"{self.new_name()} = {name} * 1")

    def add_step(self) -> None:
        if not self.variables:
            return
        kind = self.draw.number(0, 19)
        step = None
        if kind <= 6:
            step = f"{self.new_name()} = {self.chain(1, 3)}"
        elif kind <= 11:
            step = self.written(self.chain(0, 3))
        elif kind <= 13:
            step = self.assigned(self.chain(0, 1))
        elif kind == 14:
            step = self.parts(self.chain(0, 1))
        elif kind == 15:
            step = self.out(self.chain(0, 1))
        elif kind == 16:
            return self.add_twins()
        elif kind == 17:
            name = self.variable()
            t = self.variables[name]
            placed = placements_for(tuple(t.shape), True, len(self.mesh), self.draw.generator())
            step = f"{self.new_name()} = place({name}, {placed})"
        elif kind == 18 and len(self.variables) > 2:
            step = f"del {self.variable()}"
        else:
            step = self.question(self.chain(0, 1))
        if step is not None:
            self.made += self.run(step)

    def add_twins(self) -> None:
        """Two indices that a cache could take for each other, one after the other."""
        name = self.variable()
        shape = tuple(self.variables[name].shape)
        if not shape:
            return
        pair = self.draw.pick(keys.twins(shape[0]))
        for k in pair if self.draw.chance(2) else reversed(pair):
            form = self.draw.number(0, 2)
            if form < 2:
                self.run(f"{self.new_name()} = {name}[{k}]", keep_errors=True)
            else:
                self.run(f"{name}[{k}] = {self.draw.number(1, 9)}", keep_errors=True)
        self.made += 2

    def run(self, step: str, keep_errors: bool = False) -> bool:
        """Add a statement after running it on one device, unless that raises; some of those are kept too."""
        if is_known(step):
            return False
        before = {n: t.detach().clone() for n, t in self.variables.items()}
        try:
            exec(compiled(step), self.names, self.variables)
        except SyntaxError:
            raise
        except Exception as error:
            if any(not torch.equal(t.detach(), before[n]) for n, t in self.variables.items()):
                return False  # it wrote a part of what it was to write
            if "refer to a single memory" in str(error) or not (keep_errors or self.draw.chance(8)):
                return False
            self.steps.append(step)
            return True
        too_big = False
        for name, value in list(self.variables.items()):
            if not is_variable(name):
                del self.variables[name]
            elif not isinstance(value, torch.Tensor):
                del self.variables[name]
                return False
            elif value.numel() > _MOST_ELEMENTS or value.dim() > 6:
                too_big = True
        self.steps.append(step)
        if too_big:
            names = [n for n, t in self.variables.items() if t.numel() > _MOST_ELEMENTS or t.dim() > 6]
            for name in names:
                del self.variables[name]
            self.steps.append("del " + ", ".join(names))
        return True

    def new_name(self) -> str:
        self._next += 1
        return f"v{self._next - 1}"

    def variable(self) -> str:
        return self.draw.pick(list(self.variables))

    def value(self, expression: str) -> torch.Tensor | None:
        """What an expression is on one device, if it is a tensor."""
        try:
            result = eval(expression, self.names, self.variables)
        except SyntaxError:
            raise
        except Exception:
            return None
        return result if isinstance(result, torch.Tensor) else None

    # -------------------------------------------------------------- expressions

    def chain(self, least: int, most: int) -> str:
        """A variable, or a view of a view (or the like) of one."""
        expression = self.variable()
        for _ in range(self.draw.number(least, most)):
            t = self.value(expression)
            if t is None:
                break
            expression = self.link(t, expression)
        return expression

    def link(self, t: torch.Tensor, expression: str) -> str:
        """An operation on the expression, of value t, that mostly gives a view."""
        kind = self.draw.number(0, 9)
        if kind <= 2:
            return f"{expression}[{keys.key(self.draw, tuple(t.shape), self.mesh, self.variables)}]"
        table = SAME if kind <= 4 else VIEWS if t.dim() else OF_SCALARS
        return self.filled(self.draw.pick(table), expression, t)

    def filled(self, template: str, expression: str, t: torch.Tensor) -> str:
        return Filling(self, t).fill(template).replace("{}", expression)

    # -------------------------------------------------------------- statements of each kind

    def written(self, target: str) -> str | None:
        """An in-place operation on an expression."""
        t = self.value(target)
        if t is None or overlaps_itself(t):
            return None
        step = self.filled(self.draw.pick(WRITES), target, t)
        unseen = self.gradients and self.draw.chance(3)
        # One device's gradient has the old shape then, which is wrong or raises later; ours follows the new shape.
        follows = t.requires_grad and _RESHAPES.search(step)
        return f"with torch.no_grad(): {step}" if unseen and not follows else step

    def out(self, target: str) -> str | None:
        t = self.value(target)
        if t is None or not t.numel() or overlaps_itself(t):
            return None
        return self.filled(self.draw.pick(OUTS), target, t)

    def assigned(self, target: str) -> str | None:
        draw = self.draw
        t = self.value(target)
        if t is None or overlaps_itself(t):
            return None
        k = keys.key(draw, tuple(t.shape), self.mesh, self.variables)
        part = self.value(f"{target}[{k}]")
        if part is None:
            return f"{target}[{k}] = 1"
        kind = draw.number(0, 5)
        if kind <= 1 or self._repeats(t, k):
            return f"{target}[{k}] = {draw.pick(('1', '2.0', 'True', 'torch.tensor(3)', 'index(4)'))}"
        if kind == 2:
            return f"{target}[{k}] {draw.pick(('+=', '*=', '-='))} {draw.number(1, 3)}"
        if kind == 3:
            return f"{target}[{k}] += {self.operand(part, t)}"
        return f"{target}[{k}] = {self.operand(part, t)}"

    def _repeats(self, t: torch.Tensor, k: str) -> bool:
        """Whether an index names an element twice: which of the values stays is not defined."""
        places = torch.arange(t.numel()).reshape(t.shape)
        chosen = eval(f"places[{k}]", {**self.names, **self.variables, "places": places}).flatten()
        return len(chosen.unique()) != len(chosen)

    def parts(self, source: str) -> str | None:
        """Several tensors, of which some are given names."""
        t = self.value(source)
        if t is None:
            return None
        call = self.filled(self.draw.pick(PARTS), source, t)
        try:
            count = len(list(eval(call, self.names, self.variables)))
        except SyntaxError:
            raise
        except Exception:
            count = 1
        names = [self.new_name() for _ in range(min(count, self.draw.number(1, 3)))]
        if not names:
            return f"q = len({call})"
        if self.draw.chance(4):
            return f"{names[0]} = {call}[{self.draw.number(-count, count - 1)}]"
        return f"{', '.join(names)}, *_ = {call}"

    def question(self, source: str) -> str | None:
        t = self.value(source)
        return None if t is None else f"q = {self.filled(self.draw.pick(QUESTIONS), source, t)}"

    # -------------------------------------------------------------- operands

    def operand(self, part: torch.Tensor, target: torch.Tensor) -> str:
        """An expression whose value can be broadcast to `part` of the tensor that is written to."""
        # From other parts of the memory that it writes to, an operation reads what it likes.
        fitting = [
            n for n, v in self.variables.items() if fits(v.shape, part.shape) and not shares_part(v, part, target)
        ]
        if fitting and not self.draw.chance(4):
            return self.draw.pick(fitting)
        return self.constant(part, smaller=self.draw.chance(3))

    def constant(self, t: torch.Tensor, smaller: bool = False) -> str:
        """A new tensor of t's shape, or of a smaller one that can be broadcast to it."""
        draw = self.draw
        shape = tuple(t.shape)
        if smaller:
            shape = tuple(1 if draw.chance(3) else n for n in shape[draw.number(0, len(shape)) :])
        dtype = str(t.dtype)[6:] if draw.number(0, 3) else "float32"
        placed = placements_for(shape, dtype in ("float32", "float64"), len(self.mesh), draw.generator())
        return f"leaf({shape}, {dtype!r}, {placed})"
