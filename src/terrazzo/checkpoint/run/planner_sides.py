"""What sessions ask of planners beyond PyTorch's interface: the one protocol between them.

A planner whose class has a `save_side` or a `load_side` takes part as what that returns.  Any other one takes part as a
`PlainSaveSide` or `PlainLoadSide`: its plans go through the coordinator.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Protocol

from terrazzo.checkpoint.native.plans import ReadPlan
from terrazzo.checkpoint.plan.global_plan import GlobalPlanCache
from terrazzo.checkpoint.plan.held import Held
from terrazzo.checkpoint.plan.ownership import Negotiation
from terrazzo.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner
from terrazzo.errors import CheckpointError


class SavePlannerSide(Protocol):
    """A planner as a save sees it."""

    plan_cache: GlobalPlanCache | None

    @property
    def plans_alone(self) -> bool:
        """Whether each rank can work out its own part, by `negotiate` and `share_plan`."""
        ...

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        """This rank's place in the group, and the global ranks of the group; before `set_up_planner`."""
        ...

    def hold(self) -> Held | None:
        """What this rank could write, in the library's own form, instead of `create_local_plan`; None if this planner
        has to see PyTorch's items."""
        ...

    def negotiate(self, plan: SavePlan) -> Negotiation | None:
        """This rank's side of the agreement on who writes what."""
        ...

    def share_plan(self, plan: SavePlan, negotiation: Negotiation, holders: Sequence[tuple[int, ...]]) -> SavePlan:
        """This rank's part of the plan of all, when it is known who holds what; asked only if `plans_alone`."""
        ...

    def forget(self) -> None:
        """The save has ended: let go of the state."""
        ...


class LoadPlannerSide(Protocol):
    """A planner as a load sees it."""

    @property
    def plans_alone(self) -> bool:
        """Whether the local plan is all there is."""
        ...

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        """This rank's place in the group, and the global ranks of the group; before `set_up_planner`."""
        ...

    def read_plan(self) -> ReadPlan | None:
        """What this rank reads, in the library's own form, instead of `create_local_plan`; None if this planner has to
        see PyTorch's items."""
        ...

    @property
    def allow_pickle(self) -> bool:
        """Whether values that were stored as pickles may be unpickled."""
        ...

    def put_value(self, name: str, value: io.BytesIO) -> None:
        """Put a value that a `read_plan` asked for into the state dict."""
        ...

    def write_back(self) -> None:
        """All has been read: put into the caller's state dict what is not in it yet."""
        ...

    def forget(self) -> None:
        """The load has ended: let go of the state dict."""
        ...


class PlainSaveSide:
    """Any planner that knows PyTorch's interface only; it has a global step, whatever it says of itself."""

    plan_cache: GlobalPlanCache | None = None
    plans_alone = False

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        pass

    def hold(self) -> Held | None:
        return None

    def negotiate(self, plan: SavePlan) -> Negotiation | None:
        return None

    def share_plan(self, plan: SavePlan, negotiation: Negotiation, holders: Sequence[tuple[int, ...]]) -> SavePlan:
        raise CheckpointError("this planner settles plans in create_global_plan only")

    def forget(self) -> None:
        pass


class PlainLoadSide:
    """Any planner that knows PyTorch's interface only; it plans alone if it has a `plans_alone` that says so."""

    def __init__(self, planner: LoadPlanner) -> None:
        self.plans_alone: bool = getattr(planner, "plans_alone", False)
        self.allow_pickle: bool = getattr(planner, "allow_pickle", False)

    def set_up_ranks(self, rank: int, ranks: tuple[int, ...]) -> None:
        pass

    def read_plan(self) -> ReadPlan | None:
        return None

    def put_value(self, name: str, value: io.BytesIO) -> None:
        raise CheckpointError("this planner is given values by load_bytes only")

    def write_back(self) -> None:
        pass

    def forget(self) -> None:
        pass


def save_side_of(planner: SavePlanner) -> SavePlannerSide:
    """How a planner takes part in a save."""
    own: Any = getattr(type(planner), "save_side", None)  # of its class: it may pass on what it lacks to another one
    side: SavePlannerSide = PlainSaveSide() if own is None else own(planner)
    return side


def load_side_of(planner: LoadPlanner) -> LoadPlannerSide:
    """How a planner takes part in a load."""
    own: Any = getattr(type(planner), "load_side", None)
    side: LoadPlannerSide = PlainLoadSide(planner) if own is None else own(planner)
    return side
