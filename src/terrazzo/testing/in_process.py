"""All ranks in one process, with real values: `with all_ranks(4) as world`.

Each rank is a thread, of which one runs at a time (`terrazzo.comm.in_process`). What a call returns on the ranks is one
object here, `Ranked`; an operation with it runs on every rank with that rank's own value.
"""

from __future__ import annotations

import contextlib
import copy
import html
import io
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from terrazzo._meant import alike, named
from terrazzo.comm.in_process import ThreadRanks, is_rank_here, rank_here
from terrazzo.comm.memory_group import make_group
from terrazzo.errors import CommError
from terrazzo.layout import Placement
from terrazzo.tensor import DTensor

_TOP = "text-align:left;vertical-align:top"
_SIMPLE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    PurePath,
    Placement,
)


@contextlib.contextmanager
def all_ranks(ranks: int) -> Iterator[AllRanks]:
    """Ranks in this process, for learning and debugging: each call runs on all of them, and all values can be seen.

    They exchange real values through memory, and no process is started. One rank runs at a time, until it waits for
    another one, in the same order each time; so a debugger works, and what hangs in processes is an error here.

    >>> from terrazzo.tensor import Shard, distribute_tensor, init_device_mesh
    >>> with all_ranks(4) as world:
    ...     mesh = world.run(init_device_mesh, "cpu", (4,))
    ...     x = world.run(distribute_tensor, torch.arange(8.0), mesh, [Shard(0)])
    ...     print(x * 10)
    ...     print((x * 10).sum().full_tensor())
    DTensor of shape [8], placed [Shard(dim=0)], on 4 ranks
      rank 0: tensor([ 0., 10.])
      rank 1: tensor([20., 30.])
      rank 2: tensor([40., 50.])
      rank 3: tensor([60., 70.])
    tensor on 4 ranks
      ranks 0-3: tensor(280.)

    Args:
        ranks: How many.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks!r}")
    world = AllRanks(ThreadRanks(ranks, make_group))
    try:
        yield world
    finally:
        world._ranks.close()


class AllRanks:
    """The ranks of `all_ranks`."""

    def __init__(self, ranks: ThreadRanks) -> None:
        """Use `all_ranks`."""
        self._ranks = ranks

    def __repr__(self) -> str:
        return f"<all_ranks({self._ranks.size})>"

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._ranks.size

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function on each rank, and return what it returned there: one `Ranked`.

        Tuples, lists and dicts are returned as such, of `Ranked`; a number, string or the like is returned itself where
        it is the same on all ranks. What a rank prints begins with its name. If ranks fail, the error of the first one
        is raised, with a note that says which ranks raised it.

        Args:
            function: Any function, also a closure or a lambda; each rank makes a mesh, a model and the like of its own.
            args: Of a `Ranked`, also in tuples, lists and dicts, each rank gets its own value. Of tensors, modules and
                optimizers it gets copies, of which one refers to another as before. Other objects are passed as they
                are, so all ranks have the same one.
            kwargs: Keyword arguments, as `args`.
        """
        state = _ThreadState()
        calls = [partial(self._call, state, function, args, kwargs, rank) for rank in range(self.size)]
        with contextlib.redirect_stdout(_Named(sys.stdout)):
            return self._joined(self._ranks.run(calls))

    def _call(self, state: _ThreadState, function: Callable[..., Any], args: Any, kwargs: Any, rank: int) -> Any:
        if isinstance(function, Ranked):
            function = _own(function)
        args, kwargs = _copied((args, kwargs), rank, {})
        with state.taken():
            return function(*args, **kwargs)

    def values(self, value: Any) -> list[Any]:
        """What each rank has, in the order of the ranks."""
        if not isinstance(value, Ranked):
            return [value] * self.size
        if value._world is not self:
            raise CommError("this value belongs to the ranks of another `with all_ranks(...)` block")
        return list(value._by_rank)

    def local(self, value: Any) -> list[Any]:
        """The local tensor of each rank, if the value is a DTensor; else as `values`."""
        return self._each(_local, self.values(value))

    def _each(self, function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
        """The results of a function of one value, called on each rank with its own."""
        return self._ranks.run([partial(function, value) for value in values])

    def _joined(self, values: Sequence[Any]) -> Any:
        """One object of the values of all ranks."""
        first = values[0]
        kind = type(first)
        if all(type(value) is kind for value in values):
            if isinstance(first, _SIMPLE) and all(value == first for value in values):
                return first
            if kind in (tuple, list) and len({len(value) for value in values}) == 1:
                return kind(self._joined(each) for each in zip(*values, strict=True))
            if kind is dict and all(list(value) == list(first) for value in values):
                return {key: self._joined([value[key] for value in values]) for key in first}
        return Ranked(self, values)


class Ranked:
    """A value of each rank of `all_ranks`: attributes, methods, operators and torch's functions use each rank's own."""

    _world: AllRanks
    _by_rank: tuple[Any, ...]

    def __init__(self, world: AllRanks, values: Sequence[Any]) -> None:
        """`all_ranks` makes them."""
        object.__setattr__(self, "_world", world)
        object.__setattr__(self, "_by_rank", tuple(values))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy, pickle and IPython look for these
            raise AttributeError(name)
        values = self._world._each(lambda value: getattr(value, name), self._by_rank)
        if callable(values[0]) and not isinstance(values[0], nn.Module | torch.Tensor):
            return partial(self._world.run, Ranked(self._world, values))
        return self._world._joined(values)

    def __setattr__(self, name: str, value: Any) -> None:
        self._world.run(setattr, self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._world.run(self, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _first((args, kwargs))
        assert found is not None, "torch calls this for an argument of this class"
        return found._world.run(function, *args, **kwargs or {})

    def __bool__(self) -> bool:
        found = self._world.run(bool, self)
        if isinstance(found, Ranked):
            raise CommError(f"this is not the same on all ranks, so it cannot decide what they all do:\n{found!r}")
        return bool(found)

    def __len__(self) -> int:
        return int(self._world.run(len, self))

    def __iter__(self) -> Iterator[Any]:
        """The elements; each rank iterates over its own value."""
        return iter(self._world.run(list, self))

    def __float__(self) -> float:
        return float(_same(self._world.run(float, self)))

    def __int__(self) -> int:
        return int(_same(self._world.run(int, self)))

    def __format__(self, spec: str) -> str:
        return format(_same(self._world.run(format, self, spec)), "")

    def __repr__(self) -> str:
        lines = [self._title()]
        for text, ranks in self._texts().items():
            head = f"  {named(ranks)}: "
            lines.append(head + text.replace("\n", "\n" + " " * len(head)))
        return "\n".join(lines)

    def _title(self) -> str:
        first = self._by_rank[0]
        if self._is_dtensor():
            what = f"DTensor of shape {list(first.shape)}, placed {list(first.placements)},"
        else:
            what = "tensor" if type(first) is torch.Tensor else type(first).__name__
        return f"{what} on {len(self._by_rank)} ranks"

    def _is_dtensor(self) -> bool:
        return all(isinstance(value, DTensor) for value in self._by_rank)

    def _texts(self) -> dict[str, set[int]]:
        """What each value looks like, with the ranks that have it."""
        return alike(enumerate(self._world._each(lambda value: repr(_local(value)), self._by_rank)))

    def _repr_html_(self) -> str:
        drawn = self._world._each(lambda value: value._repr_html_(), self._by_rank)[0] if self._is_dtensor() else None
        rows = "".join(
            f'<tr><th style="{_TOP}">{named(ranks)}</th><td style="{_TOP}"><pre>{html.escape(text)}</pre></td></tr>'
            for text, ranks in self._texts().items()
        )
        title = "" if drawn else f'<caption style="white-space:nowrap">{html.escape(self._title())}</caption>'
        return f"{drawn or ''}<table>{title}{rows}</table>"


def _forward(name: str, function: Callable[..., Any], *, reflected: bool = False) -> None:
    def call(self: Ranked, *args: Any) -> Any:
        return self._world.run(function, *((*args, self) if reflected else (self, *args)))

    call.__name__ = name
    setattr(Ranked, name, call)


_TWO = "add sub mul truediv floordiv mod matmul pow and_ or_ xor lshift rshift".split()
for _name in _TWO:
    _plain = _name.rstrip("_")
    _forward(f"__{_plain}__", getattr(operator, _name))
    _forward(f"__r{_plain}__", getattr(operator, _name), reflected=True)
    _forward(f"__i{_plain}__", getattr(operator, f"i{_plain}"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "getitem", "setitem", "contains"):
    _forward(f"__{_name}__", getattr(operator, _name))
Ranked.__hash__ = object.__hash__  # type: ignore[method-assign]  # by identity, like a tensor's


def _own(value: Ranked) -> Any:
    return value._by_rank[rank_here().number]


def _copied(value: Any, rank: int, memo: dict[int, Any]) -> Any:
    """What a rank gets as arguments: its own value of what belongs to the ranks, and copies of what it may change."""
    if isinstance(value, Ranked):
        return value._by_rank[rank]
    if type(value) in (tuple, list):
        return type(value)(_copied(each, rank, memo) for each in value)
    if type(value) is dict:
        return {key: _copied(each, rank, memo) for key, each in value.items()}
    copies = isinstance(value, torch.Tensor | nn.Module | torch.optim.Optimizer)
    return copy.deepcopy(value, memo) if copies else value


def _first(value: Any) -> Ranked | None:
    if isinstance(value, Ranked):
        return value
    inside = value.values() if type(value) is dict else value if type(value) in (tuple, list) else ()
    return next((found for each in inside if (found := _first(each)) is not None), None)


def _local(value: Any) -> Any:
    with torch.no_grad():
        return value.to_local() if isinstance(value, DTensor) else value


def _same(value: Any) -> Any:
    if isinstance(value, Ranked):
        raise CommError(f"this is not the same on all ranks:\n{value!r}")
    return value


class _ThreadState:
    """What torch keeps per thread, of the thread that makes a call: gradients, inference mode, autocast."""

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found = torch.accelerator.current_accelerator(check_available=True)
        types = ["cpu", *([] if found is None else [found.type])]
        self._casts = [(t, torch.get_autocast_dtype(t)) for t in types if torch.is_autocast_enabled(t)]

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for device_type, dtype in self._casts:
                stack.enter_context(torch.autocast(device_type, dtype))
            yield


class _Named(io.TextIOBase):
    """Standard output, on which each line of a rank begins with its name."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self._open: int | None = None  # the rank that has begun a line

    def write(self, text: str) -> int:
        if not is_rank_here():
            return int(self._out.write(text))
        rank = rank_here().number
        for line in text.splitlines(keepends=True):
            if self._open != rank:
                self._out.write(("" if self._open is None else "\n") + f"[rank {rank}] ")
            self._out.write(line)
            self._open = None if line.endswith("\n") else rank
        return len(text)

    def flush(self) -> None:
        self._out.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)
