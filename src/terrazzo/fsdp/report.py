"""What a sharded model costs, known before training: bytes held, bytes sent and peak memory, for each group.

    print(terrazzo.fsdp.report(model))

The numbers follow from shapes, dtypes and the plan of `explain`. Activations and optimizer state are not included;
optimizer state is proportional to the shards.
"""

from __future__ import annotations

from typing import Final

import msgspec
from torch import nn

from terrazzo.fsdp.explain import explain, sharded
from terrazzo.fsdp.plan.memory import peak_of
from terrazzo.fsdp.plan.operations import Kind
from terrazzo.fsdp.plan.step import Plan
from terrazzo.fsdp.run.unit import Unit
from terrazzo.layout.drawing import Shown, table_html

_TITLES: Final = ("group", "held", "unsharded", "reduce", "moved", "")


class GroupReport(msgspec.Struct, frozen=True):
    """One group on this rank, or several small ones that share messages, in bytes."""

    name: str
    parameters: int  # tensors
    elements: int  # of the unsharded parameters
    held: int  # shards, and gradients of trainable shards
    unsharded: int  # while the parameters are gathered; 0 if the shards are the parameters
    gathered: int  # the buffer of a gather, until it is copied out
    gradients: int  # as backward computes them
    reduce_buffer: int  # the buffers of the reduction
    moved_forward: int  # sent by a rank in forward, on average
    moved_backward: int  # gathering again, and reducing
    kept: int  # of the unsharded parameters, between forward and backward
    together: tuple[str, ...] = ()  # the names of its groups

    @property
    def moved(self) -> int:
        """Bytes that a rank sends in a step, on average."""
        return self.moved_forward + self.moved_backward


class Report(Shown, msgspec.Struct, frozen=True):
    """All groups of a model, in the order of its modules."""

    groups: list[GroupReport]
    peak: int  # of parameters, gradients and buffers in the planned step
    coalesce_bytes: int = 0  # of unsharded parameters that are gathered and reduced in one message, at most

    @property
    def held(self) -> int:
        """Bytes that this rank holds permanently: shards and their gradients."""
        return sum(group.held for group in self.groups)

    @property
    def moved(self) -> int:
        """Bytes that a rank sends in a step, on average."""
        return sum(group.moved for group in self.groups)

    def __str__(self) -> str:
        rows = [_TITLES, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = []
        for name, *sizes, remark in rows:
            cells = [size.rjust(width) for size, width in zip(sizes, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *cells, remark]).rstrip())
        return "\n".join([*lines, *self._together()])

    def _repr_html_(self) -> str:
        return table_html(
            _TITLES, self._rows(), header="fully_shard: bytes of a rank", caption="; ".join(self._together())
        )

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            *[
                (
                    group.name,
                    _size(group.held),
                    _size(group.unsharded),
                    _size(group.reduce_buffer),
                    _size(group.moved),
                    f"{_size(group.kept)} kept until backward" if group.kept else "",
                )
                for group in self.groups
            ],
            ("all", _size(self.held), "", "", _size(self.moved), f"peak {_size(self.peak)}"),
        ]

    def _together(self) -> list[str]:
        several = [group.together for group in self.groups if len(group.together) > 1]
        return [f"in one message, up to {_size(self.coalesce_bytes)}: {', '.join(names)}" for names in several]


def report(model: nn.Module) -> Report:
    """Bytes that this rank holds and sends, and its peak memory, for the parameters of a sharded model.

    Args:
        model: The root module.
    """
    _, root = sharded(model, "report")
    plan, inside = explain(model), set(model.modules())
    units = {unit.index: unit for unit in root.units if unit.params and inside.intersection(unit.modules)}
    groups = [_group_report(unit, plan) for unit in units.values()]
    peak = peak_of([each for each in plan.operations if each.unit in units], plan.spec)
    return Report(groups, sum(group.held for group in groups) + peak, root.tops[0].options.coalesce_bytes)


def _group_report(unit: Unit, plan: Plan) -> GroupReport:
    own = plan.spec.units[unit.index]
    sizes = own.sizes
    assert sizes is not None
    shards = [(p.sharded._local, p.requires_grad) for p in unit.params]
    planned = [each for each in plan.operations if each.unit == unit.index]
    again, kept = [each.moves for each in planned if each.kind is Kind.GATHER][1:], 0
    if not own.reshard_after_forward or Kind.REST in [each.kind for each in planned]:
        kept = sizes.unsharded
    elif own.reshard_inner:
        kept = sizes.kept
    return GroupReport(
        name=unit.name,
        parameters=len(unit.params),
        elements=sum(p.layout.shape.numel() for p in unit.params),
        held=sum(local.nbytes * (2 if trainable else 1) for local, trainable in shards),
        unsharded=sizes.unsharded,
        gathered=sizes.sent + sizes.arriving,
        gradients=sizes.gradients,
        reduce_buffer=sizes.packed,
        moved_forward=sizes.gather_moves,
        moved_backward=sum(again) + sizes.reduce_moves + (sizes.all_reduce_moves if own.all_reduce else 0),
        kept=kept,
        together=tuple(group.name for group in unit.groups),
    )


def _size(nbytes: int) -> str:
    """Bytes in a fitting unit.

    >>> _size(512), _size(3 << 20), _size(1500 << 20)
    ('512 B', '3.0 MiB', '1.5 GiB')
    """
    size = float(nbytes)
    for name in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or name == "GiB":
            break
        size /= 1024
    return f"{size:.0f} B" if name == "B" else f"{size:.1f} {name}"
