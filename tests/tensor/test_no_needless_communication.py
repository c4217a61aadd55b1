"""Where a dim is not touched, its cut stays and nothing is sent; and whatever is cut, values and gradients are right.

Judged by one device. Sizes are such that shards are uneven and some are empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ranks import run_ranks
from terrazzo.layout import Layout
from terrazzo.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from terrazzo.tensor.debug import CommDebugMode
from terrazzo.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

R, P = Replicate(), Partial()
S = [Shard(0), Shard(1), Shard(2), Shard(3)]


@dataclass(frozen=True)
class Case:
    """`function` of a tensor of `shape` leaves the dims `free` alone."""

    function: Callable[..., Any]
    shape: tuple[int, ...]
    free: tuple[int, ...]
    terms: bool = False  # whether terms pass
    dtype: torch.dtype = torch.float64
    others: tuple[tuple[int, ...], ...] = ()  # operands that every rank has
    gradient: bool = True
    tolerance: float = 1e-9
    from_data: Callable[[torch.Tensor], torch.Tensor] = lambda t: t


def well_conditioned(t: torch.Tensor) -> torch.Tensor:
    return t @ t.mT + 3 * torch.eye(t.shape[-1], dtype=t.dtype)


def exact(t: torch.Tensor) -> torch.Tensor:
    """Values whose terms add up to the last bit."""
    return (t * 64).round() / 64


def rotated(q: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotary embedding by complex numbers, as language models have it: batch, sequence, heads, width."""
    pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2))
    turns = torch.view_as_complex(frequencies)[None, : q.shape[1], None]
    return torch.view_as_real(pairs * turns).flatten(3).type_as(q)


BOX = (5, 6, 4)
MATRICES = (5, 3, 4, 4)

