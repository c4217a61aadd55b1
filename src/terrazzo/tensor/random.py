"""Random numbers that belong to the global tensor.

Each random operation draws one 62-bit key from a PyTorch generator (the default one, which `torch.manual_seed`
governs and activation checkpointing saves and restores). Element `i` of the global tensor is then a hash of the key
and `i` (SplitMix64, Steele, Lea and Flood 2014), so its value depends neither on placements nor on the number of
ranks, and a rank computes only what it holds.

This needs the generators of all ranks to be in step. They are compared at the first draw on a mesh and now and then
later; ranks that have drifted apart (`torch.manual_seed(rank)`, a draw on one rank only) get an error instead of
replicas that differ.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch

from terrazzo.comm import captured
from terrazzo.comm.axis import axis_of
from terrazzo.comm.simulated import real_values
from terrazzo.errors import RandomStateError
from terrazzo.layout import Box, Layout, Replicate, Shard
from terrazzo.tensor.redistribute import redistribute_local

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_CHECK_EVERY = 256

_draws: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def draw_key(mesh: Any, generator: torch.Generator | None = None) -> int | torch.Tensor:
    """The key of one random operation; every rank of the mesh draws the same.

    While `terrazzo.compile` captures a program it is a 0-d tensor, an input of the graph.
    """
    recorder = captured.recorder()
    if recorder is not None:
        return recorder.draw(mesh, generator)
    return draw_number(mesh, generator)


def draw_number(mesh: Any, generator: torch.Generator | None = None) -> int:
    """The next number of a generator that all ranks of the mesh draw from."""
    key = next_number(generator)
    count = _draws.get(mesh, 0)
    _draws[mesh] = count + 1
    if count % _CHECK_EVERY == 0 and mesh.get_coordinate() is not None:
        _check_in_step(mesh, key)
    return key


def next_number(generator: torch.Generator | None = None) -> int:
    """The next number of a generator, whatever other ranks do."""
    device = "cpu" if generator is None else generator.device
    with real_values():
        return int(torch.randint(0, 1 << 62, (), dtype=torch.int64, generator=generator, device=device))


def _check_in_step(mesh: Any, key: int) -> None:
    axis = axis_of(mesh, tuple(range(mesh.ndim)))
    if axis.size == 1:
        return
    from terrazzo.comm.control import ControlPlane

    keys = ControlPlane.for_group(axis.group).all_gather(key.to_bytes(8, "little"))
    different = [axis.ranks[i] for i, other in enumerate(keys) if other != keys[0]]
    if different:
        raise RandomStateError(
            f"the random generators of ranks {different} are not in step with that of rank {axis.ranks[0]}, so a "
            "random DTensor "
            "would not be one tensor. Call torch.manual_seed with the same value on every rank of the mesh, and give "
            "what "
            "must differ between ranks (data loading) a torch.Generator of its own"
        )


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right: torch's keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, 30)).mul_(_MIX_1)
    z = (z ^ _shifted(z, 27)).mul_(_MIX_2)
    return z ^ _shifted(z, 31)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def global_index(layout: Layout, device: Any) -> torch.Tensor:
    """The row-major index in the global tensor of each local element."""
    box = layout.box() if layout.coord is not None else Box((0,) * layout.ndim, (0,) * layout.ndim)
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for d in reversed(range(layout.ndim)):
        offset, length = box.offsets[d], box.lengths[d]
        along = torch.arange(offset, offset + length, dtype=torch.int64, device=device) * stride
        index = along.reshape((-1,) + (1,) * (layout.ndim - 1 - d)) + index
        stride *= layout.shape[d]
    return index.expand(box.lengths) if index.shape != box.lengths else index


def bits(layout: Layout, device: Any, generator: torch.Generator | None = None) -> torch.Tensor:
    """64 random bits for each local element."""
    key = draw_key(layout.mesh, generator)
    if isinstance(key, torch.Tensor):
        start: Any = _mix(key)
    else:
        with real_values():
            start = int(_mix(torch.tensor(_signed(key), dtype=torch.int64)))
    z = global_index(layout, device) * _GAMMA
    return _mix(z.add_(start))


def _digits(dtype: torch.dtype) -> int:
    return {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)


def _drawn(layout: Layout, make: Any) -> torch.Tensor:
    """Draw as if terms were replicas, then turn them into terms."""
    if layout.dual is layout:
        result: torch.Tensor = make(layout)
        return result
    plain = layout.with_placements(
        [p if isinstance(p, Shard) else Replicate() for p in layout.placements], layout.order
    )
    return redistribute_local(make(plain), plain, layout)


def uniform(layout: Layout, dtype: torch.dtype, generator: torch.Generator | None = None) -> torch.Tensor:
    """Local values of a uniform tensor in [0, 1)."""
    digits = _digits(dtype)

    def make(placed: Layout) -> torch.Tensor:
        high = _shifted(bits(placed, placed.mesh.device_type, generator), 64 - digits)
        return high.to(torch.float64 if digits > 24 else torch.float32).mul_(2.0**-digits).to(dtype)

    return _drawn(layout, make)


def normal(layout: Layout, dtype: torch.dtype, generator: torch.Generator | None = None) -> torch.Tensor:
    """Local values of a standard normal tensor (Box and Muller)."""
    work = torch.float64 if dtype == torch.float64 else torch.float32

    def make(placed: Layout) -> torch.Tensor:
        z = bits(placed, placed.mesh.device_type, generator)
        radius = (_shifted(z, 32).to(torch.float64) + 0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        angle = (z & 0xFFFFFFFF).to(torch.float64).mul_(2 * math.pi * 2.0**-32).cos_()
        return radius.mul_(angle).to(work).to(dtype)

    return _drawn(layout, make)
