"""LSTM, GRU and plain recurrent layers: samples are independent, weights and time are whole.

The layers make their first states themselves, as plain zeros, which are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from terrazzo.layout import Layout, Replicate
from terrazzo.tensor.dispatch.calls import run_again, special
from terrazzo.tensor.dispatch.spec import Call, Dims, Operand, Spec
from terrazzo.tensor.dtensor import DTensor, wrap
from terrazzo.tensor.ops.table import rule

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@rule(*RECURRENT)
def recurrent(
    call: Call, input: Operand, hx: Any, params: Any, has_biases: Any, num_layers: Any, dropout: Any, train: Any,
    bidirectional: Any = False, batch_first: Any = False,
) -> Spec | None:  # fmt: skip
    """The batched form; that of packed sequences has another signature and is gathered."""
    states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    if (
        not isinstance(input, Operand)
        or input.ndim != 3
        or not all(isinstance(s, Operand) and s.ndim == 3 for s in states)
    ):
        return None
    if not isinstance(params, (list, tuple)) or (dropout and train):
        return None
    batch_at = 0 if batch_first else 1
    state: Dims = (None, 0, None)
    by_operand: dict[int, Dims] = {id(s): state for s in states}
    by_operand[id(input)] = tuple(0 if d == batch_at else None for d in range(3))
    hidden = states[0].shape[2] * (2 if bidirectional else 1)
    shapes = [(*input.shape[:2], hidden), *[tuple(s.shape) for s in states]]
    ins: list[Dims] = [by_operand.get(id(o), (None,) * o.ndim) for o in call.operands]
    outs = [by_operand[id(input)]] + [state] * len(states)
    return Spec(ins, outs, shapes) if input.shape[batch_at] == states[0].shape[1] else None


@special(*RECURRENT)
def with_first_states(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
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