CASES = {
    "view_as_complex": Case(torch.view_as_complex, (5, 6, 2), (0, 1), terms=True),
    "view_as_real": Case(torch.view_as_real, (5, 6), (0, 1), terms=True, dtype=torch.complex128),
    "rotary": Case(rotated, (5, 3, 6, 4), (0, 1, 2), terms=True, others=((3, 2, 2),)),
    "diagonal": Case(lambda x: x.diagonal(1, 1, 2), BOX, (0,), terms=True),
    "linalg.diagonal": Case(lambda x: torch.linalg.diagonal(x, offset=-1), BOX, (0,), terms=True),
    "diag_embed": Case(lambda x: torch.diag_embed(x, 1, 0, 2), BOX, (0, 1)),
    "flip": Case(lambda x: x.flip((1, 2)), BOX, (0,), terms=True),
    "flip, one by one": Case(lambda x: x.flip(0, 2), BOX, (1,), terms=True),
    "roll": Case(lambda x: x.roll((1, -2), (1, 2)), BOX, (0,), terms=True),
    "roll all": Case(lambda x: x.roll(3), BOX, (), terms=True),
    "rot90": Case(lambda x: torch.rot90(x, 1, (1, 2)), BOX, (0,), terms=True),
    "rot90 twice": Case(lambda x: torch.rot90(x, -2, (0, 2)), BOX, (1,), terms=True),
    "rot90 thrice": Case(lambda x: torch.rot90(x, 3, (1, 2)), BOX, (0,), terms=True),
    "fftshift": Case(lambda x: torch.fft.fftshift(x, dim=(1, 2)), BOX, (0,), terms=True),
    "repeat": Case(lambda x: x.repeat(2, 1, 3, 1), BOX, (1 - 1, 2)),
    "tile": Case(lambda x: x.tile(3, 1), BOX, (0, 2)),
    "repeat_interleave": Case(lambda x: x.repeat_interleave(3, dim=1), BOX, (0, 2)),
    "repeat_interleave, flat": Case(lambda x: x.repeat_interleave(2), (8,), (0,)),
    "a dim of size 1 stays": Case(lambda x: x.view(1, 2, 3, 4), (1, 6, 4), (0, 2), terms=True),
    "a dim of size 1 stays, flattened": Case(lambda x: x.flatten(1), (1, 6, 4), (0,), terms=True),
    "cat": Case(lambda x: torch.cat([x, 2 * x], 1), BOX, (0, 2), terms=True),
    "stack": Case(lambda x: torch.stack([x, 2 * x], 1), BOX, (0, 1, 2), terms=True),
    "stack with what every rank has": Case(lambda x, y: torch.stack([x, y], 1), BOX, (0, 1, 2), True, others=(BOX,)),
    "cat with what every rank has": Case(lambda x, y: torch.cat([y, x], 1), BOX, (0, 2), True, others=((5, 2, 4),)),
    "pad": Case(lambda x: F.pad(x, (1, 2, 0, 1)), BOX, (0,), terms=True),
    "pad with ones": Case(lambda x: F.pad(x, (1, 2, 0, 1), value=1.0), BOX, (0,)),
    "unfold": Case(lambda x: x.unfold(1, 3, 2), BOX, (0, 2)),
    "select_scatter": Case(lambda x: x.select_scatter(x[:, 0] * 2, 1, 3), BOX, (0, 2), terms=True),
    "slice_scatter": Case(lambda x: x.slice_scatter(x[:, :3] * 2, 1, 1, 6, 2), BOX, (0, 2), terms=True),
    "cdist": Case(torch.cdist, (5, 6, 4), (0, 1), others=((5, 3, 4),)),
    "cdist of columns": Case(lambda x, y: torch.cdist(y, x, p=1), (5, 6, 4), (0, 1), others=((5, 3, 4),)),
    "cross": Case(lambda x, y: torch.linalg.cross(x, y), (5, 6, 3), (0, 1), terms=True, others=((5, 6, 3),)),
    "torch.cross": Case(lambda x, y: torch.cross(x, y), (5, 6, 3), (0, 1), terms=True, others=((5, 6, 3),)),
    "renorm": Case(lambda x: torch.renorm(x, 2, 1, 0.5), BOX, (1,)),
    "dist": Case(lambda x, y: torch.dist(x, y, 3), BOX, (), others=(BOX,)),
    "quantile": Case(lambda x: torch.quantile(x, 0.3, dim=1), BOX, (0, 2)),
    "nanquantile": Case(lambda x: torch.nanquantile(x, 0.3, dim=-1, keepdim=True), BOX, (0, 1)),
    "quantiles": Case(lambda x, q: torch.quantile(x, q.sigmoid().detach(), dim=1), BOX, (0, 2), others=((3,),)),
    "quantile of all": Case(lambda x: torch.quantile(x, 0.3), BOX, ()),
    "median": Case(lambda x: x.median(1), BOX, (0, 2)),
    "median of all": Case(lambda x: x.median(), BOX, ()),
    "mode": Case(lambda x: x.mode(), BOX, (0, 1)),
    "kthvalue": Case(lambda x: x.kthvalue(2), BOX, (0, 1)),
    "argmax": Case(lambda x: x.argmax(1), BOX, (0, 2), gradient=False),
    "argmin, kept": Case(lambda x: x.argmin(-1, keepdim=True), BOX, (0, 1), gradient=False),
    "argmax of all": Case(lambda x: x.argmax(), BOX, (), gradient=False),
    "argmax of all, kept": Case(lambda x: x.argmax(keepdim=True), BOX, (), gradient=False),
    "max": Case(lambda x: x.max(1), BOX, (0, 2)),
    "min, kept": Case(lambda x: torch.min(x, dim=0, keepdim=True), BOX, (1, 2)),
    "aminmax": Case(lambda x: torch.aminmax(x, dim=1), BOX, (0, 2)),
    "aminmax of all": Case(lambda x: tuple(torch.aminmax(x)), BOX, ()),
    "fft": Case(lambda x: torch.fft.fft(x, dim=1), BOX, (0, 2), terms=True),
    "fft, cut short": Case(lambda x: torch.fft.fft(x, n=3), BOX, (0, 1), terms=True),
    "rfft": Case(lambda x: torch.fft.rfft(x), BOX, (0, 1), terms=True),
    "rfft and back": Case(lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=6, dim=1), BOX, (0, 2), terms=True),
    "irfft": Case(lambda x: torch.fft.irfft(x), BOX, (0, 1), terms=True, dtype=torch.complex128),
    "hfft": Case(lambda x: torch.fft.hfft(x, dim=1), BOX, (0, 2), terms=True, dtype=torch.complex128),
    "fft2": Case(lambda x: torch.fft.fft2(x), BOX, (0,), terms=True),
    "fftn": Case(lambda x: torch.fft.fftn(x, s=(4, -1), dim=(1, 2)), BOX, (0,), terms=True),
    "rfftn": Case(lambda x: torch.fft.rfftn(x, dim=(2, 1)), BOX, (0,), terms=True),
    "irfft2": Case(lambda x: torch.fft.irfft2(x), BOX, (0,), terms=True, dtype=torch.complex128),
    "inv": Case(torch.linalg.inv, MATRICES, (0, 1), from_data=well_conditioned),
    "det": Case(torch.linalg.det, MATRICES, (0, 1), from_data=well_conditioned, tolerance=1e-7),
    "slogdet": Case(lambda x: tuple(torch.linalg.slogdet(x)), MATRICES, (0, 1), from_data=well_conditioned),
    "cholesky": Case(torch.linalg.cholesky, MATRICES, (0, 1), from_data=well_conditioned),
    "qr": Case(lambda x: torch.linalg.qr(x)[1], MATRICES, (0, 1), from_data=well_conditioned),
    "svdvals": Case(torch.linalg.svdvals, MATRICES, (0, 1), from_data=well_conditioned),
    "svd": Case(lambda x: torch.linalg.svd(x)[1], MATRICES, (0, 1), from_data=well_conditioned),
    "eigvalsh": Case(torch.linalg.eigvalsh, MATRICES, (0, 1), from_data=well_conditioned),
    "matrix_exp": Case(torch.matrix_exp, MATRICES, (0, 1), tolerance=1e-7),
    "matrix_power": Case(lambda x: torch.linalg.matrix_power(x, 3), MATRICES, (0, 1), tolerance=1e-7),
    "pinv": Case(torch.linalg.pinv, MATRICES, (0, 1), from_data=well_conditioned),
    "solve": Case(torch.linalg.solve, MATRICES, (0, 1), from_data=well_conditioned, others=((3, 4, 2),)),
    "solve_triangular": Case(
        lambda x, y: torch.linalg.solve_triangular(x, y, upper=True), MATRICES, (0, 1), from_data=well_conditioned,
        others=((5, 3, 4, 2),),
    ),
    "vander": Case(lambda x: torch.vander(x, 3, True), (9,), (0,), gradient=False),
    "linalg.vander": Case(lambda x: torch.linalg.vander(x, N=3), (5, 6), (0, 1)),
    "searchsorted": Case(
        lambda x, s: torch.searchsorted(s.cumsum(0), x), BOX, (0, 1, 2), gradient=False, others=((7,),)
    ),
    "searchsorted in rows": Case(
        lambda x: torch.searchsorted(x.sort(-1)[0], x), BOX, (0, 1), gradient=False
    ),
    "bucketize": Case(lambda x, s: torch.bucketize(x, s.cumsum(0)), BOX, (0, 1, 2), gradient=False, others=((7,),)),
    "isin": Case(lambda x, y: torch.isin(x.round(), y.round()), BOX, (0, 1, 2), gradient=False, others=((4,),)),
    "einsum with an ellipsis": Case(
        lambda x, y: torch.einsum("...ij,kj->...ki", x, y), MATRICES, (0, 1, 2), terms=True, others=((2, 4),)
    ),
    "einsum with ellipses": Case(lambda x, y: torch.einsum("...i,...i", x, y), BOX, (0, 1), True, others=((6, 4),)),
    "gradient": Case(lambda x: torch.gradient(x, dim=1)[0], BOX, (0, 2), terms=True),
    "isclose": Case(lambda x, y: torch.isclose(x, y, atol=0.5), BOX, (0, 1, 2), gradient=False, others=(BOX,)),
    "type_as": Case(lambda x, y: x.type_as(y.float()), BOX, (0, 1, 2), others=((3,),), tolerance=1e-5),
    "to another type": Case(lambda x, y: x.to(y.cdouble()), BOX, (0, 1, 2), others=((3,),), terms=True, tolerance=1e-5),
    "to another's, an integer": Case(lambda x, y: x.to(y.long()), BOX, (0, 1, 2), others=((3,),), gradient=False),
    "view of another dtype": Case(lambda x: x.view(torch.int32), BOX, (0, 1), gradient=False, from_data=exact),
    "view of as large a dtype": Case(lambda x: x.view(torch.int64), BOX, (0, 1, 2), gradient=False, from_data=exact),
    "view of a larger dtype": Case(lambda x: x.view(torch.complex128), BOX, (0, 1), gradient=False, from_data=exact),
    "fake_quantize": Case(
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -127, 127), BOX, (0, 1, 2), dtype=torch.float32,
        tolerance=1e-5,
    ),
}  # fmt: skip


