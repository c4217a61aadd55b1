"""Cells and functions of a notebook on several local ranks: `ranks(4)`, and the magic `%%ranks`.

The ranks are processes, those of `terrazzo.testing`, and end with the notebook's kernel. A cell runs on each of them,
with the names that earlier cells defined there; a function is sent with what it uses of the notebook.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import linecache
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from terrazzo._meant import alike, named
from terrazzo.errors import CommError
from terrazzo.testing.pool import Outcome, RanksFailed, World, in_order_of_failure
from terrazzo.testing.process import Request

__all__ = ["Ranks", "ranks"]


def ranks(number: int, *, timeout: float = 600) -> Ranks:
    """Local ranks for a notebook: call a function on them, or run cells that begin with `%%ranks`.

    >>> world = ranks(2)
    >>> world.run("import torch.distributed as dist; here = dist.get_rank(); here * 10")
    rank 0: 0
    rank 1: 10
    >>> world(lambda scale: here * scale, 3)
    [0, 3]
    >>> world.close()

    Args:
        number: How many.
        timeout: Seconds after which a call ends, and the ranks with it.
    """
    if number < 1:
        raise ValueError(f"number must be at least 1, not {number}")
    made = Ranks(number, timeout)
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        shell.register_magic_function(lambda line, cell: made.run(cell), "cell", "ranks")
    return made


class Ranks:
    """The ranks of a notebook."""

    def __init__(self, number: int, timeout: float) -> None:
        """Use `ranks`."""
        self._number, self._timeout, self._cells = number, timeout, 0
        self._world: World | None = None

    def __repr__(self) -> str:
        return f"<ranks({self._number}){'' if self._world is None else ', running'}>"

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on each rank, and return the results in the order of the ranks.

        It may be a lambda or a closure. What it uses of the notebook is sent with it; other names are those that cells
        defined on the ranks. What ranks print is shown.
        """
        outcomes = self._run(Request.of(_call, (_pickler().dumps((function, args, kwargs)),)))
        return [pickle.loads(outcome.value) for outcome in outcomes]

    def run(self, cell: str) -> None:
        """Run the lines of a cell on each rank, and show what it prints and the value of its last line."""
        self._cells += 1
        self._run(Request.of(_run_cell, (cell, f"<cell {self._cells} on ranks>")))

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        if self._world is not None:
            self._world.close()
            self._world = None

    def _run(self, request: Request) -> Sequence[Outcome]:
        done = False
        try:
            if self._world is None:
                self._world = World(self._number, request)
            outcomes = self._world.call(request, self._timeout, grace=10)
            done = not any(outcome.hung or outcome.exitcode is not None for outcome in outcomes)
        finally:  # also when interrupted: ranks in the middle of a call cannot be used again
            if not done:
                self.close()
        for text, those in alike((each.rank, each.output) for each in outcomes if each.output).items():
            print("".join(f"{named(those)}: {line}" for line in text.splitlines(keepends=True)), end="")
        failed = [outcome for outcome in in_order_of_failure(outcomes) if not outcome.ok]
        if failed:
            silent = [(each.rank, str(replace(each, output=""))) for each in failed]
            texts = [(rank, text.removeprefix(f"=== rank {rank} ")) for rank, text in silent]
            lines = [f"{named(those)} {text}" for text, those in alike(texts).items()]
            if not done:
                lines.append("The next call starts new ranks, without what cells have defined.")
            raise RanksFailed("\n".join(lines))
        return outcomes


def _pickler() -> Any:
    """What sends functions by value."""
    if importlib.util.find_spec("cloudpickle") is None:
        raise CommError(
            "to send a function to ranks from a notebook, install cloudpickle (pip install 'terrazzo[notebook]', or "
            "cloudpickle alone); or begin a cell with %%ranks, which runs its lines there"
        )
    return importlib.import_module("cloudpickle")


# ------------------------------------------------------------------ on a rank

_names = types.ModuleType("__main__").__dict__
_random: dict[str, Any] = {}


def _run_cell(cell: str, file: str) -> None:
    lines = cell.splitlines(keepends=True)
    linecache.cache[file] = (len(cell), None, lines, file)  # for tracebacks
    tree = ast.parse(cell, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with _OwnRandomState():
        exec(compile(tree, file, "exec"), _names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), _names)
            if value is not None:
                print(repr(value))


def _call(data: bytes) -> bytes:
    function, args, kwargs = pickle.loads(data)
    own = vars(sys.modules[function.__module__]) if getattr(function, "__module__", "") in sys.modules else None
    if isinstance(function, types.FunctionType) and function.__globals__ is not own:  # it was sent by value
        for name, value in _names.items():
            function.__globals__.setdefault(name, value)
    with _OwnRandomState():
        found: bytes = _pickler().dumps(function(*args, **kwargs))
    return found


class _OwnRandomState:
    """A block that goes on with the random numbers where the last one ended: calls of `terrazzo.testing` start anew."""

    def __enter__(self) -> None:
        from terrazzo.engine.rng import set_random_state

        if _random:
            set_random_state(_random)

    def __exit__(self, *_: object) -> None:
        from terrazzo.engine.rng import random_state

        _random.update(random_state())
