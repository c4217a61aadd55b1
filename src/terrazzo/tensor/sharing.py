"""Parameters that several modules share stay shared when they are distributed, in one call or in several.

Distributing a module makes a new parameter in each place that has one, so two places that shared a plain parameter
would be trained separately. `SharedParameters` remembers the places, and makes them share the new parameter. A place
that an earlier call distributed is found through the plain parameter, which the remaining places still have.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from terrazzo._torch.modules import parameters_of
from terrazzo.errors import ParallelPlanError
from terrazzo.tensor.dtensor import DTensor


@dataclass(frozen=True, slots=True)
class _Place:
    """A module that has a parameter, the parameter's name there, and its full name."""

    owner: nn.Module
    name: str
    path: str

    @property
    def parameter(self) -> nn.Parameter | None:
        return parameters_of(self.owner).get(self.name)


@dataclass(frozen=True, slots=True)
class _Distributed:
    """Where a plain parameter was distributed; valid while the module is alive and still has the new parameter."""

    owner: weakref.ref[nn.Module]
    name: str
    path: str
    parameter: weakref.ref[nn.Parameter]

    def find(self) -> Any:
        owner, parameter = self.owner(), self.parameter()
        return parameter if owner is not None and parameters_of(owner).get(self.name) is parameter else None


# Keyed by the plain parameter, as long as it is alive.
_distributed: Any = WeakTensorKeyDictionary()


class SharedParameters:
    """The places of each plain parameter of a module at the time of creation."""

    def __init__(self, module: nn.Module) -> None:
        self._places: dict[int, tuple[nn.Parameter, list[_Place]]] = {}
        for path, submodule in module.named_modules():
            for name, parameter in parameters_of(submodule).items():
                if parameter is not None and not isinstance(parameter, DTensor):
                    place = _Place(submodule, name, f"{path or type(submodule).__name__}.{name}")
                    self._places.setdefault(id(parameter), (parameter, []))[1].append(place)

    def share_again(self) -> None:
        """Set in all places of a parameter the first DTensor that any of them got; all must be placed alike."""
        for plain, places in self._places.values():
            now: list[tuple[str, Any]] = [
                (place.path, p) for place in places if isinstance(p := place.parameter, DTensor)
            ]
            if not now:
                continue
            earlier = _distributed.get(plain)
            found = None if earlier is None else earlier.find()
            if found is not None and all(found is not p for _, p in now):
                now.insert(0, (earlier.path, found))
            path, shared = now[0]
            for other, parameter in now:
                if parameter._layout is not shared._layout:
                    raise ParallelPlanError(
                        f"{path} and {other} share one parameter, but the plan places it in two ways: "
                        f"{list(shared.placements)} on {shared.device_mesh} and {list(parameter.placements)} on "
                        f"{parameter.device_mesh}. Place both alike (an nn.Embedding cut by rows and an nn.Linear cut "
                        "by columns are), or give one of the modules its own copy before"
                    )
            for place in places:
                if place.parameter is not shared:
                    place.owner.register_parameter(place.name, shared)
            if found is None:
                at = places[0]
                _distributed[plain] = _Distributed(weakref.ref(at.owner), at.name, path, weakref.ref(shared))
