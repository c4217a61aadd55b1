"""DLPack: the C function sees only the wrapper, and would export a null pointer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo._torch.declared import like, private, replace

_PATHS = ("torch.utils.dlpack.to_dlpack", "torch.to_dlpack")
_plain: Any = [private(path, "a DTensor's memory is not exported", patched=True) for path in _PATHS][0]


def install(is_ours: type, refuse: Callable[[], Any]) -> None:
    """Call `refuse()` if a tensor of class `is_ours` is exported."""

    def to_dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, is_ours):
            refuse()
        return _plain(tensor, *args, **kwargs)

    like(to_dlpack, _plain)
    # With the original name, so that it can be pickled and found again.
    to_dlpack.__module__, to_dlpack.__name__, to_dlpack.__qualname__ = "torch.utils.dlpack", "to_dlpack", "to_dlpack"
    for path in _PATHS:
        replace(path, to_dlpack)
