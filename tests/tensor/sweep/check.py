"""Runs on every rank: entries of the op database with distributed inputs, compared with one device.

A case is one sample of a dtype, one way of distributing its tensors, and one form of the call (see `forms`).  Its
result is `right`, `raises` (an error where one device gives a result), or `wrong`: another value, shape, dtype or
gradient, a lost gradient, or ranks that do not agree on the outcome.
"""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from terrazzo.tensor import DTensor, Replicate, init_device_mesh
from terrazzo.tensor.dispatch import fallback
from tests.tensor.sweep.cases import Case, Cell, Report
from tests.tensor.sweep.compare import (
    Mismatch,
    comparable,
    compare_gradient,
    compare_kind,
    compare_values,
    rounding_of_sums,
    rounding_of_terms,
    tensors,
    unwrapped,
)
from tests.tensor.sweep.forms import calls, is_in_place, outs_like, same_objects
from tests.tensor.sweep.placing import MESHES, choose, distribute, kinds
from tests.tensor.sweep.samples import differentiable, entries, samples

# Their values are whatever memory held: only shape, dtype and device are compared.
UNDEFINED_VALUES = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


class _Skip(Exception):
    """The case says nothing about distributed tensors; the message is the reason."""


@lru_cache(maxsize=4)
def mesh_of(name: str) -> Any:
    return init_device_mesh("cpu", MESHES[name])


def sweep_entries(plan: Sequence[tuple[str, Sequence[Case]]]) -> list[Report]:
    """Run the cases of each entry; every rank returns the same verdicts."""
    torch.set_num_threads(1)
    return [sweep_entry(name, cases) for name, cases in plan]


def sweep_entry(name: str, cases: Sequence[Case]) -> Report:
    report = Report(name)
    made: dict[tuple[str, str], list[Any]] = {}
    references: dict[tuple[str, str, int, str], _Reference] = {}
    seen: set[Case] = set()
    for case in cases:
        kind = (case.dtype, case.size)
        if kind not in made:
            count = 1 + max(c.sample for c in cases if (c.dtype, c.size) == kind)
            made[kind] = samples(name, case.size, count, case.dtype)
        if not made[kind]:
            continue
        case = replace(case, sample=case.sample % len(made[kind]))
        if case in seen:
            continue
        seen.add(case)
        at = (*kind, case.sample, case.form)
        if at not in references:
            references[at] = _Reference(
                name, made[kind][case.sample], case.form, case.dtype, zlib.crc32(f"{name} {at}".encode())
            )
        outcome, message = _agreed(*_outcome(references[at], case, report))
        if outcome in ("right", "raises", "wrong"):
            cell = report.cells.setdefault((case.dtype, case.form), Cell())
            setattr(cell, outcome, getattr(cell, outcome) + 1)
        if outcome == "right":
            report.right += 1
        elif outcome == "no operand":
            report.without_operand += 1
        elif outcome == "skipped":
            report.skipped[message] = report.skipped.get(message, 0) + 1
        elif outcome == "raises":
            report.raises.append((str(case), message))
        else:
            report.wrong.append((str(case), message))
    return report


def _outcome(reference: _Reference, case: Case, report: Report) -> tuple[str, str]:
    try:
        expected = reference.expected()
        report.random |= reference.is_random
        if not expected.inputs.tensors:
            return "no operand", ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fallback._warned.clear()
            _run_case(reference, expected, case, report)
        report.gathered |= {str(w.message).split()[0] for w in caught if w.category is fallback.ReplicationWarning}
        return "right", ""
    except _Skip as reason:
        return "skipped", str(reason)
    except Mismatch as mismatch:
        print(f"{reference.name}, {case}: {mismatch}", flush=True)
        return "wrong", str(mismatch)
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        # Should this rank be the only one, the others wait for it until the time limit, and then this explains why.
        print(f"{reference.name}, {case}: {message}", flush=True)
        return "raises", message


def _agreed(outcome: str, message: str) -> tuple[str, str]:
    """The outcome of all ranks; one that differs between ranks is wrong."""
    codes = ("right", "no operand", "skipped", "raises", "wrong")
    mine = torch.tensor([codes.index(outcome)])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    seen = [codes[int(c)] for c in everyone]
    if len(set(seen)) == 1:
        return outcome, message
    if "wrong" in seen:
        return "wrong", message or f"on another rank ({seen})"
    return "wrong", f"ranks disagree: {seen}; here {message or 'no error'}"


@dataclass
class _Expected:
    """What a case must come to: whole plain tensors."""

    inputs: _Inputs
    result: Any
    requires_grad: list[bool]
    cotangents: list[torch.Tensor]
    gradients: list[torch.Tensor | None] | None  # None: one device has none


