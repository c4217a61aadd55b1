"""Tensor subclasses that wrap other tensors (`__tensor_flatten__`): their inner tensors are sent one after another.

Reductions and exchanges of boxes use the subclass's own operations for everything but sending. So each of its inner
tensors must have its shape: the same elements then go the same way in all of them.

What is only cut and joined (`cut`, `Join`) may have other inner tensors: one scale for each row, or for all elements,
or packed bits. The subclass's own operations cut it, and show which dim of an inner tensor goes along: the one that
became shorter. An inner tensor that is not cut belongs to the whole wrapper and is the same on all ranks. What the
subclass does not cut, or what cannot be joined again, is refused before anything is sent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
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


# ------------------------------------------------------------------ cutting and joining


def cut(x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """Views of the parts of a wrapper along `dim`, made by the subclass's own operations, of its class."""
    why: object = "no part was made"
    ways = [lambda: [x.narrow(dim, sum(sizes[:i]), n) for i, n in enumerate(sizes)]]
    if sizes[0] and len(sizes) == -(-x.shape[dim] // sizes[0]) and len({*sizes[:-1]}) <= 1:
        ways.insert(0, lambda: list(x.split(sizes[0], dim)))
    for way in ways:
        try:
            parts = way()
        except Exception as error:  # whatever the subclass raises for what it cannot do
            why = f"{type(error).__name__}: {error}"
            continue
        found = {type(part) for part in parts}
        if found == {type(x)} and [part.shape[dim] for part in parts] == list(sizes):
            return parts
        why = f"its parts are of the class {' and '.join(sorted(kind.__name__ for kind in found))}"
    raise CommError(f"a {type(x).__name__} of shape {tuple(x.shape)} cannot be cut along dim {dim}: {why}")


def inner_of(x: Tensor) -> list[Tensor]:
    """The inner tensors of a wrapper, of whatever shapes."""
    return _inside(x)[1]


def rebuilt(like: Tensor, inner: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """A wrapper as `like`, of other inner tensors and another shape."""
    wrapper: Any = like
    names, context = wrapper.__tensor_flatten__()
    size = torch.Size(shape)
    strides = like.stride() if size == like.shape else torch.empty(size, device="meta").stride()
    result: Tensor = type(wrapper).__tensor_unflatten__(dict(zip(names, inner, strict=True)), context, size, strides)
    return result


def copied(x: Tensor) -> Tensor:
    """A copy of a wrapper by copies of its inner tensors: some subclasses' own `clone` quantizes again."""
    return rebuilt(x, [t.clone(memory_format=torch.contiguous_format) for t in inner_of(x)], x.shape)


class Join:
    """How the parts of a wrapper that ranks hold are joined along a dim; `x` is the part of this rank."""

    def __init__(self, x: Tensor, dim: int, sizes: Sequence[int]) -> None:
        self._x, self._dim, self._sizes = x, dim, tuple(sizes)
        self._dims = _followed(x, dim)
        as_itself = x.shape[dim] == 0 or all(t.shape == x.shape for t in inner_of(x))
        self._by_class = not as_itself and not _same_context(x, _half(x, dim))
        if self._by_class:
            self._check_own_cat()

    def moving(self) -> list[tuple[Tensor, int, tuple[int, ...]]]:
        """The inner tensors that are joined, each with its dim and the lengths of all ranks' parts there."""
        result = []
        for t, d in zip(inner_of(self._x), self._dims, strict=True):
            if d is not None:
                own = self._x.shape[self._dim]
                lengths = [t.shape[d] * size // own for size in self._sizes] if own else self._sizes
                result.append((t, d, tuple(lengths)))
        return result

    def finish(self, joined: Sequence[Tensor]) -> Tensor:
        """The whole, of the joined inner tensors in the order of `moving`."""
        remaining = iter(joined)
        inner = [t if d is None else next(remaining) for t, d in zip(inner_of(self._x), self._dims, strict=True)]
        shape = list(self._x.shape)
        if self._by_class:
            n = len(self._sizes)
            pieces = [[t] * n if d is None else t.chunk(n, d) for t, d in zip(inner, self._dims, strict=True)]
            return torch.cat([rebuilt(self._x, piece, shape) for piece in zip(*pieces, strict=True)], self._dim)
        shape[self._dim] = sum(self._sizes)
        return rebuilt(self._x, inner, shape)

    def _check_own_cat(self) -> None:
        x, dim = self._x, self._dim
        try:
            fits = len(set(self._sizes)) == 1 and type(torch.cat([x, x], dim)) is type(x)
        except Exception:  # whatever the subclass raises for what it cannot do
            fits = False
        if not fits:
            raise CommError(
                f"parts of a {type(x).__name__} of shape {tuple(x.shape)} cannot be joined along dim {dim}: what "
                "__tensor_flatten__ says of it beside its tensors depends on its length there, and it has no "
                "torch.cat for equal parts"
            )


def _half(x: Tensor, dim: int) -> Tensor:
    n = x.shape[dim]
    return cut(x, dim, (-(-n // 2), n // 2) if n > 1 else (0, n))[0]


def _followed(x: Tensor, dim: int) -> list[int | None]:
    """The dim of each inner tensor that is cut where `x` is cut along `dim`; None where none is."""
    if all(t.shape == x.shape for t in inner_of(x)):
        return [dim] * len(inner_of(x))
    if x.shape[dim] == 0:
        return [next((d for d in range(t.ndim) if t.shape[d] == 0), None) for t in inner_of(x)]
    result: list[int | None] = []
    for t, part in zip(inner_of(x), inner_of(_half(x, dim)), strict=True):
        shorter = [d for d in range(t.ndim) if t.shape[d] != part.shape[d]] if t.ndim == part.ndim else [0, 0]
        if len(shorter) > 1 or (shorter and t.shape[shorter[0]] % x.shape[dim] and x.shape[dim] % t.shape[shorter[0]]):
            raise CommError(
                f"a {type(x).__name__} of shape {tuple(x.shape)} has inner tensors that dim {dim} changes "
                "in a way that is not known"
            )
        result.append(shorter[0] if shorter else None)
    return result


def _same_context(x: Any, y: Any) -> bool:
    try:
        return bool(x.__tensor_flatten__()[1] == y.__tensor_flatten__()[1])
    except RuntimeError:  # tensors among it
        return False
