"""Collectives: what ours cost over the calls of `torch.distributed` that they end in, small and large."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cases import Implementations, Setting, case
from terrazzo.comm.axis import Axis, axis_of
from terrazzo.comm.collectives import all_gather, all_reduce, reduce_scatter

SMALL, LARGE = 64, 1 << 21  # numbers in a rank's part


def _axis(setting: Setting) -> Axis:
    return axis_of(init_device_mesh(setting.device.type, (setting.world,)), 0)


def _all_gather(setting: Setting, size: int) -> Implementations:
    axis, device = _axis(setting), setting.device
    part, out = torch.ones(size, device=device), torch.empty(size * setting.world, device=device)
    sizes = (size,) * setting.world
    return {
        "terrazzo": lambda: all_gather(part, axis, 0, sizes),
        "torch": lambda: dist.all_gather_into_tensor(out, part),
    }


def _reduce_scatter(setting: Setting, size: int) -> Implementations:
    axis, device = _axis(setting), setting.device
    whole, out = torch.ones(size * setting.world, device=device), torch.empty(size, device=device)
    sizes = (size,) * setting.world
    return {
        "terrazzo": lambda: reduce_scatter(whole, axis, 0, sizes),
        "torch": lambda: dist.reduce_scatter_tensor(out, whole),
    }


def _all_reduce(setting: Setting, size: int) -> Implementations:
    axis, x = _axis(setting), torch.zeros(size, device=setting.device)
    return {
        "terrazzo": lambda: all_reduce(x, axis),
        "torch": lambda: dist.all_reduce(x.clone()),
    }


@case(world=2, runs_on="both")
def all_gather_small(setting: Setting) -> Implementations:
    return _all_gather(setting, SMALL)


@case(world=2, runs_on="both")
def all_gather_large(setting: Setting) -> Implementations:
    return _all_gather(setting, LARGE)


@case(world=2, runs_on="both")
def reduce_scatter_small(setting: Setting) -> Implementations:
    return _reduce_scatter(setting, SMALL)


@case(world=2, runs_on="both")
def reduce_scatter_large(setting: Setting) -> Implementations:
    return _reduce_scatter(setting, LARGE)


@case(world=2, runs_on="both")
def all_reduce_small(setting: Setting) -> Implementations:
    return _all_reduce(setting, SMALL)


@case(world=2, runs_on="both")
def all_reduce_large(setting: Setting) -> Implementations:
    return _all_reduce(setting, LARGE)