def one_dim() -> list[tuple[Placement, ...]]:
    return [(R,), (P,), *((s,) for s in S)]


def two_dims() -> list[tuple[Placement, ...]]:
    return [(S[0], S[1]), (S[0], S[0]), (P, S[0]), (S[1], P), (S[2], S[0])]


def placed(value: torch.Tensor, mesh: Any, placements: Iterable[Placement]) -> DTensor:
    """`value`, with terms where a placement is Partial; a leaf."""
    placements = tuple(placements)
    layout = Layout.of(mesh, placements, tuple(value.shape))
    local = value[layout.box().slices()].clone()
    for m, p in enumerate(placements):
        if p.is_partial():
            first = mesh.get_coordinate()[m] == 0
            local = local + 5 * (mesh.size(m) - 1) if first else torch.full_like(local, -5)
            local = local if first else local
    return DTensor.from_local(local, mesh, placements, shape=value.shape)


def tensors_of(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def real(t: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def loss_of(results: list[Any]) -> Any:
    total: Any = 0
    for i, t in enumerate(results):
        t = t.full_tensor() if isinstance(t, DTensor) else t
        if t.requires_grad:
            t = real(t)
            total = total + (t * torch.linspace(-1, 2 + i, t.numel(), dtype=t.dtype).view(t.shape)).sum()
    return total


def data_of(case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(len(case.shape) + sum(case.shape))
    x = case.from_data(torch.randn(case.shape, dtype=case.dtype))
    return x, [torch.randn(shape, dtype=case.dtype) for shape in case.others]


def compare_all(names: list[str]) -> list[str]:
    problems = []
    meshes = [(init_device_mesh("cpu", (4,)), one_dim()), (init_device_mesh("cpu", (2, 2)), two_dims())]
    for name in names:
        case = CASES[name]
        value, others = data_of(case)
        reference = value.clone().requires_grad_(case.gradient)
        expected = tensors_of(case.function(reference, *others))
        if case.gradient:
            loss_of(expected).backward()
        for mesh, all_placements in meshes:
            for placements in all_placements:
                if any(p.is_shard() and p.dim >= value.ndim for p in placements):
                    continue
                title = f"{name} {placements}"
                try:
                    problems += compare(title, case, mesh, placements, value, others, reference, expected)
                except Exception as error:
                    problems.append(f"{title}: {error!r}")
    return problems


def compare(
    title: str, case: Case, mesh: Any, placements: Any, value: Any, others: Any, reference: Any, expected: Any
) -> list[str]:
    x = placed(value, mesh, placements)
    replicated = [distribute_tensor(o, mesh, [R] * mesh.ndim) for o in others]
    if case.gradient:
        x.requires_grad_()
    with CommDebugMode() as forward:
        found = tensors_of(case.function(x, *replicated))
    problems = []
    for mine, theirs in zip(found, expected, strict=True):
        whole = mine.detach().full_tensor()
        if whole.shape != theirs.shape or whole.dtype != theirs.dtype or mine.shape != theirs.shape:
            problems.append(f"{title}: {whole.shape} {whole.dtype} for {theirs.shape} {theirs.dtype}")
        elif not torch.allclose(whole, theirs.detach(), rtol=case.tolerance, atol=case.tolerance, equal_nan=True):
            problems.append(f"{title}: wrong values")
    quiet = all(
        p in (R,) or (p.is_shard() and p.dim in case.free) or (p.is_partial() and case.terms) for p in placements
    )
    if quiet and forward.get_total_counts():
        problems.append(f"{title}: sends {dict(forward.get_comm_counts())}")
    if case.gradient:
        loss = loss_of(found)
        with CommDebugMode() as backward:
            loss.backward()
        gradient = x.grad
        assert gradient is not None
        if not torch.allclose(gradient.full_tensor(), reference.grad, rtol=case.tolerance, atol=case.tolerance):
            problems.append(f"{title}: wrong gradient")
        if quiet and backward.get_total_counts():
            problems.append(f"{title}: sends {dict(backward.get_comm_counts())} in backward")
    return problems


PARTS = 4


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_untouched_dims_stay_cut_and_all_is_right(part):
    names = list(CASES)[part::PARTS]
    for problems in run_ranks(4, compare_all, names):
        assert not problems, "\n".join(problems)


# ------------------------------------------------------------------ made from another's type


def counted(function: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    with CommDebugMode() as mode:
        result = function()
    return result, dict(Counter(c.kind for c in mode.collectives))


MADE = {
    "new_zeros": lambda x, shape: x.new_zeros(shape),
    "new_ones": lambda x, shape: x.new_ones(*shape),
    "new_full": lambda x, shape: x.new_full(shape, 3.0),
    "new_full by name": lambda x, shape: x.new_full(size=shape, fill_value=3.0),
    "new_empty": lambda x, shape: x.new_empty(shape).fill_(1.0),
    "new_empty_strided": lambda x, shape: x.new_empty_strided(shape, (1, *shape[:-1])[: len(shape)]).fill_(2.0),
    "new_zeros of integers": lambda x, shape: x.new_zeros(shape, dtype=torch.int64),
    "new_tensor": lambda x, shape: x.new_tensor([[1.0, 2.0]]),
}
LIKE = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 4.0),
    "empty_like": lambda x: torch.empty_like(x).zero_(),
}


def make_from_type() -> list[str]:
    problems = []
    value = torch.randn(5, 6)
    for mesh, layouts in (
        (init_device_mesh("cpu", (4,)), [(R,), (P,), (S[0],), (S[1],)]),
        (init_device_mesh("cpu", (2, 2)), [(S[0], S[1]), (P, S[0]), (S[1], P)]),
    ):
        for placements in layouts:
            x = placed(value, mesh, placements)
            alike = tuple(R if p.is_partial() else p for p in placements)
            for name, make in MADE.items():
                for shape in ((5, 6), (3,), (2, 3, 4)):
                    found, sent = counted(partial(make, x, shape))
                    expected = make(value, shape)
                    mine = found.full_tensor()
                    right = torch.equal(mine, expected) and mine.dtype == expected.dtype
                    kept = found.placements == (alike if tuple(expected.shape) == (5, 6) else (R,) * mesh.ndim)
                    if not right or not kept or sent:
                        problems.append(f"{name} {shape} from {placements}: {found.placements} {sent} {mine}")
            for name, make in LIKE.items():
                found, sent = counted(partial(make, x))
                if sent or not torch.equal(found.full_tensor(), make(value)):
                    problems.append(f"{name} of {placements}: {sent}")
    return problems


def test_a_tensor_made_from_anothers_type_sends_nothing():
    for problems in run_ranks(4, make_from_type):
        assert not problems, "\n".join(problems)


# ------------------------------------------------------------------ places of extremes


def find_extremes() -> list[str]:
    """Ties, NaN and infinities; dims cut several times; shards without elements."""
    problems = []
    torch.manual_seed(0)
    tied = torch.randint(-2, 3, (5, 3, 6)).double()
    holes = tied.clone()
    holes[1, 1, 2] = holes[4, 0, 5] = float("nan")
    lowest = torch.full((5, 3, 6), float("-inf"), dtype=torch.float64)
    tensors = [tied, holes, lowest, -lowest, tied.long(), tied.bfloat16(), torch.full((2, 3, 2), 7)]
    for mesh, layouts in (
        (init_device_mesh("cpu", (4,)), [(P,), (S[0],), (S[1],), (S[2],)]),
        (init_device_mesh("cpu", (2, 2)), [(S[0], S[1]), (S[0], S[0]), (S[2], P), (S[2], S[0])]),
    ):
        for value in tensors:
            for placements in layouts:
                if any(p.is_partial() for p in placements) and not value.isfinite().all():
                    continue
                if value.dtype == torch.int64 and any(p.is_partial() for p in placements):
                    continue
                x = placed(value, mesh, placements)
                for name in ("argmax", "argmin"):
                    for arguments in ((), (0,), (1, True), (-1,), (None, True)):
                        found = getattr(x, name)(*arguments)
                        if not torch.equal(found.full_tensor(), getattr(value, name)(*arguments)):
                            problems.append(f"{name}{arguments} of {placements} {value.dtype}")
                for name in ("max", "min"):
                    for arguments in ((0,), (1, True), (-1,)):
                        found = getattr(x, name)(*arguments)
                        expected = getattr(value, name)(*arguments)
                        values_equal = torch.equal(
                            found.values.full_tensor().nan_to_num(99), expected.values.nan_to_num(99)
                        )
                        if not values_equal or not torch.equal(found.indices.full_tensor(), expected.indices):
                            problems.append(f"{name}{arguments} of {placements} {value.dtype}")
    x = placed(torch.randn(8, 1000, dtype=torch.float64), init_device_mesh("cpu", (4,)), (S[1],))
    with CommDebugMode() as mode:
        x.argmax(-1)
    if mode.get_total_bytes() > 4 * 8 * 16:  # a value and a place for each row and rank
        problems.append(f"argmax sends {mode.get_total_bytes()} bytes")
    return problems


@pytest.mark.long
def test_ranks_exchange_what_each_has_found():
    for problems in run_ranks(4, find_extremes):
        assert not problems, "\n".join(problems)


# ------------------------------------------------------------------ terms of what is added up, gradients


def add_up() -> list[str]:
    """The way back of a mixture of experts: rows of each rank are added to rows that all have."""
    problems = []
    torch.manual_seed(0)
    base, rows = torch.randn(3, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    index = torch.randint(0, 3, (7,))
    wide = index.unsqueeze(1).expand(7, 4).contiguous()
    for mesh, layouts in (
        (init_device_mesh("cpu", (4,)), [(S[0],), (S[1],), (R,)]),
        (init_device_mesh("cpu", (2, 2)), [(S[0], S[1]), (S[0], S[0]), (R, S[0])]),
    ):
        for placements in layouts:
            for name, where, function in (
                ("index_add", index, lambda b, i, r: b.index_add(0, i, r, alpha=2)),
                ("scatter_add", wide, lambda b, i, r: b.scatter_add(0, i, r)),
            ):
                one = [t.clone().requires_grad_() for t in (base, rows)]
                many = [
                    distribute_tensor(base, mesh, [R] * mesh.ndim).requires_grad_(),
                    distribute_tensor(rows, mesh, placements).requires_grad_(),
                ]
                at = [p if p.is_shard() and p.dim < where.ndim else R for p in placements]
                where_rows = distribute_tensor(where, mesh, at)
                expected = function(one[0], where, one[1])
                found, sent = counted(partial(function, many[0], where_rows, many[1]))
                if sent and all(p in (S[0], R) for p in placements):
                    problems.append(f"{name} {placements} sends {sent}")
                loss_of([expected]).backward()
                loss_of([found]).backward()
                pairs = [(found.full_tensor(), expected)] + [
                    (m.grad.full_tensor(), o.grad) for m, o in zip(many, one, strict=True)
                ]
                if not all(torch.allclose(mine, theirs) for mine, theirs in pairs):
                    problems.append(f"{name} {placements} is wrong")
    return problems


def test_rows_that_are_added_up_stay_where_they_are():
    for problems in run_ranks(4, add_up):
        assert not problems, "\n".join(problems)


def local_gradient() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [S[0]]).requires_grad_()
    for take in (
        lambda: x.redistribute(mesh, [R]).to_local(grad_placements=[P]),
        lambda: x.full_tensor(grad_placements=[P]),
    ):
        x.grad = None
        local, sent = counted(take)
        assert sent == {"all_gather": 1}
        _, sent = counted((local * (mesh.get_local_rank() + 1)).sum().backward)
        assert sent == {"reduce_scatter": 1}
        assert x.grad.full_tensor().tolist() == [[10.0, 10.0]] * 5


def test_terms_of_the_gradient_of_what_was_gathered_are_scattered():
    run_ranks(4, local_gradient)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def sequence_parallel(frozen: bool) -> None:
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    block, one = Block().double(), Block().double()
    one.load_state_dict(block.state_dict())
    if frozen:
        block.requires_grad_(False)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=S[1]),
        "down": RowwiseParallel(output_layouts=S[1], use_local_output=False),
    }
    parallelize_module(block, mesh, plan)
    value = torch.randn(2, 8, 8, dtype=torch.float64)
    reference = value.clone().requires_grad_()
    one(reference).square().sum().backward()
    x = distribute_tensor(value, mesh, [S[1]]).requires_grad_()
    y, sent = counted(lambda: block(x))
    assert sent == {"all_gather": 1, "reduce_scatter": 1}
    loss = y.square().sum()
    _, sent = counted(loss.backward)
    weights_of_the_norm = {} if frozen else {"all_reduce": 2}
    assert sent == {"all_gather": 1, "reduce_scatter": 1} | weights_of_the_norm
    torch.testing.assert_close(x.grad.full_tensor(), reference.grad)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_block_with_sequence_parallelism_sends_once_each_way(frozen):
    run_ranks(4, sequence_parallel, frozen)