class _Reference:
    """One sample in one form, on one device; what is random, replicated on a mesh."""

    def __init__(self, name: str, sample: Any, form: str, dtype: str, seed: int) -> None:
        self.op, self.name, self.sample, self.form, self.seed = entries()[name], name, sample, form, seed
        self.in_place = is_in_place(form)
        self.differentiable = differentiable(self.op, dtype) and form != "out"
        self._is_half = dtype in ("float16", "bfloat16")
        self._functions = calls(self.op, form, sample.args)
        self.is_random = False
        self._prototype: Any = None  # of what is given as out=
        self._expected: _Expected | _Skip | None = None
        self._precise: tuple[list[Any], list[Any]] | None = None
        self._moved: list[float] | None = None
        self._moved_by_terms: list[list[torch.Tensor]] | None = None

    def expected(self) -> _Expected:
        if self._expected is None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._expected = self._find()
            except _Skip as reason:
                self._expected = reason
        if isinstance(self._expected, _Skip):
            raise self._expected
        return self._expected

    def call(self, inputs: _Inputs, seed: int = 0, out: Any = None) -> Any:
        torch.default_generator.manual_seed(self.seed + seed)
        target = inputs.input
        if self.in_place and isinstance(target, torch.Tensor) and target.requires_grad:
            target = target.clone()
        kwargs = dict(inputs.kwargs) if out is None else {**inputs.kwargs, "out": out}
        result = self._functions[0](target, *inputs.args, **kwargs)
        if out is not None and not same_objects(result, out):
            raise Mismatch("the form with out= did not return what was given")
        if not self.in_place:
            return self.sample.output_process_fn_grad(result)
        if result is not target:
            raise Mismatch("the in-place form did not return its first argument")
        return result

    def outs(self, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """What to give as out=; None in other forms."""
        if self.form != "out":
            return None
        return outs_like(self._prototype, lambda t: make(torch.full_like(t, True if t.dtype == torch.bool else 3)))

    def plain_inputs(self) -> _Inputs:
        return _Inputs(self.sample, lambda t: t.detach().clone().requires_grad_(t.requires_grad and self.form != "out"))

    def _find(self) -> _Expected:
        if self.in_place and self.sample.broadcasts_input:
            raise _Skip("in place, the input would be broadcast")
        self._choose_function()
        inputs = self.plain_inputs()
        try:
            if self.form == "out":
                self._prototype = self.call(inputs)
                if "out" in inputs.kwargs or self.outs(lambda t: t) is None:
                    raise _Skip("nothing that could be given as out=")
            result = self.call(inputs, out=self.outs(lambda t: t))
        except _Skip:
            raise
        except Exception as error:
            raise _Skip(f"one device raises {type(error).__name__}") from error
        if self.name not in UNDEFINED_VALUES and inputs.tensors and self._differs_when_drawn_again(result):
            self.is_random = True
            plain, requires_grad = result, [t.requires_grad for t in tensors(result)]
            mesh = mesh_of("4")
            inputs = self.placed("replicate", mesh, random.Random())
            result = self.call(inputs, out=self.outs(lambda t: distribute(t, mesh, [Replicate()])))
            compare_kind(unwrapped(result), plain)
            if self.differentiable and [t.requires_grad for t in tensors(result)] != requires_grad:
                raise Mismatch(f"requires_grad of the outputs: not {requires_grad}, as on one device")
        outs = tensors(result)
        wanted = [t.requires_grad for t in outs] if self.differentiable else []
        generator = torch.Generator().manual_seed(self.seed)
        roots = [t for t in outs if t.requires_grad]
        cotangents = [torch.randn(tuple(t.shape), dtype=t.dtype, generator=generator) for t in roots]
        gradients = self._gradients(roots, cotangents, inputs) if any(wanted) else None
        return _Expected(inputs, unwrapped(result), wanted, cotangents, gradients)

    def _choose_function(self) -> None:
        """Of the functions that the form may mean keep the one that this sample can be given to."""
        for function in list(self._functions) if len(self._functions) > 1 else []:
            inputs = self.plain_inputs()
            try:
                with torch.no_grad():
                    function(inputs.input, *inputs.args, **inputs.kwargs)
            except Exception:  # the names of another overload, or an error of this one, which `call` will raise
                continue
            self._functions = [function]
            return
        if not self._functions:
            raise _Skip(f"no {self.form} form")

    def _differs_when_drawn_again(self, first: Any) -> bool:
        elements = sum(t.numel() for t in tensors(first))
        for seed in range(1, 5 if elements > 8 else 25):  # few elements may come out alike by chance
            with torch.no_grad():
                inputs = _Inputs(self.sample, lambda t: t.detach().clone())
                again = self.call(inputs, seed=seed, out=self.outs(lambda t: t))
            pairs = zip(tensors(first), tensors(again), strict=False)
            if any(a.shape != b.shape or not torch.equal(comparable(a), comparable(b)) for a, b in pairs):
                return True
        return False

    def _gradients(self, roots: list[Any], cotangents: list[torch.Tensor], inputs: _Inputs) -> list[Any] | None:
        if self.is_random:
            mesh = mesh_of("4")
            cotangents = [distribute(c, mesh, [Replicate()]) for c in cotangents]
        try:
            torch.autograd.backward(roots, cotangents)
        except RuntimeError:
            return None
        return [None if t.grad is None else unwrapped(t.grad) for t in inputs.tensors]

    def precise(self, kind: int, index: int) -> torch.Tensor | None:
        """An output (kind 0) or the gradient of a tensor (kind 1) in double precision, if there is such a thing."""
        if self._precise is None:
            try:
                self._precise = self._in_double()
            except Exception:  # not every operation has a form for doubles, and then there is nothing to say
                self._precise = [], []
        found = self._precise[kind]
        return found[index] if index < len(found) else None

    def _in_double(self) -> tuple[list[Any], list[Any]]:
        if self.is_random:  # other numbers would be drawn
            return [], []

        def double(t: torch.Tensor) -> torch.Tensor:
            wide = torch.complex128 if t.is_complex() else torch.float64 if t.is_floating_point() else t.dtype
            return t.detach().clone().to(wide).requires_grad_(t.requires_grad and self.form != "out")

        inputs = _Inputs(self.sample, double)
        outs = tensors(self.call(inputs))
        roots = [t for t in outs if t.requires_grad]
        if roots:
            cotangents = self.expected().cotangents
            torch.autograd.backward(roots, [c.to(t.dtype) for c, t in zip(cotangents, roots, strict=True)])
        return [t.detach() for t in outs], [t.grad for t in inputs.tensors]

    def moved_by_rounding(self, kind: int) -> float:
        """How far outputs (kind 0) or gradients (kind 1) move at most when inputs move by their last bits.

        It is asked where doubles cannot say how far one device is off, since other numbers would be drawn for them.
        """
        if not self.is_random:
            return 0.0
        if self._moved is None:
            self._moved = [0.0] * 2
            expected, generator = self.expected(), torch.Generator().manual_seed(self.seed)
            outs = tensors(expected.result)
            for _ in range(4):
                result, gradients = self._run_moved(generator)
                pairs = (zip(outs, result, strict=True), zip(expected.gradients or (), gradients, strict=False))
                for which, ab in enumerate(pairs):
                    far = [float((a - b).abs().max()) for a, b in ab if a is not None and b is not None and a.numel()]
                    self._moved[which] = max([self._moved[which], *far])
        return 4 * self._moved[kind]

    def moved_by_terms(self, kind: int, index: int, placed: _Inputs) -> torch.Tensor | float:
        """How far an output or a gradient moves on one device when inputs move as far as their terms are rounded.

        Terms of half types are larger than what they add up to; what such an input makes undefined is infinitely off.
        """
        if not self._is_half or self.is_random:
            return 0.0
        if not any(p.is_partial() for t in placed.tensors for p in t._layout.placements):
            return 0.0
        if self._moved_by_terms is None:
            expected = self.expected()
            known = tensors(expected.result), [_or_nothing(g) for g in expected.gradients or ()]
            self._moved_by_terms = [[torch.zeros_like(t, dtype=torch.float64) for t in found] for found in known]
            generator = torch.Generator().manual_seed(self.seed)
            for _ in range(8):
                outs, gradients = self._run_with_noise(generator)
                for far, before, after in zip(self._moved_by_terms, known, (outs, gradients), strict=True):
                    for most, a, b in zip(far, before, after, strict=False):
                        moved = (a.double() - b.double()).abs()
                        most.copy_(torch.maximum(most, moved.nan_to_num(float("inf")).masked_fill(a == b, 0.0)))
        found = self._moved_by_terms[kind]
        return 2 * found[index] if index < len(found) else 0.0

    def _run_with_noise(self, generator: torch.Generator) -> tuple[list[Any], list[Any]]:
        def move(t: torch.Tensor) -> torch.Tensor:
            moved = t.detach().clone()
            if t.is_floating_point() and t.numel():
                size = t.detach().abs().double().clamp(min=1.0)
                noise = torch.randn(tuple(t.shape), generator=generator, dtype=torch.float64) * torch.finfo(t.dtype).eps
                moved = (t.detach().double() + 2 * noise * size).to(t.dtype)
            return moved.requires_grad_(t.requires_grad and self.form != "out")

        inputs = _Inputs(self.sample, move)
        outs = tensors(self.call(inputs, out=self.outs(lambda t: t)))
        roots = [t for t in outs if t.requires_grad]
        gradients = self._gradients(roots, self.expected().cotangents, inputs) if roots else None
        return [t.detach() for t in outs], [_or_nothing(g) for g in gradients or ()]

    def _run_moved(self, generator: torch.Generator) -> tuple[list[Any], list[Any]]:
        mesh = mesh_of("4")

        def place(t: torch.Tensor) -> DTensor:
            if t.is_floating_point() or t.is_complex():
                noise = torch.randn(tuple(t.shape), generator=generator) * torch.finfo(t.dtype).eps
                moved = (t.detach() * (1 + noise)).to(t.dtype).requires_grad_(t.requires_grad and self.form != "out")
            else:
                moved = t.detach()
            return distribute(moved, mesh, [Replicate()])

        inputs = _Inputs(self.sample, place)
        outs = tensors(self.call(inputs, out=self.outs(lambda t: distribute(t, mesh, [Replicate()]))))
        roots = [t for t in outs if t.requires_grad]
        gradients = self._gradients(roots, self.expected().cotangents, inputs) if roots else None
        return [unwrapped(t) for t in outs], gradients or []

    def placed(self, family: str, mesh: Any, rng: random.Random) -> _Inputs:
        dim = rng.randrange(8)

        def place(t: torch.Tensor) -> DTensor:
            floating = t.is_floating_point() or t.is_complex()
            t = t.detach() if self.form == "out" else t
            return distribute(t, mesh, choose(tuple(t.shape), floating, family, mesh.ndim, rng, dim))

        return _Inputs(self.sample, place)


def _run_case(reference: _Reference, expected: _Expected, case: Case, report: Report) -> None:
    mesh = mesh_of(case.mesh)
    rng = random.Random(zlib.crc32(f"{reference.name} {case}".encode()))
    placed = reference.placed(case.family, mesh, rng)
    for t in placed.tensors:
        report.kinds |= kinds(t._layout)
    out_family = rng.choice(("replicate", "shard", "shard"))
    result = reference.call(
        placed,
        out=reference.outs(
            lambda t: distribute(t, mesh, choose(tuple(t.shape), False, out_family, mesh.ndim, rng, rng.randrange(8)))
        ),
    )
    whole = unwrapped(result)
    compare_kind(whole, expected.result)
    if reference.name not in UNDEFINED_VALUES:
        for i, (mine, theirs) in enumerate(zip(tensors(whole), tensors(expected.result), strict=True)):
            compare_values(
                f"output {i}",
                mine,
                theirs,
                lambda i=i: reference.precise(0, i),
                lambda i=i: (
                    rounding_of_terms(tensors(result)[i])
                    + reference.moved_by_rounding(0)
                    + reference.moved_by_terms(0, i, placed)
                ),
            )
    if not any(expected.requires_grad):
        return
    outs = tensors(result)
    if [t.requires_grad for t in outs] != expected.requires_grad:
        raise Mismatch(
            f"requires_grad of the outputs: {[t.requires_grad for t in outs]} instead of {expected.requires_grad}"
        )
    if expected.gradients is None:
        report.skipped["gradient: one device raises"] = report.skipped.get("gradient: one device raises", 0) + 1
        return
    given = []
    for c in expected.cotangents:
        family = rng.choice(("replicate", "shard"))
        given.append(distribute(c, mesh, choose(tuple(c.shape), True, family, mesh.ndim, rng, rng.randrange(8))))
    torch.autograd.backward([t for t in outs if t.requires_grad], given)
    for i, (x, gradient) in enumerate(zip(placed.tensors, expected.gradients, strict=True)):
        if x.requires_grad and not any(p.is_partial("product") for p in x.placements):  # theirs is not known
            compare_gradient(
                f"gradient of tensor {i}",
                x.grad,
                gradient,
                lambda i=i: reference.precise(1, i),
                lambda i=i, x=x: (
                    reference.moved_by_rounding(1) + reference.moved_by_terms(1, i, placed) + rounding_of_sums(x, outs)
                ),
            )


def _or_nothing(gradient: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(()) if gradient is None else gradient


class _Inputs:
    """A sample with each tensor replaced by `make(tensor)`, once for each."""

    def __init__(self, sample: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.tensors: list[Any] = []
        self._made: dict[int, torch.Tensor] = {}
        self._make = make
        self.input = self._walk(sample.input)
        self.args = self._walk(tuple(sample.args))
        self.kwargs = self._walk(dict(sample.kwargs))

    def _walk(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._made:
                made = self._made[id(value)] = self._make(value)
                self.tensors.append(made)
            return self._made[id(value)]
        if type(value) in (list, tuple):
            return type(value)(self._walk(v) for v in value)
        if type(value) is dict:
            return {k: self._walk(v) for k, v in value.items()}
        return value
