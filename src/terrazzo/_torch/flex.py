"""Another function in place of `flex_attention`, while attention is over sequences that are sharded over ranks.

The original is also called by names that were imported before. The first thing that it calls is a private function of
its module, which then asks whether the call may go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo._torch.declared import private, replace

_HOME = "torch.nn.attention.flex_attention"
_PATH, _FIRST = f"{_HOME}.flex_attention", f"{_HOME}._validate_sdpa_input"
_WHY = "flex_attention must see the whole of a sequence that is sharded over ranks"
plain_flex: Callable[..., Any] = private(_PATH, _WHY, patched=True)
_first: Callable[..., Any] = private(_FIRST, _WHY, patched=True)


def replace_flex(attend: Callable[..., Any], check: Callable[[], None]) -> None:
    """Have the module's function be `attend`; the original, under whatever name, calls `check` first."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        check()
        return _first(*args, **kwargs)

    replace(_PATH, attend)
    replace(_FIRST, checked)


def restore_flex() -> None:
    """Undo `replace_flex`."""
    replace(_PATH, plain_flex)
    replace(_FIRST, _first)