INDICES: dict[str, Callable[..., Any]] = {
    "x[i]": lambda x, i, j, k: x[i],
    "x[:, j]": lambda x, i, j, k: x[:, j],
    "x[i, j]": lambda x, i, j, k: x[i, j],
    "x[i, :, k]": lambda x, i, j, k: x[i, :, k],
    "x[..., k]": lambda x, i, j, k: x[..., k],
    "x[i, j, k]": lambda x, i, j, k: x[i, j, k],
}
# Of the dims of `x` those that an index takes whole, and the cut of what cut indices pick of a tensor on every rank.
TAKEN_WHOLE: dict[str, tuple[int, ...]] = {"x[i]": (1, 2), "x[:, j]": (0, 2), "x[i, j]": (2,), "x[i, :, k]": (1,)}
PICKED = {"x[i]": 0, "x[:, j]": 1, "x[i, :, k]": 0, "x[..., k]": 2}


def pick() -> list[str]:
    mesh = init_device_mesh("cpu", (4,))
    x = torch.randn(6, 5, 7, dtype=torch.float64)
    indices = (torch.randint(-6, 6, (9,)), torch.randint(0, 5, (3, 9)), torch.randint(0, 7, (9,)))
    problems = []
    for name, function in INDICES.items():
        leaf = x.clone().requires_grad_()
        expected = function(leaf, *indices)
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        for cut in (R, S[0], S[1], S[2]):
            for cut_of_indices in (R, S[0]):
                mine = distribute_tensor(x, mesh, [cut]).requires_grad_()
                mine_of_indices = [distribute_tensor(i, mesh, [cut_of_indices]) for i in indices]
                result, sent = counted(lambda f=function, m=mine, i=mine_of_indices: f(m, *i))
                what = f"{name} of {cut} by {cut_of_indices}"
                if not torch.equal(result.full_tensor(), expected):
                    problems.append(f"{what}: other values")
                (result * distribute_tensor(weights, mesh, [R])).sum().backward()
                if not torch.allclose(mine.grad.full_tensor(), leaf.grad):
                    problems.append(f"{what}: another gradient")
                if cut == R and cut_of_indices == S[0] and name in PICKED:
                    if sent or result.placements != (Shard(PICKED[name]),):
                        problems.append(f"{what}: {result.placements}, {sent}")
                elif cut_of_indices == R and (cut == R or cut.dim in TAKEN_WHOLE.get(name, ())) and sent:
                    problems.append(f"{what}: {sent}")
    return problems


def test_what_indices_pick_is_cut_as_they_are():
    assert run_ranks(4, pick) == [[]] * 4
