"""What a plan is made from: of each unit its sizes and what the user has set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a unit's buffers on this rank, and what its collectives make a rank send on average."""

    shard: int = 0
    gathered: int = 0  # what a gather brings to a place of its own
    unsharded: int = 0  # 0: the shards are the parameters
    kept: int = 0
    gradients: int = 0
    packed: int = 0
    reduced: int = 0
    gather_moves: int = 0
    kept_moves: int = 0  # a gather among the ranks of the smaller mesh
    reduce_moves: int = 0
    all_reduce_moves: int = 0
    in_place: bool = False  # most of what a gather brings arrives in the unsharded parameters

    @property
    def arriving(self) -> int:
        """Memory that is taken when a gather begins."""
        return self.gathered + self.unsharded * self.in_place


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Modules whose parameters are gathered and reduced together."""

    name: str
    modules: int = 1
    sizes: Sizes | None = None  # None: it has no parameters
    trainable: bool = True
    aliased: bool = False  # the unsharded parameters are the shards
    alone: bool = False  # there is nobody to reduce with
    replicated: bool = False  # reduced over replicas too
    reshard_after_forward: bool = True
    reshard_inner: bool = False  # to a smaller mesh
    keeps_part: bool = False  # there only some parameters are, and the others are gathered from the shards again
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    gradient_sync: bool = True
    all_reduce: bool = True
    forward_prefetch: tuple[int, ...] | None = None  # units; None: by the order of the last forward
    backward_prefetch: tuple[int, ...] | None = None
    reduce_buffers: int = 1  # packed gradients that may be under reduction when its own are packed
    kin: int = -1  # units of one kin may be gathered and reduced together; -1: with none


@dataclass(frozen=True, slots=True)
class Spec:
    """All units of one root, in the order of its modules."""

    units: tuple[UnitSpec, ...]
    streams: bool  # whether the device has streams; otherwise the host waits for what it needs
    modules: tuple[int, ...] = ()  # the unit of each module, where units have several
    overlapped: int = 1 << 20  # bytes that may, on CPU, be gathered further ahead, and be under reduction
    furthest: int = 4  # how many units ahead
    coalesce_bytes: int = 0  # of unsharded parameters that are gathered and reduced together, at most
    together: tuple[tuple[int, ...], ...] = ()  # for each unit those that go together with it, itself among them

    def __post_init__(self) -> None:
        if not self.together:
            object.__setattr__(self, "together", _neighbours(self.units, self.coalesce_bytes))
        if not self.modules:
            counted = tuple(u for u, unit in enumerate(self.units) for _ in range(unit.modules))
            object.__setattr__(self, "modules", counted)


def _neighbours(units: tuple[UnitSpec, ...], limit: int) -> tuple[tuple[int, ...], ...]:
    """Small units of one kin that follow one another, as many as are together no larger than the limit.

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
