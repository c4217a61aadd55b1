"""Another function in place of `flex_attention`, while attention is over sequences that are sharded over ranks.

The original is also called by names that were imported before, and compiled. The first thing that it calls is a private
function of its module, which here asks first whether the call may go on. That module is imported by the programs that
need it, and this one then: from torch 2.14 on it imports sympy, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from terrazzo._torch.declared import check, private, replace

checks: list[Callable[[Any], None]] = []
"""Functions that are called with the query of each call, and raise if it cannot go on."""

_HOME = "torch.nn.attention.flex_attention"
_PATH, _FIRST = f"{_HOME}.flex_attention", f"{_HOME}._validate_sdpa_input"
_WHY = "flex_attention must see whole sequences and plain tensors"
plain_flex: Callable[..., Any] = private(_PATH, _WHY, patched=True)
_first: Callable[..., Any] = private(_FIRST, _WHY, patched=True)
check()


def _checked(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    for refuse in checks:
        refuse(query)
    return _first(query, *args, **kwargs)


replace(_FIRST, _checked)


def replace_flex(attend: Callable[..., Any]) -> None:
    """Have the module's function be `attend`."""
    replace(_PATH, attend)


def restore_flex() -> None:
    """Undo `replace_flex`."""
    replace(_PATH, plain_flex)
