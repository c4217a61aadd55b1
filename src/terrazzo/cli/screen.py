"""Code that all commands share: printing, reporting errors, and a progress bar."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from terrazzo._meant import refused
from terrazzo.errors import TerrazzoError

OUT = Console()
ERR = Console(stderr=True)

_MOMENT = 0.5  # seconds without a word


def shown(text: str) -> str:
    r"""Text from a checkpoint, safe for a terminal: control characters are escaped.

    >>> shown("red: \x1b[31m, [bold]")
    'red: \\x1b[31m, [bold]'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def say(text: str, *, on: Console = OUT, style: str | None = None) -> None:
    """Print text from any source literally, without markup and control characters."""
    on.print(shown(text), style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


CheckpointPath = Annotated[str, typer.Argument(help="The checkpoint: a folder, a file or a URL.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(document: Any) -> None:
    try:
        text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    except UnicodeEncodeError:  # a name that is no text, in a file of another program
        text = json.dumps(msgspec.to_builtins(document), indent=2, ensure_ascii=False)
    # JSON escapes some control characters; the others are escaped here in the same way.
    typer.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


@contextmanager
def said_on_stderr(wanted: bool) -> Iterator[None]:
    """Inside, what this process and those that it starts write to stdout goes to stderr: stdout is for JSON."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def errors() -> Iterator[None]:
    """Print terrazzo's and the system's errors as one line, with exit status 2."""
    try:
        yield
    except BrokenPipeError:
        raise  # typer ends the command, and says nothing: the reader of its output, as `head`, has had enough
    except (TerrazzoError, OSError) as error:
        say(f"error: {error}{refused(error)}", on=ERR, style="red")
        raise typer.Exit(2) from error


@contextmanager
def paused_collector() -> Iterator[None]:
    """Inside, Python's garbage collector does not run: what a command lists lives until its end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Bar:
    """A bar of progress in bytes, which moves to and fro until it has a total."""

    def __init__(self, shown: Progress, what: str) -> None:
        self._shown, self._task = shown, shown.add_task(what, total=None)

    def of(self, total: int) -> None:
        """Say how many bytes there are."""
        self._shown.update(self._task, total=total)

    def advance(self, nbytes: int) -> None:
        """So many more are done."""
        self._shown.advance(self._task, nbytes)


@contextmanager
def progress(what: str) -> Iterator[Bar]:
    """A bar on stderr, if that is a terminal and what is inside takes longer than a moment."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = Progress(*columns, TimeElapsedColumn(), console=ERR, transient=True)
    starter = threading.Timer(_MOMENT, shown.start)
    starter.daemon = True
    if ERR.is_terminal:
        starter.start()
    try:
        yield Bar(shown, what)
    finally:
        starter.cancel()
        if starter.is_alive():
            starter.join()  # it may be about to show the bar
        if shown.live.is_started:
            shown.stop()
