"""Runs on every rank: programs with DTensors beside the same programs on one device.

After each statement every live tensor is compared: shape, dtype, whether it requires a gradient, and the values that
this rank holds.  At the end whole tensors and the gradients of leaves are compared too.  A statement or a comparison
may raise one of `terrazzo.errors` instead: then the statement has not happened, or the variable is dropped, on both
sides.  It may raise what one device raises.  All else is a fault, as are ranks that differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from terrazzo.errors import TerrazzoError
from terrazzo.layout import Partial, Replicate
from terrazzo.tensor import DTensor, init_device_mesh
from terrazzo.tensor.copied_view import CopiedView
from terrazzo.tensor.dispatch.keys import routes
from terrazzo.tensor.strides import repeats
from tests.tensor.fuzz.program import Program, compiled, distributed, is_variable, plain, variables_read
from tests.tensor.sweep.placing import distribute

_SAME, _TYPED, _BOTH, _SKIPPED, _FAULT = range(5)
_MOST = 60  # variables of a program at most
# Between tensors that overlap one device often refuses to copy, and what it would give otherwise is not defined.
# One device writes to expanded memory here and refuses it there; to refuse it is always right.
_EXPANDED = "more than one element of the written-to tensor refers to a single memory"
# What backward keeps is a copy on the mesh; one device loses track of a shape that was changed without a graph.
_ONLY_ON_ONE_DEVICE = (
    "needed for gradient computation has been modified by an inplace operation",
    "invalid gradient at index",
)
_UNDEFINED_ON_ONE_DEVICE = "some elements of the input tensor and the written-to tensor refer to a single memory"


@dataclass
class Verdict:
    """What became of a program on a rank."""

    fault: str = ""
    at: str = ""  # the statement
    done: int = 0  # statements with the results of one device
    typed: dict[str, int] = field(default_factory=dict)  # statements that raised one of terrazzo's errors, by message
    both: int = 0  # statements that raise on one device too


class _Fault(Exception):
    pass


@lru_cache(maxsize=4)
def _mesh(sizes: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", sizes)


def run_programs(programs: Sequence[Program]) -> list[Verdict]:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_run_program(program) for program in programs]


def _run_program(program: Program) -> Verdict:
    """Twice: first every call is planned, then it runs as planned."""
    routes.clear()
    verdict = Verdict()
    for turn in ("", "run again: "):
        run = _Run(program, verdict)
        try:
            run.run()
        except _Undefined:
            break
        except _Fault as fault:
            verdict.fault = turn + str(fault)
            verdict.at = run.at
            # Should this rank be the only one, the others wait for it until the time limit; then this explains why.
            print(f"{program}\n-> {verdict.at}: {verdict.fault}", flush=True)
            break
    return verdict


class _Run:
    """One run of a program."""

    def __init__(self, program: Program, verdict: Verdict) -> None:
        self.program, self.verdict = program, verdict
        self.mesh = _mesh(program.mesh)
        self.names = distributed(self.mesh), plain()
        self.mine: dict[str, Any] = {}
        self.theirs: dict[str, Any] = {}
        self.at = ""

    def run(self) -> None:
        for step in self.program.steps:
            self.at = step
            self._agree([self._step(step)])
            self._drop(self._agree([self._same(name) for name in self._live()]))
        self.at = "the whole tensors at the end"
        self._drop(self._agree([self._same(name, whole=True) for name in self._live()]))
        self.at = "the gradients at the end"
        self._agree([self._gradients()])

    def _live(self) -> list[str]:
        return list(self.theirs)

    # -------------------------------------------------------------- what ranks do together

    def _agree(self, mine: Sequence[tuple[int, str]]) -> list[int]:
        """The outcomes, which must be the same on all ranks."""
        codes = torch.full((_MOST,), -1)
        codes[: len(mine)] = torch.tensor([code for code, _ in mine], dtype=torch.int64)
        everyone = [torch.empty_like(codes) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, codes)
        for code, message in mine:
            if code == _FAULT:
                raise _Fault(message)
        if any(bool((c == _FAULT).any()) for c in everyone):
            raise _Fault("")  # another rank's verdict says what
        if not all(torch.equal(c, codes) for c in everyone):
            messages = [message for _, message in mine if message]
            raise _Fault(f"ranks differ: {[c[: len(mine)].tolist() for c in everyone]} {'; '.join(messages)}")
        return [code for code, _ in mine]

    def _drop(self, codes: Sequence[int]) -> None:
        for name, code in zip(self._live(), codes, strict=True):
            if code != _SAME:
                del self.mine[name], self.theirs[name]

    # -------------------------------------------------------------- one statement

    def _step(self, step: str) -> tuple[int, str]:
        if not variables_read(step) <= self.theirs.keys():
            return _SKIPPED, ""
        error = _execute(step, self.names[0], self.mine)
        if error is not None and (issubclass(error[0], TerrazzoError) or _EXPANDED in error[1]):
            said = f"{error[0].__name__}: {error[1][:80]}"
            self.verdict.typed[said] = self.verdict.typed.get(said, 0) + 1
            return _TYPED, ""
        expected = _execute(step, self.names[1], self.theirs)
        if expected is not None and _UNDEFINED_ON_ONE_DEVICE in expected[1]:
            raise _Undefined
        if error is None and expected is None:
            self.verdict.done += 1
            return self._answers(step)
        if error is None:
            assert expected is not None
            return _FAULT, f"one device raises {expected[0].__name__} ({expected[1][:200]}), the mesh does not"
        if expected is None:
            return _FAULT, f"raises {error[0].__name__}: {error[1][:400]}"
        if not issubclass(error[0], expected[0]):
            return _FAULT, (
                f"raises {error[0].__name__} ({error[1][:300]}) instead of {expected[0].__name__} ({expected[1][:200]})"
            )
        self.verdict.both += 1
        return _BOTH, ""

    def _answers(self, step: str) -> tuple[int, str]:
        """Compare what is no tensor and drop it."""
        for name in [name for name in self.theirs if not is_variable(name)]:
            mine, theirs = self.mine.pop(name), self.theirs.pop(name)
            if name == "_":  # what was left over when some parts were given names
                continue
            if ".is_contiguous()" in step and any(self._is_copied_expanded(read) for read in variables_read(step)):
                continue  # the copy has each element once in its memory, and is contiguous
            if type(mine) is not type(theirs) or repr(mine) != repr(theirs):
                return _FAULT, f"{mine!r} instead of {theirs!r}"
        return _SAME, ""

    def _is_copied_expanded(self, name: str) -> bool:
        theirs = self.theirs[name]
        return type(self.mine[name]) is CopiedView and repeats(theirs, theirs.shape)

    # -------------------------------------------------------------- comparisons

    def _same(self, name: str, whole: bool = False) -> tuple[int, str]:
        mine, theirs = self.mine[name], self.theirs[name]
        if not isinstance(mine, DTensor):
            return _FAULT, f"{name} is a {type(mine).__name__}, not a DTensor"
        forbidden = None  # several views made by one function may not be used after a write
        try:
            theirs.clone()
        except RuntimeError as error:
            forbidden = error
        try:
            local = mine.full_tensor() if whole else mine._local
            local.clone()
        except TerrazzoError:
            return _TYPED, ""
        except Exception as error:
            if forbidden is not None and isinstance(error, type(forbidden)):
                return _BOTH, ""
            return _FAULT, f"{name} cannot be looked at: {type(error).__name__}: {error}"
        if forbidden is not None:
            return _BOTH, ""
        layout = mine._layout
        if tuple(mine.shape) != tuple(theirs.shape) or mine.dtype != theirs.dtype:
            return _FAULT, (
                f"{name} is {tuple(mine.shape)} {mine.dtype} instead of {tuple(theirs.shape)} {theirs.dtype}"
            )
        if mine.requires_grad != theirs.requires_grad:
            return _FAULT, f"{name}: requires_grad is {mine.requires_grad}"
        if not whole and any(isinstance(p, Partial) for p in layout.placements):
            return _SAME, ""
        expected = theirs.detach() if whole else theirs.detach()[layout.box().slices()]
        return _alike(name, local.detach(), expected)

    def _gradients(self) -> tuple[int, str]:
        leaves = [n for n in self._live() if self.theirs[n].requires_grad and self.theirs[n].is_leaf]
        roots = [n for n in self._live() if self.theirs[n].requires_grad]
        if not leaves:
            return _SAME, ""
        weights = [_weights(self.theirs[n]) for n in roots]
        error = expected = None
        try:
            everywhere = [Replicate()] * self.mesh.ndim
            given = [distribute(w, self.mesh, list(everywhere)) for w in weights]
            torch.autograd.backward([self.mine[n] for n in roots], given)
        except TerrazzoError:
            return _TYPED, ""
        except Exception as raised:
            error = raised
        try:
            torch.autograd.backward([self.theirs[n] for n in roots], weights)
        except Exception as raised:
            expected = raised
        if error is not None and expected is not None:
            return _BOTH, ""
        if error is not None:
            return _FAULT, f"backward raises {type(error).__name__}: {error}"
        if expected is not None and any(words in str(expected) for words in _ONLY_ON_ONE_DEVICE):
            return _BOTH, ""
        if expected is not None:
            return _FAULT, f"one device raises {type(expected).__name__} ({expected}), the mesh does not"
        for n in leaves:
            if any(p.is_partial("product") for p in self.mine[n].placements):
                continue  # the gradient of a product is not known from those of its factors
            mine, theirs = self.mine[n].grad, self.theirs[n].grad
            if theirs is None:
                theirs = torch.zeros_like(self.theirs[n])
            if mine is None:
                return _FAULT, f"{n} has no gradient"
            code, message = _alike(f"the gradient of {n}", mine.full_tensor(), theirs)
            if code == _FAULT:
                return code, message
        return _SAME, ""


class _Undefined(Exception):
    """One device gives no defined result: nothing more can be said of the program."""


def _execute(step: str, names: dict[str, Any], variables: dict[str, Any]) -> tuple[type[Exception], str] | None:
    """The error that a statement raised; without its traceback, which would keep temporaries alive."""
    try:
        exec(compiled(step), names, variables)
    except Exception as error:
        return type(error), " ".join(str(error).split())
    return None


def _alike(what: str, mine: torch.Tensor, theirs: torch.Tensor) -> tuple[int, str]:
    if mine.shape != theirs.shape:
        return _FAULT, f"{what} has {tuple(mine.shape)} here instead of {tuple(theirs.shape)}"
    equal = (mine == theirs) | ((mine != mine) & (theirs != theirs))
    if bool(equal.all()):
        return _SAME, ""
    if not mine.is_floating_point() and not mine.is_complex():
        # Floats looked at as integers: terms that cancel give a zero of either sign.
        close = mine.dtype in _SIGNED and bool((equal | _zeros_of_floats(mine, theirs)).all())
    else:
        close = torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
    if close:
        return _SAME, ""
    return _FAULT, f"{what} is {mine.tolist()} here instead of {theirs.tolist()}"[:600]


_SIGNED = (torch.int16, torch.int32, torch.int64)


def _zeros_of_floats(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    negative = torch.iinfo(a.dtype).min
    return ((a == 0) & (b == negative)) | ((a == negative) & (b == 0))


def _weights(like: torch.Tensor) -> torch.Tensor:
    return (torch.arange(like.numel()).reshape(like.shape) % 5 - 1).to(like.dtype)
