"""Linear algebra on batches of matrices or rows: these stay whole, the dims before them may be sharded.

The number and shapes of the results depend on options. PyTorch itself is asked, once per plan, with tensors without
data.
"""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.tensor.dispatch.spec import Call, Chosen, Dims, LocalFunction, Operand, Spec, Static, within
from terrazzo.tensor.dispatch.structure import tied_to
from terrazzo.tensor.ops.loops import loops
from terrazzo.tensor.ops.pointwise import broadcast
from terrazzo.tensor.ops.spatial import shapes_of_results
from terrazzo.tensor.ops.table import body, decomposition, rule
from terrazzo.tensor.ops.views import norm_dim

body("gradient", "linalg_cond")

_ONE_MATRIX = (
    *("linalg_inv", "inverse", "linalg_inv_ex", "linalg_det", "det", "linalg_slogdet", "slogdet", "logdet"),
    *("linalg_cholesky", "linalg_cholesky_ex", "cholesky", "cholesky_inverse", "linalg_qr", "qr", "linalg_svd", "svd"),
    *("linalg_svdvals", "linalg_eig", "linalg_eigh", "linalg_eigvals", "linalg_eigvalsh", "linalg_matrix_power"),
    *("matrix_power", "linalg_matrix_exp", "matrix_exp", "linalg_pinv", "pinverse", "linalg_lu", "linalg_lu_factor"),
    *("linalg_matrix_rank", "linalg_ldl_factor", "geqrf"),
)


@rule(*_ONE_MATRIX)
def one_matrix(call: Call, input: Operand, *args: Static, **kwargs: Static) -> Spec | None:
    if input.ndim < 2:
        return None
    return _batched(call, tuple(range(input.ndim - 2)), [(*range(input.ndim - 2), None, None)])


@rule("linalg_solve", "linalg_solve_triangular", "linalg_lstsq", "cholesky_solve", "triangular_solve")
def two_matrices(call: Call, input: Operand, other: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    if call.operands != [input, other] or min(input.ndim, other.ndim) < 2:
        return None
    if call.name == "linalg_solve" and other.shape == input.shape[:-1]:
        return None  # a batch of vectors
    try:
        batch, (first, second) = broadcast([input.shape[:-2], other.shape[:-2]])
    except RuntimeError:
        return None
    return _batched(call, tuple(range(len(batch))), [(*first, None, None), (*second, None, None)])


def _batched(call: Call, batch: Dims, ins: list[Dims]) -> Spec | None:
    shapes = shapes_of_results(call)
    sizes = {f: n for dims, o in zip(ins, call.operands, strict=True) for f, n in zip(dims, o.shape, strict=True)}
    if shapes is None or any(tuple(s[: len(batch)]) != tuple(sizes.get(f) for f in batch) for s in shapes):
        return None
    outs: list[Dims] = [(*batch, *(None,) * (len(s) - len(batch))) for s in shapes]
    return Spec(ins, outs, shapes)


@rule("vander", "linalg_vander")
def vander(call: Call, x: Operand, N: int | None = None, increasing: bool = False) -> Spec | None:
    """The powers of each number as a row."""
    if not x.ndim or (N is not None and N < 0):
        return None
    count = x.shape[-1] if N is None else N
    factors: Dims = tuple(range(x.ndim))
    order = {} if call.name == "linalg_vander" else {"increasing": increasing}

    def localize(chosen: Chosen) -> LocalFunction:
        return lambda func, loc, kw: func(loc[0], N=count, **order)

    return Spec([factors], [(*factors, None)], [(*x.shape, count)], localize=localize)


# ------------------------------------------------------------------ distances and cross products of rows


_ROWS = loops("...m_, ...n_ -> ...mn")
_BY_PRODUCT = "use_mm_for_euclid_dist"
_MANY_ROWS = 25  # of more rows PyTorch computes Euclidean distances by a product


@rule("cdist")
def cdist(call: Call, x1: Operand, x2: Operand, p: Any = 2.0, compute_mode: Any = None) -> Spec | None:
    """Every row of x1 with every row of x2.

    PyTorch has two ways, of which only the product has second derivatives; the global numbers of rows decide.
    """
    if call.operands != [x1, x2] or x1.shape[-1:] != x2.shape[-1:]:
        return None
    spec = _ROWS.spec(call.operands)
    if spec is None or p != 2:
        return spec
    many = compute_mode in (None, 0, f"{_BY_PRODUCT}_if_necessary") and max(x1.shape[-2], x2.shape[-2]) > _MANY_ROWS
    if many or compute_mode in (1, _BY_PRODUCT):
        spec.localize = lambda chosen: _by_product if chosen.sharded else None
    return spec


def _by_product(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
    x1, x2 = loc[:2]
    result: torch.Tensor = torch.cdist(x1, x2, 2.0, _BY_PRODUCT)
    return result if result.numel() else tied_to(result.detach(), x1, x2)


@rule("linalg_cross")
def cross(call: Call, input: Operand, other: Operand, *, dim: int = -1) -> Spec | None:
    try:
        out, ins = broadcast([input.shape, other.shape])
    except RuntimeError:
        return None
    if call.operands != [input, other] or input.ndim != other.ndim or not input.ndim:
        return None
    d = norm_dim(dim, len(out))
    return Spec(ins, [tuple(range(len(out)))], [out], whole=frozenset((d,)), linear=[(0,), (1,)])


@rule("renorm")
def renorm(call: Call, input: Operand, p: Static, dim: int, maxnorm: Static) -> Spec | None:
    """Each slice of `dim` by itself."""
    return within(input, set(range(input.ndim)) - {norm_dim(dim, input.ndim)}) if input.ndim else None


@decomposition("dist")
def dist(input: Any, other: Any, p: Any = 2) -> Any:
    return torch.linalg.vector_norm(input - other, p)
