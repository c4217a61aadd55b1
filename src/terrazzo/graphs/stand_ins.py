"""Stand-ins for a program's tensors, which only the thread that captures the program sees.

Modules, globals and closures keep their tensors, because other threads may read and train them meanwhile. A DTensor is
the same object for all threads: its slots show this thread a stand-in as its local tensor. In place of plain tensors,
stand-ins become the arguments of each operation.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from terrazzo._torch import function_apply
from terrazzo._torch.dispatching import fake_mode
from terrazzo.errors import CaptureError
from terrazzo.tensor.dtensor import DTensor

_active: StandIns | None = None  # captures are made one after the other


class StandIns(TorchFunctionMode):
    """A block in which this thread, and those of autograd that work for it, see stand-ins."""

    def __init__(self, fake: Any) -> None:
        """`fake` is the mode of the capture, by which autograd's threads are recognized."""
        super().__init__()
        self._fake = fake
        self._thread = threading.get_ident()
        self._instead: dict[int, Any] = {}
        self._back: dict[int, Any] = {}
        self.slots: dict[int, dict[str, Any]] = {}  # of each DTensor, by its id

    def add(self, tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
        """Have `stand_in` instead of a tensor; operations that return it return the tensor."""
        if type(tensor) is DTensor:
            self.slots[id(tensor)] = {
                "_local": stand_in,
                "_layout": tensor._layout,
                "_memo": None,
                "_grad_wrapper": None,
            }
            return
        self._instead[id(tensor)], self._back[id(stand_in)] = stand_in, tensor

    def here(self) -> bool:
        """Whether the thread that asks runs the program."""
        return threading.get_ident() == self._thread or fake_mode() is self._fake

    def __enter__(self) -> StandIns:
        global _active
        _active = self
        for name, slot in _SLOTS.items():
            setattr(DTensor, name, slot)
        function_apply.substitute = self._substitute
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        global _active
        super().__exit__(*error)
        function_apply.substitute = None
        for name, slot in _SLOTS.items():
            setattr(DTensor, name, slot.plain)
        _active = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.lstm and torch.backends.mkldnn.enabled and args[0].device.type == "cpu":
            if args[0].dtype is not torch.float64:  # its graph would fail when it runs, also under PyTorch's compilers
                raise CaptureError(
                    "PyTorch has no graph of oneDNN's LSTM on a CPU: compile what is around it, or set "
                    "torch.backends.mkldnn.enabled = False",
                    operation="lstm",
                )
        result = func(*_mapped(args, self._instead), **_mapped(kwargs or {}, self._instead))
        return _mapped(result, self._back)

    def _substitute(self, args: tuple[Any, ...]) -> Sequence[Any]:
        return _mapped(args, self._instead) if self.here() else args


def _mapped(value: Any, instead: dict[int, Any]) -> Any:
    """The value with other tensors in it; the same object if there are none."""
    if isinstance(value, torch.Tensor):
        return instead.get(id(value), value)
    kind = type(value)
    if kind is dict:
        items = {name: _mapped(item, instead) for name, item in value.items()}
        return items if any(items[name] is not value[name] for name in items) else value
    if isinstance(value, list | tuple) and kind is not torch.Size:
        parts = [_mapped(item, instead) for item in value]
        if all(part is item for part, item in zip(parts, value, strict=True)):
            return value
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    return value


class _Slot:
    """A slot of DTensors, which is another one for a thread that captures."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.plain = vars(DTensor)[name]

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        own = _own(tensor)
        return self.plain.__get__(tensor, owner) if own is None else own[self._name]

    def __set__(self, tensor: Any, value: Any) -> None:
        own = _own(tensor)
        if own is None:
            self.plain.__set__(tensor, value)
        elif self._name in ("_local", "_layout") and value is not own[self._name]:
            raise CaptureError("it changes the shape, layout or storage of one of its inputs", operation="a write")
        else:
            own[self._name] = value


_SLOTS = {name: _Slot(name) for name in ("_local", "_layout", "_memo", "_grad_wrapper")}


def _own(tensor: Any) -> dict[str, Any] | None:
    stand_ins = _active
    return None if stand_ins is None or not stand_ins.here() else stand_ins.slots.get(id(tensor))
