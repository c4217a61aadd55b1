"""`torch.masked.var` and `std` count elements in a plain tensor where there is no mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo._torch.declared import like, private, replace

_PATH = "torch.masked._ops._std_var"
_plain: Any = private(
    _PATH,
    "torch.masked.var and std of DTensors count elements in a DTensor",
    instead=None,
    without="they need a mask",
    patched=True,
)


def install(is_ours: type, full_mask: Callable[[Any], Any]) -> None:
    """Pass the mask `full_mask(input)` to them if the input is of class `is_ours` and no mask is given."""

    if _plain is None:
        return

    def _std_var(input: Any, *args: Any, mask: Any = None, **options: Any) -> Any:
        if mask is None and isinstance(input, is_ours):
            mask = full_mask(input)
        return _plain(input, *args, mask=mask, **options)

    replace(_PATH, like(_std_var, _plain))
