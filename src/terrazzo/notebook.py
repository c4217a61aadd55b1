"""Cells and functions of a notebook on several local ranks: `ranks(4)`, and the magic `%%ranks`.

The ranks are processes, those of `terrazzo.testing`, and end with the notebook's kernel. A cell runs on each of them,
with the names that earlier cells defined there; a function is sent with what it uses of the notebook.
"""

from __future__ import annotations

import ast
import atexit
import importlib
import importlib.util
import linecache
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    atexit.register(made.close)  # Python would wait for the processes otherwise
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
        self._ended = ""  # why there are no ranks any more, if this has not been said

    def __repr__(self) -> str:
        return f"<ranks({self._number}){'' if self._world is None else ', running'}>"

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on each rank, and return the results in the order of the ranks.

        It may be a lambda or a closure. What it uses of the notebook is sent with it; other names are those that cells
        defined on the ranks. Of a name that is in both, the notebook's is used, and the ranks say so. What ranks print
        is shown while they run.
        """
        outcomes = self._run(Request.of(_call, (_pickler().dumps((function, args, kwargs)),)))
        return [pickle.loads(outcome.value) for outcome in outcomes]

    def run(self, cell: str) -> None:
        """Run the lines of a cell on each rank, and show what it prints, while it runs, and its last line's value."""
        self._cells += 1
        self._run(Request.of(_run_cell, (cell, f"<cell {self._cells} on ranks>")))

    def close(self) -> None:
        """End the processes; the next call starts new ones, and says so."""
        self._end("were closed")

    def _end(self, why: str) -> None:
        if self._world is not None:
            self._world.close()
            self._world, self._ended = None, why

    def _run(self, request: Request) -> Sequence[Outcome]:
        done, live, why = False, _Live(self._number), ""
        if self._ended:
            print(f"New ranks: the earlier ones {self._ended}, and what cells had defined on them is gone.", flush=True)
            self._ended = ""
        try:
            if self._world is None:
                with _without_main():
                    self._world = World(self._number, request)
            outcomes = self._world.call(request, self._timeout, grace=10, watch=live)
            done = not any(outcome.hung or outcome.exitcode is not None for outcome in outcomes)
        except BaseException as error:
            why = f"were ended by {type(error).__name__} in the middle of a call"
            raise
        finally:  # also when interrupted: ranks in the middle of a call cannot be used again
            if not done:
                self._end(why)  # of ranks that failed it is said below
        live.end([each.output for each in outcomes])
        failed = [outcome for outcome in in_order_of_failure(outcomes) if not outcome.ok]
        if failed:
            silent = [(each.rank, str(replace(each, output=""))) for each in failed]
            texts = [(rank, text.removeprefix(f"=== rank {rank} ")) for rank, text in silent]
            lines = [f"{named(those)} {text}" for text, those in alike(texts).items()]
            if not done:
                lines.append("The next call starts new ranks, without what cells have defined.")
            raise RanksFailed("\n".join(lines))
        return outcomes


@contextmanager
def _without_main() -> Iterator[None]:
    """A block in which new processes do not run the program's file again: functions are sent by value."""
    main = sys.modules["__main__"]
    file, spec = main.__dict__.pop("__file__", None), main.__spec__
    main.__spec__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file


class _Live:
    """Shows what ranks print while they run: whole lines, of ranks that print the same once."""

    def __init__(self, ranks: int) -> None:
        self._shown, self._known = [0] * ranks, [0] * ranks  # lines

    def __call__(self, outputs: list[str]) -> None:
        """Show the lines that were there at the last call: since then other ranks could print the same."""
        lines = [output.splitlines(keepends=True) for output in outputs]
        self._show([each[:known] for each, known in zip(lines, self._known, strict=True)])
        self._known = [len(each) - (not each[-1].endswith(("\n", "\r"))) if each else 0 for each in lines]

    def end(self, outputs: list[str]) -> None:
        """Show the rest."""
        self._show([output.splitlines(keepends=True) for output in outputs])

    def _show(self, lines: list[list[str]]) -> None:
        new = [(rank, "".join(each[self._shown[rank] :])) for rank, each in enumerate(lines)]
        self._shown = [max(shown, len(each)) for shown, each in zip(self._shown, lines, strict=True)]
        for text, those in alike((rank, text) for rank, text in new if text).items():
            print("".join(f"{named(those)}: {line}" for line in text.splitlines(keepends=True)), end="", flush=True)


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
        names = {name: value for name, value in _names.items() if not name.startswith("__")}
        both = [name for name, value in names.items() if function.__globals__.setdefault(name, value) is not value]
        if both:
            print(f"the notebook's {', '.join(both)} is used, not what a cell has defined here under that name")
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
