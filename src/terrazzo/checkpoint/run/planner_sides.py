"""The interface between sessions and planners, beyond PyTorch's interface.

A planner's class may have a `save_side` or a `load_side`, which returns an object with this interface. For other
planners `PlainSaveSide` or `PlainLoadSide` is used: their plans go through the coordinator.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final, Protocol

from terrazzo.checkpoint.native.plans import ReadPlan
from terrazzo.checkpoint.plan.global_plan import GlobalPlanCache
from terrazzo.checkpoint.plan.held import Held
from terrazzo.checkpoint.plan.ownership import Negotiation
from terrazzo.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner
from terrazzo.errors import CheckpointError

_THEIRS: Final = "torch.distributed.checkpoint.default_planner"


class SavePlannerSide(Protocol):
    """A planner, as a save uses it."""

    plan_cache: GlobalPlanCache | None

    @property
    def plans_alone(self) -> bool:
        """Whether each rank can compute its own part, by `negotiate` and `share_plan`."""
        ...

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        """This rank's place in the group, and the global ranks of the group; before `set_up_planner`."""
        ...

    def hold(self) -> Held | None:
        """What this rank could write, in the library's own form, instead of `create_local_plan`; None if this planner
        needs PyTorch's items."""
        ...

    def negotiate(self, plan: SavePlan) -> Negotiation | None:
        """This rank's side of the agreement on which rank writes what."""
        ...

    def share_plan(self, plan: SavePlan, negotiation: Negotiation, holders: Sequence[tuple[int, ...]]) -> SavePlan:
        """This rank's part, when the holders of everything are known; called only if `plans_alone`."""
        ...

    def forget(self) -> None:
        """Release the state at the end of the save."""
        ...


class LoadPlannerSide(Protocol):
    """A planner, as a load uses it."""

    @property
    def plans_alone(self) -> bool:
        """Whether the planner has no global step."""
        ...

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        """This rank's place in the group, and the global ranks of the group; before `set_up_planner`."""
        ...

    def read_plan(self) -> ReadPlan | None:
        """What this rank reads, in the library's own form, instead of `create_local_plan`; None if this planner needs
        PyTorch's items."""
        ...

    @property
    def allow_pickle(self) -> bool:
        """Whether values that were stored as pickles may be unpickled."""
        ...

    def put_value(self, name: str, value: io.BytesIO) -> None:
        """Set a value of the `read_plan` in the state dict."""
        ...

    def write_back(self) -> None:
        """Set values in the caller's state dict that are not in it yet, when everything has been read."""
        ...

    def forget(self) -> None:
        """Release the state dict at the end of the load."""
        ...


class PlainSaveSide:
    """A planner with PyTorch's interface only. It always has a global step."""

    plan_cache: GlobalPlanCache | None = None
    plans_alone = False

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        pass

    def hold(self) -> Held | None:
        return None

    def negotiate(self, plan: SavePlan) -> Negotiation | None:
        return None

    def share_plan(self, plan: SavePlan, negotiation: Negotiation, holders: Sequence[tuple[int, ...]]) -> SavePlan:
        raise CheckpointError("this planner makes final plans in create_global_plan only")

    def forget(self) -> None:
        pass


class PlainLoadSide:
    """A planner with PyTorch's interface only. It may have `plans_alone`."""

    def __init__(self, planner: LoadPlanner) -> None:
        self.plans_alone: bool = getattr(planner, "plans_alone", False)
        self.allow_pickle: bool = getattr(planner, "allow_pickle", False)

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        pass

    def read_plan(self) -> ReadPlan | None:
        return None

    def put_value(self, name: str, value: io.BytesIO) -> None:
        raise CheckpointError("this planner takes values by load_bytes only")

    def write_back(self) -> None:
        pass

    def forget(self) -> None:
        pass


def check_planner(planner: object) -> None:
    """Raise for a planner that is built on PyTorch's default planners: its plans are PyTorch's, not terrazzo's."""
    for kind in type(planner).__mro__:
        if kind.__module__ == _THEIRS and kind.__qualname__ in ("DefaultSavePlanner", "DefaultLoadPlanner"):
            own = type(planner)
            raise CheckpointError(
                f"the planner {own.__module__}.{own.__qualname__} is PyTorch's {kind.__qualname__} or built on it; "
                f"change the import: from terrazzo.checkpoint import {kind.__qualname__}"
            )


def save_side_of(planner: SavePlanner) -> SavePlannerSide:
    """The interface of a planner for a save."""
    own: Any = getattr(type(planner), "save_side", None)  # of its class: an instance may delegate to another planner
    side: SavePlannerSide = PlainSaveSide() if own is None else own(planner)
    return side


def load_side_of(planner: LoadPlanner) -> LoadPlannerSide:
    """The interface of a planner for a load."""
    own: Any = getattr(type(planner), "load_side", None)
    side: LoadPlannerSide = PlainLoadSide(planner) if own is None else own(planner)
    return side
