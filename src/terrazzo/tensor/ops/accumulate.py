"""How terms of half types (float16, bfloat16) are reduced: in float32, rounded once, as on one device.

A rank's sum of a million float16 values may overflow although the sum over all ranks does not, and rounding each term
adds errors that one device does not make. So a reduction whose result has a half type keeps its terms in float32 and
reduces them at once, instead of leaving partial terms to be reduced later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from terrazzo.comm.axis import Axis, axis_of
from terrazzo.comm.differentiable import reduce_replicate
from terrazzo.layout import Layout, Partial
from terrazzo.tensor.dispatch.spec import HALF, Chosen, Joined, LocalFunction, result_type
from terrazzo.tensor.dispatch.structure import on_one_element
from terrazzo.tensor.dispatch.terms import without_terms
from terrazzo.tensor.redistribute import redistribute_local


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are accumulated."""
    return torch.float32 if dtype in HALF else dtype


def in_working_type(x: Any) -> Any:
    """A tensor, distributed or plain, in the dtype to accumulate it in; terms of a half type are reduced before.

    Terms may be much larger than their sum, so a result computed from them could overflow a half type at the end.
    """
    return without_terms(x).float() if x.dtype in HALF else x


def rounded(x: Any, dtype: torch.dtype) -> Any:
    """A DTensor in `dtype`; terms of another dtype are reduced before the conversion."""
    return x if x.dtype == dtype else without_terms(x).to(dtype)


def product_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which a product or convolution of `dtype` runs: autocast may change it."""
    if not dtype.is_floating_point or dtype is torch.float64 or not torch.is_autocast_enabled(device.type):
        return dtype
    return torch.get_autocast_dtype(device.type)


def given_type(func: Any, loc: Sequence[Any], kw: dict[str, Any]) -> torch.dtype:
    """The dtype of `func`'s result: autocast may change it."""
    found = result_type(loc, kw)
    assert found is not None
    device = next(v.device.type for v in (*loc, *kw.values()) if isinstance(v, torch.Tensor))
    if kw.get("dtype") is not None or not torch.is_autocast_enabled(device):
        return found
    return on_one_element(func, loc, kw).dtype


def sums_in_single(in_single: LocalFunction) -> Callable[[Chosen], Joined]:
    """For a rule with one result: `in_single` computes a rank's terms in float32 where the result has a half type."""

    def make(chosen: Chosen) -> Joined:
        out = chosen.outs[0]

        def run(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
            terms = in_single(func, loc, kw)
            return redistribute_local(terms, out, out.dual).to(given_type(func, loc, kw))

        return Joined(run)

    return make


def with_dtype(func: Any, loc: list[Any], kw: dict[str, Any]) -> torch.Tensor:
    """A reduction of values of a half type, computed in float32 through its `dtype` argument."""
    if kw.get("dtype") is not None:
        # The values are rounded to the requested dtype; their sums are not.
        if loc:
            loc = [loc[0].to(kw["dtype"]), *loc[1:]]
        else:
            kw = kw | {"input": kw["input"].to(kw["dtype"])}
    return func(*loc, **(kw | {"dtype": torch.float32}))


def axis_of_terms(out: Layout) -> Axis:
    """The ranks whose terms add up to the output."""
    return axis_of(out.mesh, tuple(m for m, p in enumerate(out.placements) if isinstance(p, Partial)))


def axis_of_shards(chosen: Chosen) -> Axis | None:
    """The ranks among which the factors are sharded; None if every rank has all of them, or outside the mesh."""
    if chosen.ins[0].coord is None:
        return None
    dims = sorted({m for ms in chosen.sharded.values() for m in ms if chosen.ins[0].mesh_shape[m] > 1})
    return axis_of(chosen.ins[0].mesh, tuple(dims)) if dims else None


def _power(x: torch.Tensor, exponent: float) -> torch.Tensor:
    """`x ** exponent` of nonnegative values, with gradient 0 at 0 and at infinity, as in PyTorch's norms."""
    end = (x == 0) | (x == float("inf"))
    return torch.where(end, x.detach() ** exponent, torch.where(end, torch.ones_like(x), x) ** exponent)


def root(x: torch.Tensor) -> torch.Tensor:
    """The square root, with gradient 0 at 0."""
    return _power(x, 0.5)


def join_norms(norms: torch.Tensor, order: float, axis: Axis) -> torch.Tensor:
    """The norm of the vector that is sharded over the ranks, from the norms of the parts; differentiable."""
    if axis.size == 1:
        return norms
    if order == float("inf"):
        return reduce_replicate(norms, axis, "max")
    if order == float("-inf"):
        return reduce_replicate(norms, axis, "min")
    if order in (0, 1):
        return reduce_replicate(norms, axis)
    return _power(reduce_replicate(_power(norms, order), axis), 1.0 / order)


def norm_of_nothing(order: float) -> float:
    """The norm of an empty part: the value that does not change the norm of the whole."""
    return 0.0 if order >= 0 else float("inf")
