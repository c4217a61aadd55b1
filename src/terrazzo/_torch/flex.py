"""Another function in place of `flex_attention`, while attention is over sequences that are sharded over ranks.

The original is also called by names that were imported before. The first thing that it calls is a private function of
its module, which then asks whether the call may go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.attention import flex_attention as module

_FIRST = "_validate_sdpa_input"
plain_flex: Callable[..., Any] = module.flex_attention
_first: Any = getattr(module, _FIRST)


def replace_flex(attend: Callable[..., Any], check: Callable[[], None]) -> None:
    """Have the module's function be `attend`; the original, under whatever name, calls `check` first."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        check()
        return _first(*args, **kwargs)

    setattr(module, "flex_attention", attend)  # noqa: B010  # for a type checker it is a function
    setattr(module, _FIRST, checked)


def restore_flex() -> None:
    """Undo `replace_flex`."""
    setattr(module, "flex_attention", plain_flex)  # noqa: B010
    setattr(module, _FIRST, _first)
