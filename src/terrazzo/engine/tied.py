"""Tied parameters: one parameter of the model that is on several stages of a pipeline, as in embedding and head.

Each stage has its own copy. The copies start with the same values and their gradients are summed, so that all take the
same steps. The copy with the first name is the one that counts in the norm and that checkpoints store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.comm import Axis, axis_over, collectives
from terrazzo.engine.gathering import gather_over
from terrazzo.engine.placing import on_device
from terrazzo.errors import EngineConfigError
from terrazzo.tensor import DTensor


@dataclass(frozen=True, eq=False)
class _Copy:
    """This rank's copy of a parameter."""

    name: str
    holders: Axis  # the ranks that have a copy
    source: int  # the position among these of the one with the first name


class TiedParameters:
    """The copies that a rank's stages hold.

    Attributes:
        first: for each copy here that has another name, the first name.
    """

    def __init__(self, module: nn.Module, tied: Mapping[str, str], axis: Axis) -> None:
        shapes = {name: list(p.shape) for name, p in module.named_parameters()}
        named = {*tied, *tied.values()}
        found = gather_over(axis, {name: shape for name, shape in shapes.items() if name in named})
        self.first = {name: first for name, first in tied.items() if name in shapes}
        self._copies: list[_Copy] = []
        for first in dict.fromkeys(tied.values()):
            names = [first, *(name for name, of in tied.items() if of == first)]
            places = [_place(name, found, axis) for name in names]
            if len(set(places)) < len(places):
                raise EngineConfigError(
                    f"tied: {' and '.join(names)} are on the same rank; tie them in the module instead"
                )
            sizes = {name: found[place][name] for name, place in zip(names, places, strict=True)}
            if len({tuple(size) for size in sizes.values()}) > 1:
                raise EngineConfigError(f"tied: these parameters have different shapes: {sizes}")
            if axis.index in places:
                ranks = tuple(axis.ranks[place] for place in sorted(places))
                here = names[places.index(axis.index)]
                source = sorted(places).index(places[0])
                self._copies.append(_Copy(here, axis_over(ranks, axis.device_type), source))

    @torch.no_grad()
    def make_equal(self, module: nn.Module) -> None:
        """Set all copies to the values of the first."""
        for copy, parameter in self._here(module):
            local = _local(parameter)
            local.copy_(collectives.broadcast(on_device(local, copy.holders), copy.holders, copy.source))

    @torch.no_grad()
    def add_gradients(self, module: nn.Module) -> None:
        """Set the gradients of all copies to their sum."""
        for copy, parameter in self._here(module):
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local = _local(parameter.grad)
                local.copy_(collectives.all_reduce(on_device(local, copy.holders), copy.holders))

    def uncounted(self, module: nn.Module) -> set[nn.Parameter]:
        """The copies whose gradients another stage counts in the norm."""
        return {parameter for copy, parameter in self._here(module) if copy.name in self.first}

    def _here(self, module: nn.Module) -> list[tuple[_Copy, nn.Parameter]]:
        if not self._copies:
            return []
        parameters = dict(module.named_parameters())
        return [(copy, parameters[copy.name]) for copy in self._copies]


def _place(name: str, found: list[Any], axis: Axis) -> int:
    places = [index for index, names in enumerate(found) if name in names]
    if len(places) != 1:
        raise EngineConfigError(
            f"tied: {name} must be a parameter of exactly one stage, but of ranks {list(axis.ranks)}, "
            f"{[axis.ranks[place] for place in places] or 'none'} have it"
        )
    return places[0]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
