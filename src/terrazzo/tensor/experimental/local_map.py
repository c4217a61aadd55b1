"""`local_map`: a function of plain tensors, applied to the local tensors of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from terrazzo._torch.dispatching import functional_collectives, tree_flatten, tree_unflatten
from terrazzo.comm.axis import axis_of
from terrazzo.comm.collectives import all_gather
from terrazzo.errors import LocalMapError, PlacementMismatchError, UnsupportedCallError
from terrazzo.layout import Layout, Partial, Placement, Replicate
from terrazzo.layout.placement import CUTS, check_placement
from terrazzo.tensor.convert import current_mesh
from terrazzo.tensor.dtensor import DTensor

PlacementType: TypeAlias = Sequence[Placement] | None
"""How one argument or result is placed: one placement per mesh dim, or None for what is not a tensor."""


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: PlacementType | Sequence[PlacementType] = None,
    in_placements: Sequence[PlacementType] | None = None,
    in_grad_placements: Sequence[PlacementType] | DeviceMesh | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    spmd_types: bool = False,
) -> Callable[..., Any]:
    """Turn a function of plain tensors into one of DTensors: it gets local tensors, and its results are wrapped.

    `func` does its own communication, if any. If no argument is a DTensor, the result is `func`'s own.

    Gradients: if an input is replicated along a mesh dim along which another input or an output differs between ranks,
    each rank computes only a term of that input's gradient, and the terms are summed (PyTorch's function takes each
    rank's term for the whole gradient). Where `func` sums them itself, say so with `in_grad_placements`.

    Args:
        func: Called with the local tensors of its DTensor arguments.
        out_placements: The placements of the result; if the flattened result has several values, a tuple with an entry
            for each, None for what is not a tensor.
        in_placements: The required placements of each flattened positional argument, None for what is not a tensor, or
            one entry for each tensor among them. None requires nothing. Plain tensors are passed on unchanged.
        in_grad_placements: The placements of the gradients that `func` computes for its inputs, in the same order as
            `in_placements`. A mesh is taken for `device_mesh`, which had this position before PyTorch 2.7.
        device_mesh: The mesh of all DTensors; by default that of the arguments.
        redistribute_inputs: Redistribute inputs to the required placements instead of raising.
        spmd_types: A parameter of PyTorch 2.14's, for its package of that name. It has to be False.

    Raises:
        UnsupportedCallError: (a `NotImplementedError`) `spmd_types` is True.
        LocalMapError: (an `AssertionError`) Meshes differ, or values and placements do not match in number or kind.
        PlacementMismatchError: (a `ValueError`) An input does not have the required placements.
    """
    if spmd_types:
        raise UnsupportedCallError(
            "local_map(spmd_types=True): local tensors are not annotated with types of the package spmd_types here; "
            "say with in_grad_placements what they would have told"
        )
    if isinstance(in_grad_placements, DeviceMesh):
        in_grad_placements, device_mesh = None, in_grad_placements
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    _check_placements(out_placements, in_placements, in_grad_placements)
    outs = _as_list(out_placements)

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        positional = len(tree_flatten(args)[0])
        mesh = _common_mesh(flat, device_mesh)
        if not any(isinstance(x, DTensor) for x in flat):
            return func(*args, **kwargs)
        required = _aligned("in_placements", in_placements, flat, positional)
        gradients = _aligned("in_grad_placements", in_grad_placements, flat, positional)
        check = in_placements is not None
        placed = [
            _placed(x, need, redistribute_inputs, i, check and i < positional)
            for i, (x, need) in enumerate(zip(flat, required, strict=True))
        ]
        layouts = [x._layout for x in placed if isinstance(x, DTensor)]
        region = _Region(mesh, _varying(layouts, outs), any(_is_uneven(layout) for layout in layouts))
        locals_ = [region.enter(x, grad) for x, grad in zip(placed, gradients, strict=True)]
        local_args, local_kwargs = tree_unflatten(locals_, spec)
        results, result_spec = tree_flatten(func(*local_args, **local_kwargs))
        if len(results) != len(outs):
            raise LocalMapError(
                f"local_map: {_name(func)} returned {len(results)} values, but out_placements has {len(outs)} entries: "
                f"{list(outs)}. Give one entry per value, None for what is not a tensor"
            )
        wrapped = [region.leave(_name(func), x, p) for x, p in zip(results, outs, strict=True)]
        return tree_unflatten(wrapped, result_spec)

    return mapped


def _check_placements(*declared: Any) -> None:
    for value in declared:
        if isinstance(value, (tuple, list)):
            _check_placements(*value)
        elif value is not None:
            check_placement(value)


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", repr(func))


def _as_list(placements: PlacementType | Sequence[PlacementType]) -> tuple[PlacementType, ...]:
    """One entry per value, from the declaration for a single value or for several."""
    if placements is None or (len(placements) and all(isinstance(p, Placement) for p in placements)):
        return (placements,)  # type: ignore[return-value]  # all are placements, so this is one value's
    return tuple(placements)  # type: ignore[arg-type]  # the other half of the union


def _common_mesh(flat: Sequence[Any], device_mesh: DeviceMesh | None) -> DeviceMesh:
    meshes = [x.device_mesh for x in flat if isinstance(x, DTensor)]
    mesh = meshes[0] if device_mesh is None and meshes else device_mesh
    for other in meshes:
        if other != mesh:
            raise LocalMapError(
                f"local_map: a DTensor is on {other}, not on {mesh}; move all of them to one mesh with "
                "x.redistribute(mesh, placements)"
            )
    return mesh if mesh is None else current_mesh(mesh)  # type: ignore[return-value]  # None only without DTensors


def _aligned(
    what: str, placements: Sequence[PlacementType] | None, flat: Sequence[Any], positional: int
) -> list[PlacementType]:
    """One entry per flattened argument; keyword arguments come last and have None."""
    if placements is None:
        return [None] * len(flat)
    result: list[PlacementType]
    tensors = [i for i, x in enumerate(flat[:positional]) if isinstance(x, torch.Tensor)]
    if len(placements) == positional:
        result = list(placements)
    elif len(placements) == len(tensors):
        by_position = dict(zip(tensors, placements, strict=True))
        result = [by_position.get(i) for i in range(positional)]
    else:
        raise LocalMapError(
            f"local_map: {len(placements)} {what} for {positional} flattened arguments, of which {len(tensors)} are "
            "tensors: give one per argument (None for what is not a tensor) or one per tensor"
        )
    return result + [None] * (len(flat) - positional)


def _placed(x: Any, need: PlacementType, redistribute: bool, position: int, check: bool) -> Any:
    if not isinstance(x, DTensor):
        if need is not None and not isinstance(x, torch.Tensor):
            raise LocalMapError(
                f"local_map: argument {position} is a {type(x).__name__}, not a tensor: in_placements must be None "
                f"for it, not {list(need)}"
            )
        return x
    if need is None:
        if check:
            raise LocalMapError(
                f"local_map: argument {position} is a DTensor and expects placements, but in_placements has None for it"
            )
        return x
    layout = x._layout
    if Layout.of(layout.mesh, tuple(need), layout.shape) is layout:
        return x
    if not redistribute:
        raise PlacementMismatchError(
            f"local_map: argument {position} is placed {list(x.placements)}, but in_placements requires {list(need)}; "
            "redistribute it, or set redistribute_inputs=True"
        )
    return x.redistribute(placements=tuple(need))


def _varying(layouts: Sequence[Layout], outs: Sequence[PlacementType]) -> frozenset[int]:
    """The mesh dims along which ranks compute different values."""
    dims = {m for layout in layouts for m in layout.varying}
    for placements in outs:
        dims.update(m for m, p in enumerate(placements or ()) if not isinstance(p, Replicate))
    return frozenset(dims)


def _is_uneven(layout: Layout) -> bool:
    return any(
        length % prod(layout.mesh_shape[m] for m in layout.shard_order(dim)) for dim, length in enumerate(layout.shape)
    )


@dataclass(frozen=True, slots=True)
class _Region:
    """One call: which mesh dims vary, and whether ranks may hold parts of different sizes."""

    mesh: DeviceMesh
    varying: frozenset[int]
    uneven: bool

    def enter(self, x: Any, gradient: PlacementType) -> Any:
        if not isinstance(x, DTensor):
            return x
        if gradient is None:
            gradient = [
                Partial() if isinstance(p, Replicate) and m in self.varying else p
                for m, p in enumerate(x._layout.dual.shown)
            ]
        return x.to_local(grad_placements=gradient)

    def leave(self, name: str, value: Any, placements: PlacementType) -> Any:
        if not isinstance(value, torch.Tensor):
            if placements is not None:
                raise LocalMapError(
                    f"local_map: {name} returned a {type(value).__name__}, but out_placements has {list(placements)} "
                    "for it; it must have None there"
                )
            return value
        if isinstance(value, DTensor):
            raise LocalMapError(f"local_map: {name} returned a DTensor, but it must return plain tensors")
        if placements is None:
            raise LocalMapError(
                f"local_map: {name} returned a tensor of shape {tuple(value.shape)}, but out_placements has None for it"
            )
        if isinstance(value, functional_collectives().AsyncCollectiveTensor):
            value = value.wait()
        shape = self._shape(value, placements) if self.uneven else None
        return DTensor.from_local(value, self.mesh, placements, shape=shape)

    def _shape(self, local: torch.Tensor, placements: Sequence[Placement]) -> list[int]:
        """The global shape, computed from all ranks' local shapes."""
        everyone = axis_of(self.mesh, tuple(range(self.mesh.ndim)))
        mine = torch.tensor([list(local.shape)], dtype=torch.int64, device=local.device)
        table = all_gather(mine, everyone, 0, (1,) * everyone.size).cpu().view(*self.mesh.shape, local.ndim)
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        shape = []
        for dim, length in enumerate(local.shape):
            shards = [(m, p) for m, p in enumerate(placements) if isinstance(p, CUTS)]
            cut = [m for m, p in shards if p.dim % local.ndim == dim]
            line = tuple(slice(None) if m in cut else coordinate[m] for m in range(self.mesh.ndim))
            shape.append(int(table[(*line, dim)].sum()) if cut else length)
        return shape
