"""How the sweep distributes a sample: which placements each of its tensors gets, and what each rank then holds."""

from __future__ import annotations

import random
from typing import Any

import torch

from terrazzo.layout import Layout, Partial, Placement, Replicate, Shard
from terrazzo.tensor import DTensor

FAMILIES = ("replicate", "shard", "partial", "mixed")
MESHES: dict[str, tuple[int, ...]] = {"4": (4,), "2x2": (2, 2)}

# The terms of x are x times these. Every sum of neighbours is 0 or +-1 or 2, so that no reduction rounds, and no odd or
# even homogeneous function of the terms adds up to that of x by accident.
_FACTORS = {4: (2.0, -1.0, 1.0, -1.0), 2: (2.0, -1.0)}
_FACTORS_OF_PRODUCT = {4: (2.0, 0.5, 4.0, 0.25), 2: (2.0, 0.5)}
_TERMS = ("sum",) * 5 + ("avg", "avg", "max", "min", "product")


def choose(
    shape: tuple[int, ...], floating: bool, family: str, mesh_ndim: int, rng: random.Random, dim: int
) -> list[Placement]:
    """One placement a mesh dim. `dim` is the dim that a sample's tensors share out by preference."""
    ndim = len(shape)
    if family == "replicate" or (ndim == 0 and not floating):
        return [Replicate()] * mesh_ndim
    if family == "mixed":
        family = rng.choice(("replicate", "shard", "shard", "partial"))
        dim = rng.randrange(8)
        return choose(shape, floating, family, mesh_ndim, rng, dim)
    shard: Placement = Shard(dim % ndim) if ndim else Replicate()
    if family == "shard":
        if mesh_ndim == 1 or ndim == 0:
            return [shard] * mesh_ndim
        other = Shard((dim + 1) % ndim)
        return rng.choice(([shard, other], [shard, shard], [shard, Replicate()], [Replicate(), shard]))
    if not floating:
        return [Replicate()] * mesh_ndim
    term, other = Partial(rng.choice(_TERMS)), Partial(rng.choice(_TERMS))
    if mesh_ndim == 1:
        return [term]
    return rng.choice(([term, term], [term, other], [term, shard], [shard, term], [term, Replicate()]))


def distribute(tensor: torch.Tensor, mesh: Any, placements: list[Placement]) -> DTensor:
    """`tensor`, which every rank holds, as a DTensor; a leaf if it requires a gradient."""
    if tensor.layout is not torch.strided:
        return DTensor.from_local(tensor, mesh, placements)  # says why not
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.isnan().any()):  # these have no order
        placements = [Partial() if p.is_partial("max") or p.is_partial("min") else p for p in placements]
    layout = Layout.of(mesh, placements, tuple(tensor.shape))
    local = tensor.detach()
    for m, p in enumerate(layout.placements):  # the first mesh dim's terms first: they are reduced last
        if isinstance(p, Partial):
            n, k = layout.mesh_shape[m], layout.coord[m]  # type: ignore[index]  # every rank is in the mesh
            local = _term(local, p.reduce_op, m, n, k)
    local = local[layout.box().slices()].clone()
    result = DTensor.from_local(local, mesh, list(layout.placements), shape=tuple(tensor.shape))
    return result.requires_grad_() if tensor.requires_grad else result


def kinds(layout: Layout) -> set[str]:
    """Which of the ways of holding a tensor this layout shows."""
    found = set()
    for m, p in enumerate(layout.placements):
        if isinstance(p, Partial):
            found.add("partial")
        elif isinstance(p, Shard):
            n, parts = layout.shape[p.dim], layout.mesh_shape[m]
            step = -(-n // parts)
            found.add("even" if n and n % parts == 0 else "empty" if step * (parts - 1) >= n else "uneven")
    return found or {"replicate"}


def _term(whole: torch.Tensor, op: str, m: int, n: int, k: int) -> torch.Tensor:
    """Term number `k` of `n`, along mesh dim `m`."""
    if op in ("max", "min"):  # one rank has each element, the others have less, or more
        turn = (torch.arange(whole.numel()) + m).view(whole.shape) % n
        return torch.where(turn == k, whole, whole - 1.5 if op == "max" else whole + 1.5)
    if op == "product":
        return whole * _FACTORS_OF_PRODUCT[n][0] if k == 0 else torch.full_like(whole, _FACTORS_OF_PRODUCT[n][k])
    factor = _FACTORS[n][k] * (n if op == "avg" else 1)
    # Infinities, and what would become one, have no terms of either sign: one rank keeps them, or all the mean.
    alone = whole if k == 0 or op == "avg" else torch.zeros_like(whole)
    return torch.where((whole * (2 * n)).isfinite(), whole * factor, alone)
