"""Checks of parameters that users have replaced, moved or given other values, before a unit takes them over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from terrazzo.errors import FSDPError
from terrazzo.fsdp.parameter import ShardedParameter
from terrazzo.fsdp.settings import Settings
from terrazzo.layout import Layout
from terrazzo.tensor import DTensor


def adopt(param: ShardedParameter, found: Any, partly: bool) -> None:
    """Have `found`, which is registered instead of the sharded parameter, be that; raise if it does not fit."""
    if found is param.sharded:
        return
    if isinstance(found, DTensor) and not isinstance(found, nn.Parameter):
        raise FSDPError(
            f"rank {dist.get_rank()}: parameter {param.name!r} was replaced by a DTensor that is no nn.Parameter, "
            "as torch.func.functional_call does: the gather has no derivative, so gradients would be lost. Write "
            "the values to the parameters (copy_, .data, load_state_dict), or call the module before fully_shard"
        )
    if not (isinstance(found, DTensor) and _is_same(found._layout, param.layout)):
        placed = f"DTensor placed {list(found.placements)}" if isinstance(found, DTensor) else type(found).__name__
        raise FSDPError(
            f"rank {dist.get_rank()}: parameter {param.name!r} was replaced by a {placed} of shape "
            f"{tuple(found.shape)}; it must be a DTensor of shape {tuple(param.layout.shape)} with the placements "
            f"{list(param.layout.shown)} on the same mesh"
        )
    found._layout = param.layout  # equal meshes may have different process groups
    if not (partly and found.device.type != "meta" and param.materialise(found)):
        param.sharded = found


def are_alike(params: Sequence[ShardedParameter]) -> bool:
    """Whether shards are of one dtype and on one kind of device."""
    return len({(p.sharded._local.device.type, p.sharded._local.dtype) for p in params}) == 1


def check_alike(params: Sequence[ShardedParameter], settings: Settings) -> None:
    """Raise if parameters of one group and one dtype are not alike any more, or not where they must be."""
    if not params:
        return
    shards = [(p.name, p.sharded._local) for p in params]
    name, first = shards[0]
    for other, shard in shards:
        if (shard.device.type, shard.dtype) != (first.device.type, first.dtype):
            raise FSDPError(
                f"parameters of one group must be alike, but {name!r} is {first.dtype} on {first.device}, and "
                f"{other!r} is {shard.dtype} on {shard.device}: move or materialise all of them"
            )
    rest = settings.rest_device
    if first.device.type not in (rest.type, "meta"):
        raise FSDPError(
            f"the sharded parameters {name!r}, ... are on {first.device}, but must be on {rest} by their mesh and "
            f"offload policy: move the module back to {rest}"
        )


def _is_same(one: Layout, other: Layout) -> bool:
    return one is other or (
        (one.placements, one.shape, one.order) == (other.placements, other.shape, other.order)
        and one.mesh == other.mesh
    )


__all__ = ["adopt", "are_alike", "check_alike"]
