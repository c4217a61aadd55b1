"""Tensor subclasses that wrap other tensors (`__tensor_flatten__`): their inner tensors are sent one after another.

All other work of a collective, such as cutting and adding, uses the subclass's own operations. So a wrapper can be
communicated if each of its inner tensors has its shape: the same elements then go the same way in all of them. Others
(with one scale for many elements, or packed bits) are refused before anything is sent.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.nn import Buffer, Parameter

from terrazzo._torch.counting import CountingParameter
from terrazzo.errors import CommError

_PLAIN = frozenset([Tensor, Parameter, Buffer, CountingParameter])


def is_wrapper(x: Tensor) -> bool:
    """Whether `x` is a wrapper subclass that says what its inner tensors are."""
    # The results of PyTorch's functional collectives are wrappers, too, but only wait when they are used.
    return type(x) not in _PLAIN and hasattr(x, "__tensor_flatten__") and not hasattr(x, "trigger_wait")


def inner_tensors(x: Tensor) -> list[Tensor]:
    """The inner tensors of a wrapper, in the subclass's order."""
    why = why_not_sent(x)
    if why is not None:
        raise CommError(
            f"a {type(x).__name__} of shape {tuple(x.shape)} cannot be cut and sent element by element: {why}"
        )
    return _inside(x)[1]


def why_not_sent(x: Tensor) -> str | None:
    """Why a wrapper cannot be cut and sent element by element; None if it can."""
    names, inner = _inside(x)
    for name, tensor in zip(names, inner, strict=True):
        if tensor.shape != x.shape:
            return f"its inner tensor {name} has another shape, {tuple(tensor.shape)}"
    return None if inner else "it has no inner tensors"


def _inside(x: Tensor) -> tuple[list[str], list[Tensor]]:
    wrapper: Any = x
    names, _ = wrapper.__tensor_flatten__()
    return names, [getattr(wrapper, name) for name in names]


class Together(Work):
    """Several started communications as one."""

    def __init__(self, works: list[Work | None]) -> None:
        super().__init__()
        self._works = [work for work in works if work is not None]

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True


def each_inner(send: Callable[..., Work | None], *buffers: Tensor) -> Work:
    """Call `send` with the first tensors inside the buffers, then with the second ones, and so on."""
    if not all(is_wrapper(b) for b in buffers):
        kinds = " and ".join(type(b).__name__ for b in buffers)
        raise CommError(f"{kinds} cannot be sent together: each rank must hold the same tensor subclass")
    return Together([send(*inner) for inner in zip(*[inner_tensors(b) for b in buffers], strict=True)])
