"""Which tensors are registered as a unit's parameters: the sharded ones, the unsharded ones, or kept parts."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

from terrazzo._torch.modules import parameters_of
from terrazzo.fsdp.misuse import check_optimizers_again
from terrazzo.fsdp.parameter import REPLACED, ShardedParameter, mark

_sharded = attrgetter("sharded")


class Registration:
    """The registration of a unit's parameters in its modules."""

    def __init__(self, params: Sequence[ShardedParameter]) -> None:
        self._params = params
        slots = [(i, slot) for i, param in enumerate(params) for slot in param.slots]
        self._direct = [(parameters_of(slot.module), slot.name, i) for i, slot in slots if slot.direct]
        self._indirect = [(slot.module, slot.name, i) for i, slot in slots if not slot.direct]
        self.show_sharded()

    def show_sharded(self) -> None:
        """Register the sharded parameters."""
        self.show([*map(_sharded, self._params)])

    def show(self, faces: list[Any]) -> None:
        """Register these."""
        self._registered = faces
        for parameters, name, i in self._direct:
            parameters[name] = faces[i]
        for module, name, i in self._indirect:
            setattr(module, name, faces[i])

    @property
    def shows_sharded(self) -> bool:
        """Whether the sharded parameters are registered, as far as users have not replaced them."""
        return all(map(is_, map(_sharded, self._params), self._registered))

    def replaced(self) -> dict[int, Any]:
        """Parameters that users have registered instead of ours, by index."""
        faces = self._registered
        found = {i: parameters[name] for parameters, name, i in self._direct if parameters[name] is not faces[i]}
        for module, name, i in self._indirect:
            if (parameter := parameters_of(module)[name]) is not faces[i]:
                found[i] = parameter
        return found

    def show_replaced(self) -> None:
        """Register the sharded parameters, of which some are new; an optimizer that has the former ones raises then."""
        for param, face in zip(self._params, self._registered, strict=True):
            if face is not param.sharded:
                mark(face, REPLACED, param.name)
                check_optimizers_again()
            param.sharded.__dict__.pop(REPLACED, None)  # perhaps a module uses it again
        self.show_sharded()
