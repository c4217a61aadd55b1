"""Which parameters have a gradient on any rank: known on the device when their reduction has ended.

The host learns it for those that have none on this rank. On an accelerator it does not wait during backward, but when
`.grad` of such a parameter is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


def elements(count: int, missing: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`count` elements: one for each parameter, or zero for those `missing` on this rank."""
    if not missing or device.type == "cpu":
        found = torch.ones(count, dtype=dtype, device=device)
        if missing:
            found[list(missing)] = 0
        return found
    values = torch.ones(count, dtype=dtype, device="cpu", pin_memory=True)
    values[list(missing)] = 0
    return values.to(device, non_blocking=True)  # from pinned memory: of other memory the host may have to wait


class Sums:
    """The sums of these elements over the ranks, for the host."""

    def __init__(self, sums: Tensor) -> None:
        """Called on the stream that has computed them."""
        self._sums = sums
        self._event: Any = None
        if sums.device.type != "cpu":
            self._sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True, device="cpu")
            self._sums.copy_(sums, non_blocking=True)
            self._event = torch.get_device_module(sums.device.type).Event()
            self._event.record()

    @property
    def are_here(self) -> bool:
        """Whether the host need not wait for them."""
        return self._event is None

    @cached_property
    def _values(self) -> list[float]:
        return self._known()

    def _known(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._sums.tolist()
        return values

    def reached(self, i: int) -> bool:
        """Whether any rank has a gradient of this parameter."""
        return self._values[i] > 0
