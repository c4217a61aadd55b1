"""Which groups share a unit, and so a message: neighbours of the same settings, as long as they are small.

Units are joined when `fully_shard` is called on a module that contains them, because that moves their shards: what
`state_dict()` gives, or `to_local()`, refers to the same memory for ever then. To part a unit moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

from terrazzo.fsdp.group import Group, group_of
from terrazzo.fsdp.run.unit import Unit


def join(top: Group) -> None:
    """Form units of the groups in the modules of `top`, which is outermost so far."""
    inside = [group_of(inner) for module in top.modules for inner in module.modules()]
    groups = list(dict.fromkeys(group for group in inside if group is not None))
    if any(group.root is not None for group in groups):  # they have run, and programs may refer to their shards
        return
    known = set(groups)
    if top.options.auto_reshard:  # unless it comes into another module, it is not freed after forward
        known.remove(top)
    form(runs_of(group for group in groups if known.issuperset(group.unit.groups)))


def form(runs: Iterable[tuple[Group, ...]]) -> list[Unit]:
    """The units of these groups: those that there are, or new ones."""
    return [run[0].unit if run[0].unit.groups == run else Unit(run) for run in runs]


def part(unit: Unit, belongs: Callable[[Group], bool] = lambda group: True) -> None:
    """Make groups whose settings differ, or of which only some belong there, units of their own.

    None of them has run yet.
    """
    some, others = [group for group in unit.groups if belongs(group)], [g for g in unit.groups if not belongs(g)]
    if others or differ(some):
        form([*runs_of(some), *runs_of(others)])


def runs_of(groups: Iterable[Group]) -> list[tuple[Group, ...]]:
    """The groups of each unit. Each has `coalesce_bytes` of parameters at most, or one group; groups without parameters
    are units of their own."""
    found: list[list[Group]] = []
    last: list[Group] = []  # the run to which the next group may be added
    alike: tuple[object, ...] | None = None
    taken = 0
    for group in groups:
        if group.params:
            own, nbytes = None if group.options.apart else _likeness_of(group), _bytes_of(group)
            if own is not None and own == alike and taken + nbytes <= group.options.coalesce_bytes:
                last.append(group)
                taken += nbytes
                continue
            last, alike, taken = [group], own, nbytes
            found.append(last)
        else:
            found.append([group])
    return [tuple(run) for run in found]


def differ(groups: Iterable[Group]) -> bool:
    """Whether the settings of groups have changed, so that they cannot share a unit."""
    found = [_likeness_of(group) for group in groups]
    return len(found) > 1 and (None in found or len(set(found)) > 1)


def _likeness_of(group: Group) -> tuple[object, ...] | None:
    """Groups with equal values may share a unit; None: this one shares with none."""
    settings, options = group.settings, group.options
    mesh = settings.mesh
    own = (options.all_gather, options.reduce_scatter, options.hook, options.staging)
    if group.inner or options.reduce_axes or any(x is not None for x in own):
        return None
    if any(param.mesh is not (mesh if param.shape else mesh.of_scalars) for param in group.params):
        return None
    # By process group, because every mesh["dp"] is a new mesh object.
    axes = [(axis.ranks, id(axis.group)) for axis in (mesh.shard, mesh.replicate) if axis is not None]
    reduced = (mesh.sums_already, options.divisor, options.force_sum)
    limits = (options.coalesce_bytes, options.reduce_buffers, options.buffers)
    return (*axes, *reduced, *limits, group.switches, settings.precision, settings.offload)


def _bytes_of(group: Group) -> int:
    """The bytes of a group's parameters in a gather or in a reduction, whichever takes more."""
    found, settings = 0, group.settings
    for param in group.params:
        dtype = settings.compute_dtype(param.values.dtype)
        found += prod(param.shape) * max(dtype.itemsize, (settings.precision.reduce_dtype or dtype).itemsize)
    return found
