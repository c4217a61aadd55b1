"""Tensor subclasses that wrap other tensors (`__tensor_flatten__`): what is sent is the tensors inside, in turn.

All else that a collective does, from cutting to adding up, is done by the subclass's own operations. So a wrapper can
be communicated where each of its tensors has its shape: then the same elements go the same way in all of them. For any
other (a scale for many elements, packed bits) that is not so, and it is refused before anything is sent.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.nn import Buffer, Parameter

from terrazzo.errors import CommError

_PLAIN = frozenset([Tensor, Parameter, Buffer])


def is_wrapper(x: Tensor) -> bool:
    """Whether `x` is made of other tensors, and says of which."""
    # The results of PyTorch's own functional collectives are wrappers too, which wait when they are used.
    return type(x) not in _PLAIN and hasattr(x, "__tensor_flatten__") and not hasattr(x, "trigger_wait")


def inner_tensors(x: Tensor) -> list[Tensor]:
    """The tensors inside a wrapper, in its own order."""
    why = why_not_sent(x)
    if why is not None:
        raise CommError(f"a {type(x).__name__} of shape {tuple(x.shape)} cannot be cut and sent: {why}")
    return _inside(x)[1]


def why_not_sent(x: Tensor) -> str | None:
    """Why a wrapper cannot be cut and sent element by element; None: it can."""
    names, inner = _inside(x)
    for name, tensor in zip(names, inner, strict=True):
        if tensor.shape != x.shape:
            return f"its {name} has the shape {tuple(tensor.shape)}, which is not its own"
    return None if inner else "there is no tensor in it"


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
        raise CommError(f"{kinds} cannot be sent together: each rank must hold the same kind of tensor")
    return Together([send(*inner) for inner in zip(*[inner_tensors(b) for b in buffers], strict=True)])
