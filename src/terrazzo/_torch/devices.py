"""Devices that torch does not know by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo._torch.declared import private

register_device_module: Callable[[str, Any], None] = private(
    "torch._register_device_module", "`terrazzo.testing.late` is a device, and torch asks `torch.late` about it"
)
