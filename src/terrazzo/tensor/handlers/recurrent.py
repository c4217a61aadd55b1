"""Recurrent layers make their first states themselves, as plain zeros; those are taken for what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from terrazzo.layout import Layout, Replicate
from terrazzo.tensor.dispatch.calls import run_again, special
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.rules.recurrent import RECURRENT


@special(*RECURRENT)
def recurrent(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Plain states that are all zero are the same on every rank; others are refused as any plain tensor is."""
    like = next((a for a in args if isinstance(a, DTensor)), None)
    at = next(
        (i for i, a in enumerate(args) if i and (_is_plain(a) or (type(a) is tuple and any(map(_is_plain, a))))), None
    )
    if like is None or at is None:
        return NotImplemented
    states = args[at] if type(args[at]) is tuple else (args[at],)
    if any(_is_plain(s) and bool(s.any()) for s in states):
        return NotImplemented
    mesh = like.device_mesh
    whole = tuple(
        wrap(s, Layout.of(mesh, (Replicate(),) * mesh.ndim, tuple(s.shape))) if _is_plain(s) else s for s in states
    )
    return run_again(func, (*args[:at], whole if type(args[at]) is tuple else whole[0], *args[at + 1 :]), kwargs)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
