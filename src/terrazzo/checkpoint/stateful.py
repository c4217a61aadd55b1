"""Objects that know how to save and restore themselves."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Anything with a `state_dict` and a `load_state_dict`: modules, optimizers, data loaders, a user's own.

    `save` stores what `state_dict()` returns.  `load` calls `state_dict()` as well, fills what it returned in place, and
    hands the result to `load_state_dict`.
    """

    def state_dict(self) -> dict[str, Any]:
        """The object's state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the object from a state that `state_dict` returned earlier."""
        ...


StatefulT = TypeVar("StatefulT", bound=Stateful)
