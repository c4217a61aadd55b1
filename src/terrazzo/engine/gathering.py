"""Exchanging plain data between the ranks of an axis."""

from __future__ import annotations

from typing import Any

import msgspec

from terrazzo.comm import Axis, ControlPlane


def gather_over(axis: Axis, value: Any) -> list[Any]:
    """The value, plain data, of each rank of an axis."""
    encoded = msgspec.json.encode(value)
    gathered = [encoded] if axis.group is None else ControlPlane.for_group(axis.group).all_gather(encoded)
    return [msgspec.json.decode(data) for data in gathered]
