"""The input of the planner: the sizes and settings of each unit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of a unit's buffers on this rank, and the bytes that a rank sends in its collectives, on average."""

    shard: int = 0
    gathered: int = 0  # the buffer of a gather, if it is not in place
    unsharded: int = 0  # 0 if the unsharded parameters are the shards
    kept: int = 0
    gradients: int = 0
    packed: int = 0
    reduced: int = 0
    gather_moves: int = 0
    kept_moves: int = 0  # sent for a gather over the smaller mesh
    reduce_moves: int = 0
    all_reduce_moves: int = 0
    in_place: bool = False  # whether a gather receives most bytes directly into the unsharded parameters

    @property
    def arriving(self) -> int:
        """The memory that is allocated when a gather starts."""
        return self.gathered + self.unsharded * self.in_place


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Groups whose parameters are gathered and reduced together."""

    name: str
    modules: int = 1
    sizes: Sizes | None = None  # None: it has no parameters
    trainable: bool = True
    aliased: bool = False  # whether the unsharded parameters are the shards
    alone: bool = False  # whether no other rank reduces with this one
    replicated: bool = False  # whether gradients are also reduced over replicas
    reshard_after_forward: bool = True
    reshard_inner: bool = False  # whether to reshard to a smaller mesh
    keeps_part: bool = False  # whether only some parameters are kept there; the others are gathered from the shards
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    gradient_sync: bool = True
    all_reduce: bool = True
    forward_prefetch: tuple[int, ...] | None = None  # units; None: those that follow in the last forward
    backward_prefetch: tuple[int, ...] | None = None
    reduce_buffers: int = 1  # buffers of packed gradients that may be in reduction when its own are packed
    kin: int = -1  # units with the same number may be gathered and reduced together; -1: with none


@dataclass(frozen=True, slots=True)
class Spec:
    """All units of one root, in the order of its modules."""

    units: tuple[UnitSpec, ...]
    streams: bool  # whether the device has streams; else the host waits for results
    modules: tuple[int, ...] = ()  # the unit of each module, if units have several modules
    overlapped: int = 1 << 20  # bytes on CPU that may be gathered further ahead, or be in reduction meanwhile
    furthest: int = 4  # the number of units that may be gathered ahead
    coalesce_bytes: int = 0  # the most bytes of unsharded parameters that are gathered and reduced together
    together: tuple[tuple[int, ...], ...] = ()  # for each unit the units that share messages with it, including it

    def __post_init__(self) -> None:
        if not self.together:
            object.__setattr__(self, "together", _neighbours(self.units, self.coalesce_bytes))
        if not self.modules:
            counted = tuple(u for u, unit in enumerate(self.units) for _ in range(unit.modules))
            object.__setattr__(self, "modules", counted)


def _neighbours(units: tuple[UnitSpec, ...], limit: int) -> tuple[tuple[int, ...], ...]:
    """Runs of consecutive small units of one kin, each run up to the limit of bytes.

    >>> small = UnitSpec("", sizes=Sizes(unsharded=10), kin=0)
    >>> _neighbours((small, small, small), 20)
    ((0, 1), (0, 1), (2,))
    """
    found: dict[int, tuple[int, ...]] = {i: (i,) for i in range(len(units))}
    members: list[int] = []
    for i, unit in enumerate(units):
        if unit.sizes is None:
            continue
        fits = sum(_bytes(units[j]) for j in members) + _bytes(unit) <= limit
        if not (members and fits and unit.kin >= 0 and unit.kin == units[members[-1]].kin):
            members = []
        members.append(i)
        found.update(dict.fromkeys(members, tuple(members)))
    return tuple(found[i] for i in range(len(units)))


def _bytes(unit: UnitSpec) -> int:
    return 0 if unit.sizes is None else max(unit.sizes.unsharded, unit.sizes.packed)
