"""LSTM, GRU and plain recurrent layers and their cells: samples may be sharded; weights and time stay whole.

If the caller passes no initial states, PyTorch's modules create plain zeros, which are the same on every rank. The
function that gets them cannot check that they are zeros without waiting for the device. So the modules' `__call__`
notes that no states were passed, and plain states that arrive during this call count as replicated. All other plain
tensors are refused as usual.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from terrazzo.tensor.dispatch.spec import Call, Dims, Operand, Spec
from terrazzo.tensor.dtensor import DTensor
from terrazzo.tensor.ops.table import rule

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


class _PerThread(threading.local):
    makes_states = False
    """Whether a PyTorch module is running that was called without initial states."""


_per_thread = _PerThread()


def _made_by_module(state: torch.Tensor) -> bool:
    return _per_thread.makes_states


@rule(*RECURRENT, takes_plain=_made_by_module)
def recurrent(
    call: Call, input: Operand, hx: Any, params: Any, has_biases: Any, num_layers: Any, dropout: Any, train: Any,
    bidirectional: Any = False, batch_first: Any = False,
) -> Spec | None:  # fmt: skip
    """The batched form; packed sequences have another signature and are gathered."""
    states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    if input.ndim != 3 or not all(isinstance(s, Operand) and s.ndim == 3 for s in states):
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


@rule(*CELLS, takes_plain=_made_by_module)
def cell(call: Call, input: Operand, hx: Any, *weights: Any) -> Spec | None:
    states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    samples = [input, *states]
    if not all(isinstance(o, Operand) and o.ndim == 2 and o.shape[0] == input.shape[0] for o in samples):
        return None
    rows = {id(o) for o in samples}
    ins: list[Dims] = [(0, None) if id(o) in rows else (None,) * o.ndim for o in call.operands]
    return Spec(ins, [(0, None)] * len(states), [tuple(s.shape) for s in states])


# Their `forward` creates zeros, and no other plain tensor, when no states are passed.
_FORWARDS = frozenset(kind.forward for kind in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell))
_flatten: Callable[[RNNBase], None] = RNNBase.flatten_parameters


def install() -> None:
    """Make PyTorch's recurrent modules note when they are called without initial states, and keep DTensors as they are.

    `forward` itself is not replaced, because TorchScript compiles it from its source.
    """
    for kind in (RNNBase, RNNCellBase):
        if "__call__" not in vars(kind):
            kind.__call__ = _call  # type: ignore[method-assign]
    RNNBase.flatten_parameters = _flatten_parameters  # type: ignore[method-assign, assignment]


def _flatten_parameters(module: RNNBase) -> None:
    """For cuDNN, PyTorch moves weights on a GPU into one piece of memory when a module is made or moved."""
    if not any(isinstance(weight, DTensor) for weight in module.parameters()):
        _flatten(module)


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    call: Callable[..., Any] = nn.Module.__call__
    if (
        (args[1] if len(args) > 1 else kwargs.get("hx")) is not None
        or type(module).forward not in _FORWARDS
        or "forward" in vars(module)
        or not any(isinstance(p, DTensor) for p in module.parameters())
    ):
        return call(module, *args, **kwargs)
    before, _per_thread.makes_states = _per_thread.makes_states, True
    try:
        return call(module, *args, **kwargs)
    finally:
        _per_thread.makes_states = before
