"""The backend `late` of process groups, which behaves as NCCL's does."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from terrazzo._torch import groups
from terrazzo.testing.late import build


def register(name: str) -> None:
    """Register the backend; `name` is what its groups call themselves: "late", or "nccl"."""

    def create(options: Any, _: Any) -> Any:
        ranks = list(options.global_ranks_in_group)
        parent = _bound_parent()
        if parent is not None and ranks:  # torch calls this on ranks that are not members of the new group
            parent.perform_nocolor_split(None)
        gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        made: Any = build.load().ProcessGroupLate(
            gloo, options.store, name, options.group_id, ranks or list(range(options.group_size)), options.timeout
        )
        return made

    dist.Backend.register_backend("late", create, extended_api=True, devices=["late"])


def _bound_parent() -> Any:
    """The backend of the default group if that is bound to a device of ours: then its groups are splits of it."""
    if not dist.is_initialized():
        return None
    default = groups.default_group()
    device = default.bound_device_id
    # torch decides it for NCCL by the same function, but tells only NCCL of it.
    return None if device is None or device.type != "late" else groups.split_source(default)
