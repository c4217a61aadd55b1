"""Factory functions: each rank creates only its own part of the DTensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.errors import DTensorArgumentError
from terrazzo.layout import Layout, Placement
from terrazzo.tensor import random
from terrazzo.tensor.convert import current_mesh, placements_on
from terrazzo.tensor.dtensor import DTensor, wrap


def _shape(size: Sequence[Any]) -> tuple[int, ...]:
    if len(size) == 1 and isinstance(size[0], Sequence):
        return tuple(size[0])
    return tuple(size)


def _make(
    shape: tuple[int, ...],
    fill: Callable[[Layout, torch.dtype], torch.Tensor],
    requires_grad: bool,
    dtype: torch.dtype | None,
    layout: torch.layout,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensor:
    if layout is not torch.strided:
        raise DTensorArgumentError(f"DTensors are strided: layout={layout} is not supported")
    mesh = current_mesh(device_mesh)
    placed = placements_on(mesh, placements)
    described = Layout.of(mesh, placed, shape)
    local = fill(described, dtype or torch.get_default_dtype())
    return wrap(local, described).requires_grad_(requires_grad)


def _filled(value: Any) -> Callable[[Layout, torch.dtype | None], torch.Tensor]:
    def fill(layout: Layout, dtype: torch.dtype | None) -> torch.Tensor:
        local = torch.full(tuple(layout.local_shape), value, dtype=dtype, device=layout.mesh.device_type)
        return _as_term(local, layout)

    return fill


def _as_term(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The terms of a sum must add up to the value: the first rank holds it, the others the neutral element."""
    for m, p in enumerate(layout.placements):
        if p.is_partial("sum") and layout.coord is not None and layout.coord[m]:
            local.zero_()
        elif p.is_partial("product") and layout.coord is not None and layout.coord[m]:
            local.fill_(1)
    return local


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of zeros: `zeros(2, 3, ...)` or `zeros((2, 3), ...)`.

    >>> from terrazzo.tensor import Shard, init_device_mesh
    >>> zeros(2, 3, device_mesh=init_device_mesh("cpu", (1,)), placements=[Shard(0)]).shape
    torch.Size([2, 3])
    """
    return _make(_shape(size), _filled(0), requires_grad, dtype, layout, device_mesh, placements)


def ones(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of ones.

    >>> from terrazzo.tensor import Partial, init_device_mesh
    >>> ones(2, device_mesh=init_device_mesh("cpu", (1,)), placements=[Partial()]).full_tensor()
    tensor([1., 1.])
    """
    return _make(_shape(size), _filled(1), requires_grad, dtype, layout, device_mesh, placements)


def empty(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor with uninitialised values."""

    def fill(described: Layout, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(described.local_shape), dtype=kind, device=described.mesh.device_type)

    return _make(_shape(size), fill, requires_grad, dtype, layout, device_mesh, placements)


def full(
    size: Any,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor filled with one value; its dtype is the value's unless given.

    >>> from terrazzo.tensor import init_device_mesh
    >>> full((2,), 7, device_mesh=init_device_mesh("cpu", (1,))).full_tensor()
    tensor([7, 7])
    """
    kind = torch.full((), fill_value, device="cpu").dtype if dtype is None else dtype
    return _make(_shape((size,)), _filled(fill_value), requires_grad, kind, layout, device_mesh, placements)


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Uniform values in [0, 1) that depend on `torch.manual_seed` and the global index only, not on the placements.

    >>> from terrazzo.tensor import Shard, init_device_mesh
    >>> mesh, found = init_device_mesh("cpu", (1,)), []
    >>> for placements in ([Shard(0)], [Shard(1)]):
    ...     _ = torch.manual_seed(0)
    ...     found.append(rand(4, 4, device_mesh=mesh, placements=placements).full_tensor())
    >>> torch.equal(*found)
    True
    """
    return _make(_shape(size), random.uniform, requires_grad, dtype, layout, device_mesh, placements)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Standard normal values that depend on `torch.manual_seed` and the global index only, not on the placements.

    >>> from terrazzo.tensor import Shard, init_device_mesh
    >>> randn(4, 2, device_mesh=init_device_mesh("cpu", (1,)), placements=[Shard(1)], requires_grad=True).is_leaf
    True
    """
    return _make(_shape(size), random.normal, requires_grad, dtype, layout, device_mesh, placements)


def linspace(
    start: Any,
    end: Any,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """`steps` values evenly spaced from `start` to `end`: numbers, or tensors of one element.

    Each rank computes all of them and keeps its own, so that they are exactly those of `torch.linspace`.

    >>> from terrazzo.tensor import Shard, init_device_mesh
    >>> linspace(0, 1, 5, device_mesh=init_device_mesh("cpu", (1,)), placements=[Shard(0)]).full_tensor()
    tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000])
    """
    make = partial(torch.linspace, _number(start), _number(end), steps)
    return _spaced(make, dtype, layout, requires_grad, device_mesh, placements)


def logspace(
    start: Any,
    end: Any,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """`base` to the power of each of `linspace(start, end, steps)`.

    >>> from terrazzo.tensor import Shard, init_device_mesh
    >>> logspace(0, 2, 3, device_mesh=init_device_mesh("cpu", (1,)), placements=[Shard(0)]).full_tensor()
    tensor([  1.,  10., 100.])
    """
    make = partial(torch.logspace, _number(start), _number(end), steps, base)
    return _spaced(make, dtype, layout, requires_grad, device_mesh, placements)


def _number(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim:
        raise DTensorArgumentError(f"start and end are numbers or 0-dimensional tensors, not of shape {value.shape}")
    return (value.full_tensor() if isinstance(value, DTensor) else value).item()


def _spaced(
    make: Callable[..., torch.Tensor],
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensor:
    whole = make(dtype=dtype, device=current_mesh(device_mesh).device_type)

    def fill(described: Layout, kind: torch.dtype) -> torch.Tensor:
        return _as_term(whole[described.box().slices()].clone(), described)

    return _make(tuple(whole.shape), fill, requires_grad, whole.dtype, layout, device_mesh, placements)
