"""Comparing what ranks hold with what one device has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from terrazzo.tensor import DTensor

# Of half precision, relative and absolute: two units in the last place.
TOLERANCES = {dtype: (2 * torch.finfo(dtype).eps, torch.finfo(dtype).eps) for dtype in (torch.float16, torch.bfloat16)}


class Mismatch(Exception):
    """The result is not that of one device."""


def tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors(v)]
    if isinstance(value, dict):
        return tensors(list(value.values()))
    return []


def unwrapped(value: Any) -> Any:
    """Results with whole plain tensors in place of DTensors."""
    if isinstance(value, DTensor):
        return value.detach().full_tensor()
    if isinstance(value, (list, tuple)):
        items = [unwrapped(v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {k: unwrapped(v) for k, v in value.items()}
    return value


def compare_kind(mine: Any, theirs: Any) -> None:
    """Same structure; tensors of the same shape and dtype; other values equal."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(mine, torch.Tensor):
            raise Mismatch(f"{type(mine).__name__} instead of a tensor")
        if tuple(mine.shape) != tuple(theirs.shape) or mine.dtype != theirs.dtype or mine.layout != theirs.layout:
            raise Mismatch(
                f"{tuple(mine.shape)} {mine.dtype} {mine.layout} instead of {tuple(theirs.shape)} {theirs.dtype} "
                f"{theirs.layout}"
            )
    elif isinstance(theirs, (list, tuple)):
        if not isinstance(mine, (list, tuple)) or len(mine) != len(theirs):
            raise Mismatch(f"{type(mine).__name__} instead of {type(theirs).__name__} of {len(theirs)}")
        for a, b in zip(mine, theirs, strict=True):
            compare_kind(a, b)
    elif isinstance(theirs, float):
        if not (mine == theirs or abs(mine - theirs) <= 1e-5 * abs(theirs) or (mine != mine and theirs != theirs)):
            raise Mismatch(f"{mine!r} instead of {theirs!r}")
    elif mine != theirs:
        raise Mismatch(f"{mine!r} instead of {theirs!r}")


def comparable(t: torch.Tensor) -> torch.Tensor:
    t = unwrapped(t.detach())
    t = t if t.layout == torch.strided else t.to_dense()
    t = t.to(torch.complex64) if t.dtype == torch.complex32 else t
    return t.nan_to_num() if t.is_floating_point() else t


def rounding_of_terms(result: Any) -> torch.Tensor | float:
    """How far terms of half precision may be off together: each rank rounds its own one, once (docs/tensor.md)."""
    if not isinstance(result, DTensor) or result.dtype not in TOLERANCES:
        return 0.0
    layout = result._layout
    if not any(p.is_partial("sum") or p.is_partial("avg") for p in layout.placements):
        return 0.0
    sizes = DTensor.from_local(
        result.detach().to_local().abs().float(),
        layout.mesh,
        layout.placements,
        shape=layout.shape,
        stride=torch.empty(layout.shape, device="meta").stride(),
    )
    return sizes.full_tensor() * torch.finfo(result.dtype).eps


def rounding_of_sums(x: torch.Tensor, outs: list[Any]) -> float:
    """How far the gradient of a broadcast tensor of a half type may be off: each rank rounds its own sum, once.

    Of n values around 1 in size, as the cotangents are, the sum is around the root of n.
    """
    if x.dtype not in TOLERANCES or not x.numel():
        return 0.0
    count = max((t.numel() for t in outs), default=0) / x.numel()
    return count**0.5 * torch.finfo(x.dtype).eps if count > 1 else 0.0


def compare_values(
    what: str,
    mine: torch.Tensor,
    theirs: torch.Tensor,
    precise: Callable[[], torch.Tensor | None],
    rounding: Callable[[], torch.Tensor | float] = lambda: 0.0,
) -> None:
    """Raise unless the values are alike.

    `precise` gives what double precision makes of it: where one device itself is off by its rounding, so may we be.
    `rounding` gives what our own values may be off beside that.
    """
    mine, theirs = mine.detach(), theirs.detach()
    if mine.layout != torch.strided:
        mine, theirs = mine.to_dense(), theirs.to_dense()
    if mine.dtype == torch.complex32:
        mine, theirs = mine.to(torch.complex64), theirs.to(torch.complex64)
    if mine.dtype.is_floating_point or mine.dtype.is_complex:
        if torch.equal(mine, theirs):
            return
        finite = theirs.abs()[theirs.isfinite()].double()
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
        # Sums in another order differ by rounding, in proportion to the largest value.
        relative, absolute = TOLERANCES.get(mine.dtype, (1e-4, 3e-5))
        if torch.allclose(mine, theirs, rtol=relative, atol=absolute * scale, equal_nan=True):
            return
        true = precise()
        allowed = rounding() + absolute * scale + relative * theirs.abs().double()
        if bool((((mine - theirs).abs().double() <= allowed) | allowed.isposinf()).all()):
            return
        if true is not None and true.shape == theirs.shape and (true.is_floating_point() or true.is_complex()):
            off, theirs_off = (mine.to(true.dtype) - true).abs(), (theirs.to(true.dtype) - true).abs()
            if bool((off <= theirs_off + absolute * scale + relative * true.abs()).all()):
                return
            # One device rounds here, the ranks there: as accurate as at its worst is enough.
            if mine.dtype in TOLERANCES and theirs_off.numel() and bool((off <= theirs_off.max()).all()):
                return
    elif torch.equal(mine, theirs):
        return
    bad = mine != theirs
    raise Mismatch(
        f"{what}: {int(bad.sum())} of {mine.numel()} values differ, {mine[bad][:3].tolist()} instead of "
        f"{theirs[bad][:3].tolist()}"
    )


def compare_gradient(
    what: str,
    mine: Any,
    theirs: Any,
    precise: Callable[[], torch.Tensor | None],
    rounding: Callable[[], torch.Tensor | float],
) -> None:
    """Raise unless a gradient is that of one device."""
    if mine is None:
        if theirs is not None:  # on other ranks it may be there: optimizers would part ways
            raise Mismatch(f"{what} is missing")
        return
    whole = unwrapped(mine)
    if theirs is None:
        theirs = torch.zeros_like(whole)
    if whole.dtype != theirs.dtype or whole.shape != theirs.shape:
        raise Mismatch(f"{what}: {whole.dtype} {tuple(whole.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}")
    compare_values(what, whole, theirs, precise, rounding)
