"""LSTM, GRU and plain recurrent layers: samples are independent, weights and time are whole.

The layers make their first states themselves, as plain zeros, which are the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.tensor.dispatch.spec import Call, Dims, Operand, Spec
from terrazzo.tensor.ops.table import rule

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _is_first_state(state: torch.Tensor) -> bool:
    """Whether it is all zeros, as the layers make it themselves."""
    return not bool(state.any())


@rule(*RECURRENT, takes_plain=_is_first_state)
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
